"""Finalization of objects that were dropped without `close`, on a separate thread.

[Note: collected] The garbage collector runs at any point of any thread, whatever locks that thread
holds, also in a thread that is being started while another one waits for its start. Closing takes
locks and starts threads. Finalizers therefore only put a callback into a queue, without a lock, and
a thread that was started before runs it.

They are weak references with a callback, not `weakref.finalize`, whose registry must not change on
that thread while the main one looks through it at exit.
"""

from __future__ import annotations

import itertools
import queue
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

from fddp.transport.lifetime import threads
from fddp.transport.lifetime.fork import register_fork_owner

if TYPE_CHECKING:
    from collections.abc import Callable

    _Dropped = queue.SimpleQueue[Callable[[], None] | None]


class _Closer:
    """The thread, which runs while there are objects to watch."""

    def __init__(self) -> None:
        self.disown()

    def disown(self) -> None:
        """Reset in a forked process, see [Note: forks]. The parent closes its own objects."""
        self._lock = threading.RLock()
        self._dropped: _Dropped = queue.SimpleQueue()
        self._references: dict[int, weakref.ref[Any]] = {}  # to the objects, by number
        self._numbers = itertools.count()
        self._watched = 0
        self._has_thread = self._ended = False

    def watch(self, thing: object, close: Callable[[], None]) -> Callable[[], None]:
        with self._lock:
            starts, self._has_thread = not self._has_thread, True
            self._watched += 1
        if starts:
            self._start()
        number, references, dropped = next(self._numbers), self._references, self._dropped

        def end(close: Callable[[], None]) -> None:
            if references.pop(number, None) is not None:  # once
                dropped.put(close)

        references[number] = weakref.ref(thing, lambda _: end(close))
        return lambda: end(lambda: None)

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
            except Exception:  # there is no caller
                sys.excepthook(*sys.exc_info())
            del close  # releases what it refers to
            with self._lock:
                self._watched -= 1
                self._has_thread = self._watched > 0
                if not self._has_thread:
                    return


_closer = _Closer()


def on_finalize(thing: object, close: Callable[[], None]) -> Callable[[], None]:
    """Call `close` on another thread after `thing` was collected, unless the process ends first.

    `close` must not refer to `thing`. Returns a function that cancels the callback; a second call
    of it does nothing.
    """
    return _closer.watch(thing, close)
