"""Registration of the backend "fddp" with `torch.distributed`, all that `import fddp` does."""

from __future__ import annotations

import torch.distributed as dist

from fddp.transport.backend.creation import create_backend
from fddp.transport.torch_private import find_backend_by_lower_case


def register() -> None:
    """Make `torch.distributed.init_process_group("fddp")` possible; a second call does nothing."""
    if dist.is_available() and not hasattr(dist.Backend, "FDDP"):
        find_backend_by_lower_case("fddp", create_backend)
        dist.Backend.register_backend("fddp", create_backend, extended_api=True, devices=["cpu"])
