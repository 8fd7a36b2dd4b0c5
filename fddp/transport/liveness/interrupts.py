"""Exceptions that interrupt a wait for other ranks, and errors of backends and of user code."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from fddp.errors import FddpError
from fddp.transport.lifetime.threads import ThreadStartError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fddp.transport.liveness.failure import Failure

_OWN_MODULES = {"fddp", "torch", *sys.stdlib_module_names}  # raise errors of backends
_HANDLERS = "torch.utils.data."  # its signal handlers report the end of workers


class DeadlineExceededError(RuntimeError):
    """An operation did not finish in time."""


class PeerFailureError(RuntimeError):
    """Another rank reported a failure while this one waited."""


class ProcessExitedError(RuntimeError):
    """The processes of `ranks` have ended."""

    def __init__(self, ranks: tuple[int, ...], why: str) -> None:
        super().__init__(why)
        self.ranks = ranks


class PeerAbortedError(RuntimeError):
    """Another rank has failed the step that this one is in, and takes no part in the operation."""


class CommunicatorFailedError(RuntimeError):
    """A communicator has found the cause of its failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class OperationMismatchError(RuntimeError):
    """Ranks met in different operations, which `str` describes. The communicator can still be
    used."""


_NO_RESOURCES = ("can't start new thread", "Resource temporarily unavailable", "Cannot allocate")


def is_of_this_rank(error: BaseException) -> bool:
    """Return True if an error of an opening concerns this rank alone: of a signal handler, or for
    lack of memory or threads.

    >>> is_of_this_rank(KeyboardInterrupt()), is_of_this_rank(RuntimeError("Connection closed"))
    (True, False)
    """
    if isinstance(error, ThreadStartError | MemoryError) or not isinstance(error, Exception):
        return True
    if isinstance(error, FddpError):
        return False
    return from_user_code(error) or any(words in str(error) for words in _NO_RESOURCES)


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
