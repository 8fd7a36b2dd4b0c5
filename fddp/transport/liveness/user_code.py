"""Errors raised by the caller's code, as opposed to the backend's."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_OWN_MODULES = {"fddp", "torch", *sys.stdlib_module_names}  # raise errors of backends
_HANDLERS = "torch.utils.data."  # its signal handlers report the end of workers


def from_user_code(error: Exception) -> bool:
    """Return True if a signal handler raised `error`: its traceback leads through user code."""
    trace = error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _OWN_MODULES or module.startswith(_HANDLERS):
            return True
        trace = trace.tb_next
    return False


@contextlib.contextmanager
def ignore_backend_errors(*others: type[Exception]) -> Iterator[None]:
    """Suppress `RuntimeError`, which stores and backends raise, and `others`.

    Errors raised by a signal handler of the user propagate.
    """
    kinds: tuple[type[Exception], ...] = (RuntimeError, *others)
    try:
        yield
    except kinds as error:
        if from_user_code(error):
            raise
