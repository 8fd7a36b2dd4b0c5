"""Registration of the backend "fddp" at the end of `import torch`, without importing the library.

torch calls `register` through the entry point group `torch.backends`, unless
`TORCH_DEVICE_BACKEND_AUTOLOAD=0`. `import fddp` registers the same backend.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Make `torch.distributed.init_process_group("fddp")` possible; a second call does nothing."""
    import torch.distributed as dist

    if dist.is_available() and "FDDP" not in dist.Backend._plugins:
        # For the default backend of a group of "cpu:fddp", torch before 2.15 looks up the first
        # name here among names in lower case, though it registers them in upper case.
        plugin = dist.Backend._BackendPlugin(_create, extended_api=True)
        dist.Backend._plugins = {"fddp": plugin, **dist.Backend._plugins}
        dist.Backend.register_backend("fddp", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any = None) -> Any:
    from fddp.transport.backend.creation import create_backend

    return create_backend(options, backend_options)
