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
from typing import TYPE_CHECKING

from fddp.transports.forking import own

if TYPE_CHECKING:
    from collections.abc import Callable


class _Closer:
    """The thread, which is there for as long as there is something that it may have to close."""

    def __init__(self) -> None:
        self.disown()

    def disown(self) -> None:
        """See [Note: forks]. What the parent has dropped is the parent's to close."""
        self._lock = threading.Lock()
        self._dropped: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._watched = 0
        self._thread: threading.Thread | None = None

    def watch(self, thing: object, close: Callable[[], None]) -> None:
        with self._lock:
            self._watched += 1
            if self._thread is None:
                own(self)
                self._thread = threading.Thread(target=self._run, name="fddp-closer", daemon=True)
                self._thread.start()
        weakref.finalize(thing, self._dropped.put, close).atexit = False

    def _run(self) -> None:
        while True:
            close = self._dropped.get()
            try:
                close()
            except Exception:  # there is nobody to raise it to
                sys.excepthook(*sys.exc_info())
            del close  # and what it refers to
            with self._lock:
                self._watched -= 1
                if self._watched == 0:
                    self._thread = None
                    return


_closer = _Closer()


def when_collected(thing: object, close: Callable[[], None]) -> None:
    """Calls `close` some time after `thing` was dropped; not when the process ends before.

    Args:
        thing: that can be referred to weakly.
        close: what to call then; must not refer to `thing`.
    """
    _closer.watch(thing, close)
