"""Background threads that end before the interpreter does.

[Note: exits] A thread that returns from a function of torch to a finalized interpreter is unwound
through that function, which ends the process with SIGABRT instead of its own exit code. Threads
that call such functions are started here. Before the interpreter ends they are stopped and joined,
with a time limit longer than torch's functions usually take. A thread that is blocked on a silent
store is not joined: it does not return to the interpreter while the store is silent.

This is done by a `weakref.finalize` that exists while there are such threads. Finalizers are called
by an `atexit` handler that `import torch` registers. Handlers are called in reverse order, so those
of callers, which may close transports and thereby start threads, are called before it.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_END_S = 1.0  # time limit for joining all threads


class _Running:
    """Threads that run. An instance lives as long as one of its threads does."""

    def __init__(self) -> None:
        self.stops: dict[threading.Thread, Callable[[], None]] = {}
        self.at_exit = weakref.finalize(self, _end_all, self.stops)


_newest: weakref.ref[_Running] | None = None


def start_thread(run: Callable[[], None], name: str, stop: Callable[[], None]) -> threading.Thread:
    """Start a thread that is stopped before the interpreter ends. `stop` makes `run` return soon;
    it is called on another thread.

    Do not hold locks: the garbage collector may run on the new thread and finalize objects that
    take them.
    """
    global _newest
    running = None if _newest is None else _newest()
    if running is None or not running.at_exit.alive:
        running = _Running()
        _newest = weakref.ref(running)
    thread = threading.Thread(target=_run, args=(run, running), name=name, daemon=True)
    running.stops[thread] = stop
    try:
        thread.start()
    except BaseException:
        running.stops.pop(thread, None)
        raise
    return thread


def _run(run: Callable[[], None], running: _Running) -> None:
    try:
        run()
    finally:
        running.stops.pop(threading.current_thread(), None)


def _end_all(stops: dict[threading.Thread, Callable[[], None]]) -> None:
    until_s = time.perf_counter() + _END_S
    # After a fork the parent's threads are not alive, and their locks may be held.
    threads = [(thread, stop) for thread, stop in list(stops.items()) if thread.is_alive()]
    for _, stop in threads:
        stop()
    for thread, _ in threads:
        thread.join(max(until_s - time.perf_counter(), 0.0))


class Call(Generic[T]):
    """A call of `fn` on another thread. The lock `ended` is held until the call has ended."""

    def __init__(self, fn: Callable[[], T]) -> None:
        self.ended = threading.Lock()
        self.ended.acquire()
        self._fn = fn
        self._results: list[T] = []
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._results.append(self._fn())
        except Exception as error:
            self._error = error
        self.ended.release()

    def result(self) -> T:
        """Return the result or raise the error of a call that has ended, once."""
        error, self._error = self._error, None
        if error is None:
            return self._results.pop()
        try:
            raise error
        finally:
            del error  # breaks the cycle with its traceback
