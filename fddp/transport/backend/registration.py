"""Registration of the backend "fddp" with `torch.distributed`, all that `import fddp` does."""

from __future__ import annotations

import torch.distributed as dist

from fddp.transport.backend.creation import create_backend


def register() -> None:
    """Make `torch.distributed.init_process_group("fddp")` possible; a second call does nothing."""
    if dist.is_available() and "FDDP" not in dist.Backend._plugins:
        # For the default backend of a group of "cpu:fddp", torch before 2.15 looks up the first
        # name here among names in lower case, though it registers them in upper case.
        plugin = dist.Backend._BackendPlugin(create_backend, extended_api=True)
        dist.Backend._plugins = {"fddp": plugin, **dist.Backend._plugins}
        dist.Backend.register_backend("fddp", create_backend, extended_api=True, devices=["cpu"])
