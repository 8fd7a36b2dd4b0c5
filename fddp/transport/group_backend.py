"""The backend of a process group of `torch.distributed`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend of `group` for a device, for which torch has no public accessor."""
    backend = group._get_backend(device)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps each backend.
    return getattr(backend, "wrapped_pg", backend)
