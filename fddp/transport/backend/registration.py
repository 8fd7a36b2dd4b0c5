"""Registration of the backend "fddp" with `torch.distributed`."""

from __future__ import annotations

import torch.distributed as dist

from fddp.transport.backend.creation import create_backend

NAME = "fddp"


def register() -> None:
    """Make `torch.distributed.init_process_group("fddp")` possible; a second call does nothing."""
    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create_backend, extended_api=True, devices=["cpu"])
