"""Closes what was dropped without having been closed, on a thread of its own.

[Note: collected] The garbage collector runs amid anything, on any thread and whatever locks are
held there; a thread that has just been started, and for which another one waits, is such a place,
too. To close takes locks, and starts threads. So what is found by the collector is only put into a
queue, which takes no lock, and closed by a thread that has been waiting for it.
"""

from __future__ import annotations

import queue
import sys
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from fddp.transport.lifetime import threads
from fddp.transport.lifetime.fork import register_fork_owner

if TYPE_CHECKING:
    from collections.abc import Callable

    _Dropped = queue.SimpleQueue[Callable[[], None] | None]


class _Closer:
    """The thread, which is there for as long as there is something that it may have to close."""

    def __init__(self) -> None:
        self.disown()

    def disown(self) -> None:
        """See [Note: forks]. What the parent has dropped is the parent's to close."""
        self._lock = threading.RLock()
        self._dropped: _Dropped = queue.SimpleQueue()
        self._watched = 0
        self._has_thread = self._ended = False

    def watch(self, thing: object, close: Callable[[], None]) -> Callable[[], None]:
        with self._lock:
            starts, self._has_thread = not self._has_thread, True
            self._watched += 1
        if starts:
            self._start()
        finalizer = weakref.finalize(thing, self._dropped.put, close)
        finalizer.atexit = False
        return partial(_forget, finalizer, self._dropped)

    def _start(self) -> None:
        register_fork_owner(self)
        try:
            threads.start_thread(self._run, "fddp-closer", self._end)
        except BaseException:
            self._watched -= 1
            self._has_thread = False
            raise

    def _end(self) -> None:
        self._ended = True
        self._dropped.put(None)

    def _run(self) -> None:
        while not self._ended:
            close = self._dropped.get()
            if close is None:
                return
            try:
                close()
            except Exception:  # there is nobody to raise it to
                sys.excepthook(*sys.exc_info())
            del close  # and what it refers to
            with self._lock:
                self._watched -= 1
                self._has_thread = self._watched > 0
                if not self._has_thread:
                    return


def _forget(finalizer: weakref.finalize[Any, Any], dropped: _Dropped) -> None:
    if finalizer.detach() is not None:
        dropped.put(_nothing)


def _nothing() -> None:
    """Is left to close of what was closed."""


_closer = _Closer()


def on_finalize(thing: object, close: Callable[[], None]) -> Callable[[], None]:
    """Calls `close` some time after `thing` was dropped; not when the process ends before.

    Args:
        thing: that can be referred to weakly.
        close: what to call then; must not refer to `thing`.

    Returns:
        What to call where `thing` was closed by its owner; a second call does nothing.
    """
    return _closer.watch(thing, close)
