"""The backend of a process group of `torch.distributed`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    import torch


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend of `group` for a device, for which torch has no public accessor."""
    if type(group) is not dist.ProcessGroup:
        return group  # of a class written in Python, which carries out its collectives itself
    backend = group._get_backend(device)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps each backend.
    return getattr(backend, "wrapped_pg", backend)
