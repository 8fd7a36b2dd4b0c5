"""Open MPI's collectives by mpi4py, beside those of torch.

A benchmark that was started by `mpiexec` measures them as well:
`mpiexec --bind-to none -n 2 python -m benchmarks.collectives`. Ranks are not bound to cores, since
the threads of other contestants would then share the core of their rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fddp.cli.launch import launch

T = TypeVar("T")

NAME = "MPI"  # of its series
STARTED_BY_MPI = "OMPI_COMM_WORLD_RANK" in os.environ


def run_ranks(ranks: int, fn: Callable[..., T], *args: Any) -> T | None:
    """Run `fn(*args)` on each rank of a default group over gloo, of one thread each.

    The ranks are those of MPI if it has started this process. Otherwise this starts processes.

    Returns:
        Result of rank 0; None on other ranks of MPI.
    """
    if not STARTED_BY_MPI:
        return launch(ranks, fn, *args)[0]
    from mpi4py import MPI

    os.environ["TERM"] = "dumb"  # mpiexec would pass on every frame of a progress bar
    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    store = dist.TCPStore("127.0.0.1", 0, is_master=True) if world.rank == 0 else None
    port = world.bcast(None if store is None else store.port)
    store = store or dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    result = fn(*args)
    dist.destroy_process_group()
    return result if world.rank == 0 else None


def prepare(collective: str, nbytes: int) -> Callable[[], object]:
    """Return a blocking call on tensors in ordinary memory.

    Args:
        collective: a name of `benchmarks.collectives`.
        nbytes: size of the larger of input and output, of float32.
    """
    from mpi4py import MPI

    def buffer(numel: int) -> list[Any]:
        return [torch.zeros(numel).numpy(), MPI.FLOAT]

    world, in_place = MPI.COMM_WORLD, MPI.IN_PLACE
    part = max(1, nbytes // 4 // world.size)
    whole, own = buffer(nbytes // 4), buffer(part)
    parts, others = buffer(part * world.size), buffer(part * world.size)

    def there_and_back() -> None:
        if world.rank == 0:
            world.Send(whole, 1)
            world.Recv(whole, 1)
        elif world.rank == 1:
            world.Recv(whole, 0)
            world.Send(whole, 0)

    calls: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: world.Allreduce(in_place, whole),
        "all-gather": lambda: world.Allgather(own, parts),
        "reduce-scatter": lambda: world.Reduce_scatter_block(parts, own),
        "broadcast": lambda: world.Bcast(whole, 0),
        "all-to-all": lambda: world.Alltoall(parts, others),
        "there and back": there_and_back,
    }
    return calls[collective]
