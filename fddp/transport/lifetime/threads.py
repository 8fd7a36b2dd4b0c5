"""Background threads that end before the interpreter does.

[Note: exits] A thread that returns from a function of torch to a finalized interpreter is unwound
through that function, which ends the process with SIGABRT instead of its own exit code. Threads
that call such functions are started here. Before the interpreter ends they are stopped and joined,
with a time limit longer than torch's functions usually take, and than ranks that are left try to
make a group (`c10d/ranks_left.py`), which can't be stopped. A thread that is blocked on a silent
store outlasts the limit: it does not return to the interpreter while the store is silent.

This is done by a `weakref.finalize`. Finalizers are called by an `atexit` handler that `import
torch` registers. Handlers are called in reverse order, so those of callers, which may close
transports and thereby start threads, are called before it. The finalizer stays when the last thread
ends: `weakref` fails if another thread removes one while the handler looks through them.

[Note: failed starts] For lack of memory a new thread may end before it has reported its start, for
which `threading.Thread.start` waits without a limit. The function by which the interpreter began
the thread has then released a lock, or was dropped without having been called.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fddp.errors import FddpError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_END_S = 12.0  # time limit for joining all threads
_LOOK_S = 0.05  # between two looks at a thread that starts


class ThreadStartError(FddpError):
    """This process can't start another thread."""


_stops: dict[threading.Thread, Callable[[], None]] = {}  # of the threads that run
_at_exit: weakref.finalize[..., Any] | None = None


def start_thread(run: Callable[[], None], name: str, stop: Callable[[], None]) -> threading.Thread:
    """Start a thread that is stopped before the interpreter ends. `stop` makes `run` return soon;
    it is called on another thread.

    Do not hold locks: the garbage collector may run on the new thread and finalize objects that
    take them.
    """
    global _at_exit
    if _at_exit is None or not _at_exit.alive:
        _at_exit = weakref.finalize(_end_all, _end_all)
    thread = _Thread(target=_run, args=(run,), name=name, daemon=True)
    _stops[thread] = stop
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        _stops.pop(thread, None)
        raise ThreadStartError(
            f"the thread {name!r} can't be started ({str(error) or type(error).__name__}); raise "
            f"the limits of this process (ulimit -u, ulimit -v), or free threads and memory"
        ) from error
    except BaseException:
        _stops.pop(thread, None)
        raise
    return thread


class _Thread(threading.Thread):
    """A thread whose failed start is an error; see [Note: failed starts]."""

    def start(self) -> None:
        begin: Any = super()._bootstrap  # type: ignore[misc]
        over = threading.Lock()
        over.acquire()

        def bootstrap() -> None:
            try:
                begin()
            finally:
                over.release()

        # Names in all versions of `threading`: `start` calls the first, and waits for the second.
        self._bootstrap = bootstrap
        self._started = _Started(self, weakref.ref(bootstrap), over)
        del bootstrap
        super().start()


class _Started(threading.Event):
    """Event of the start of a thread. A wait without a limit ends if the thread has."""

    def __init__(self, thread: _Thread, bootstrap: weakref.ref[Any], over: threading.Lock) -> None:
        super().__init__()
        self._thread: _Thread | None = thread
        self._function, self._over = bootstrap, over

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            return super().wait(timeout)
        thread, self._thread = self._thread, None
        if thread is not None:
            del thread._bootstrap  # the interpreter has the only reference now
        while not super().wait(_LOOK_S):
            if self._function() is None or not self._over.locked():
                raise MemoryError("it ended before it began to run")
        return True


def _run(run: Callable[[], None]) -> None:
    try:
        run()
    finally:
        _stops.pop(threading.current_thread(), None)


def _end_all() -> None:
    until_s = time.perf_counter() + _END_S
    # After a fork the parent's threads are not alive, and their locks may be held.
    threads = [(thread, stop) for thread, stop in list(_stops.items()) if thread.is_alive()]
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
