"""Limits of one run: time, and calls of torch."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple

from torch.overrides import TorchFunctionMode

from fddp.errors import ReplicationError
from fddp.testing.replication.lines import is_library

_POLL_S, _TRIES = 0.001, 1000
_AGAIN_S = 1.0
_JUMPS = 100


class Limit(NamedTuple):
    """Limit of a run: seconds of CPU time of its thread, and calls of functions of torch."""

    seconds: float
    calls: int = 1_000_000


NO_LIMIT = Limit(threading.TIMEOUT_MAX, sys.maxsize)


class TorchCalls(TorchFunctionMode):
    """Number of calls of functions of torch, and an end of the run if there are too many."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.count, self._most = 0, most

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch."""
        self.count += 1
        if self.count > self._most:
            raise _LimitExceeded
        return func(*args, **(kwargs or {}))


class _LimitExceeded(BaseException):  # no `Exception`, which the step might handle
    pass


def call_within(
    limit: Limit, fn: Callable[[], Any], observer: AbstractContextManager[Any]
) -> tuple[Any, int]:
    """Call a function in a context, and return its result and the number of its calls of torch.

    After the time an exception is raised in this thread, at its next instruction of Python.

    Raises:
        ReplicationError: it has exceeded a limit.
    """
    calls, ended, lock = TorchCalls(limit.calls), threading.Event(), threading.Lock()
    thread = threading.get_ident()
    clock = time.pthread_getcpuclockid(thread)  # other programs may run, too
    end_s = time.clock_gettime(clock) + limit.seconds

    def watch() -> None:
        wait_s, tries = limit.seconds, 0
        while not ended.wait(wait_s):
            wait_s = end_s - time.clock_gettime(clock)
            if wait_s > 0:
                continue
            wait_s, tries = _POLL_S, tries + 1
            with lock:
                if not ended.is_set() and _is_ready(thread, tries):
                    _raise_in(thread, _LimitExceeded)
                    wait_s = _AGAIN_S  # the step may handle it

    def end() -> None:
        with lock:
            ended.set()
        for _ in range(_JUMPS):  # at one of which an exception is raised that waits for it
            pass

    threading.Thread(target=watch, name="fddp-check-limit", daemon=True).start()
    try:
        try:
            with calls, observer:
                return fn(), calls.count
        finally:
            end()
    except _LimitExceeded as error:
        end()  # if it was raised before the first
        place = _place(error.__traceback__)
        raise ReplicationError(
            f"a run of the step did not end within {limit.seconds:g} s of CPU time (limit_s) and "
            f"{limit.calls} calls of torch; it was at {place}. If a loop depends on values that do "
            f"not make it end, pass others, as a function of the rank; else raise limit_s",
            line=place,
        ) from None


def _is_ready(thread: int, tries: int) -> bool:
    """Return True if a thread is in the user's code, where an exception breaks nothing of a
    library. After many tries it may be elsewhere, but not within an import."""
    frame = sys._current_frames().get(thread)
    inner = frame
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return False
        frame = frame.f_back
    return inner is None or tries > _TRIES or not is_library(inner.f_code.co_filename)


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Raise an exception in a thread."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def _place(raised_at: TracebackType | None) -> str:
    """Innermost line of the user's code."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(raised_at)]
    own = [(filename, line) for filename, line in frames if not is_library(filename)]
    filename, line = (own or frames)[-1]
    return f"{filename}:{line}"
