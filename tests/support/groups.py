"""Groups of processes or of threads: rank and size, time limits, RPC."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def rank_of(group: Any) -> int:
    """Return the caller's rank in the group."""
    return group.rank if isinstance(group.rank, int) else int(group.rank())


def size_of(group: Any) -> int:
    """Return the number of ranks in the group."""
    return group.size if isinstance(group.size, int) else int(group.size())


def impatient(timeout_s: float = 0.3) -> Any:
    """A new group of all ranks, once all have it, whose operations time out soon.

    For tests in which an operation waits in vain. On a loaded machine, one that does not may time
    out as well.
    """
    group = dist.new_group()
    dist.barrier()
    shorten(group, timeout_s)
    return group


def shorten(group: Any, timeout_s: float = 0.3) -> None:
    """Let later operations of a group time out soon."""
    distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def init_rpc(rank: int, shared_file: str) -> None:
    """Start RPC between two processes, as distributed autograd needs it."""
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{shared_file}")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
