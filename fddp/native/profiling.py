"""Test for active profilers, before a scope is opened for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from fddp.native import extension


def is_profiled() -> bool:
    """Return True if scopes of `torch.profiler.record_function` are recorded.

    A scope costs microseconds even if nothing is recorded.

    Example:
        >>> is_profiled()
        False
    """
    return _test()()


@cache
def _test() -> Callable[[], bool]:
    found: Callable[[], bool] = extension.load().is_profiled
    return found
