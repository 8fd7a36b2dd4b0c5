"""Scopes that show in the profiles of `torch.profiler`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from fddp.native import extension

_NOTHING = nullcontext()


def profiled(name: str) -> AbstractContextManager[object]:
    """Return a scope as `torch.profiler.record_function`, at no cost while nobody records.

    Example:
        >>> with profiled("a step"):
        ...     pass
    """
    return torch.profiler.record_function(name) if extension.load().is_profiled() else _NOTHING
