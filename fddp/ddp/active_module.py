"""The wrapper whose forward pass the current thread runs, for `torch.compile`.

[Note: the active module]
Dynamo reads an attribute of torch's `DistributedDataParallel` to find out whether it compiles code
within the forward pass of a wrapped module. If it does, it splits the graph at bucket boundaries.
torch assigns the attribute around every forward pass. Each assignment to a class empties Python's
caches of attributes of all its subclasses, which costs a tenth of a small step. So the attribute
is assigned once, and again only after others have changed it: to an object that is false between
forward passes, and stands for the wrapper within them. It is reset once there is no wrapper left.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from fddp.core.plan.defaults import FIRST_MB, MIB
from fddp.native.untraced import untraced

_CALL_MODULE = "call the module within the wrapper"

_TorchDDP: Any = torch.nn.parallel.DistributedDataParallel


class _ActiveModule(threading.local):
    """Stands for `module`; false if that is None."""

    module: Any = None

    @property
    def bucket_bytes_cap(self) -> int:
        """Cap of the parts of a graph. Dynamo refuses one below that of its first part."""
        return max(int(self.module.bucket_bytes_cap), int(FIRST_MB * MIB))

    def __bool__(self) -> bool:
        return self.module is not None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


_active = _ActiveModule()
_wrappers: set[int] = set()  # their ids


def reset_after(wrapper: object) -> None:
    """Reset the attribute of torch's class once `wrapper` and all others are gone."""
    _wrappers.add(id(wrapper))
    weakref.finalize(wrapper, _forget, id(wrapper)).atexit = False


def _forget(wrapper: int) -> None:
    _wrappers.discard(wrapper)
    if not _wrappers and _TorchDDP._active_ddp_module is _active:
        _TorchDDP._active_ddp_module = None


@untraced(_CALL_MODULE)
def activate(module: Any) -> tuple[Any, Any]:
    """Make a wrapper the active one of this thread. Return what `restore` needs."""
    others = _TorchDDP._active_ddp_module
    if others is not _active:
        _TorchDDP._active_ddp_module = _active
    outer, _active.module = _active.module, module
    return outer, others


@untraced(_CALL_MODULE)
def restore(before: tuple[Any, Any]) -> None:
    """Restore the state before a call of `activate`, from its result."""
    _active.module, others = before
    if others is not _active and others is not None:  # of torch's own wrapper
        _TorchDDP._active_ddp_module = others
