"""Threads of the library end before the interpreter does.

[Note: exits] A thread that comes back from a function of torch to an interpreter that has ended is
unwound through that function, which ends the process with SIGABRT in place of its own exit code.
So threads that call such functions are started here: before the interpreter ends they are asked to
end, and waited for as long as a function of torch usually takes. One that waits for a store which
does not answer is left alone; it is out of the way for as long as the store is silent.
"""

from __future__ import annotations

import atexit
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_END_S = 1.0  # what all threads together get to end

_running: dict[threading.Thread, Callable[[], None]] = {}


def start_thread(run: Callable[[], None], name: str, stop: Callable[[], None]) -> threading.Thread:
    """Starts a thread that is ended before the interpreter ends. To be called under no lock: the
    garbage collector may run on a thread that starts, and close what takes the lock.

    Args:
        run: what it does.
        name: the thread's.
        stop: makes `run` return soon; called on another thread.
    """
    thread = threading.Thread(target=_run, args=(run,), name=name, daemon=True)
    _running[thread] = stop
    atexit.unregister(_end_all)  # the last one to be registered is called first
    atexit.register(_end_all)
    try:
        thread.start()
    except BaseException:
        _running.pop(thread, None)
        raise
    return thread


def _run(run: Callable[[], None]) -> None:
    try:
        run()
    finally:
        _running.pop(threading.current_thread(), None)


def _end_all() -> None:
    until_s = time.perf_counter() + _END_S
    # In a process that was forked off these are its parent's, of which locks may be held.
    threads = [(thread, stop) for thread, stop in list(_running.items()) if thread.is_alive()]
    for _, stop in threads:
        stop()
    for thread, _ in threads:
        thread.join(max(until_s - time.perf_counter(), 0.0))
