"""Connecting a backend while looking at what happens to the other ranks.

[Note: connecting] A backend that connects its ranks to each other blocks in its constructor, and
looks neither at what other ranks tell nor at their processes; gloo moreover keeps the connection to
the group's store to itself while it waits for a key. So it runs on a thread of its own, with a
store that waits for keys by asking again and again, which ends once the opening is given up. Where
it has the keys and waits for another rank to answer, the thread lasts until the backend's own
timeout.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fddp.transport.lifetime import threads
from fddp.transport.liveness.interrupts import DeadlineExceededError

if TYPE_CHECKING:
    from collections.abc import Callable

_CHECK_INTERVAL_S = 0.25  # how often the rank looks around meanwhile
_LONGEST_PAUSE_S = 0.01  # from one question for a key to the next


class AbortableStore(dist.Store):
    """Where ranks find each other's addresses: a part of a store, until it is given up.

    Args:
        store: the part.
        timeout_s: the longest that a key is waited for.

    Attributes:
        keys_set: keys that this rank has set.
    """

    def __init__(self, store: dist.Store, timeout_s: float) -> None:
        super().__init__()
        self._aborted = False
        self.keys_set: list[str] = []
        self._store = store
        self._deadline_s = time.perf_counter() + timeout_s

    def abort(self) -> None:
        """Ends waits for keys, also those to come."""
        self._aborted = True

    def set(self, key: str, value: str) -> None:
        self.keys_set.append(key)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, number: int) -> int:
        return self._store.add(key, number)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        pause_s = 0.0005
        while not self._store.check(keys):
            if self._aborted or time.perf_counter() > self._deadline_s:
                raise DeadlineExceededError(f"no rank has set {keys[0]}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def connect_with_abort(
    connect: Callable[[AbortableStore], Any],
    store: dist.Store,
    timeout_s: float,
    check_peers: Callable[[], None],
) -> tuple[Any, AbortableStore]:
    """The backend that `connect` makes, and the store, which must live as long as it.

    Args:
        connect: makes it; runs on another thread.
        store: a part of the group's store that belongs to this backend alone.
        timeout_s: the longest to wait.
        check_peers: called now and then meanwhile; what it raises ends the opening.

    Raises:
        LateError: the time is over.
        RuntimeError: what `connect` or `check_peers` raised.
    """
    abortable = AbortableStore(store, timeout_s)
    deadline_s = time.perf_counter() + timeout_s
    attempt = _Attempt(connect, abortable)
    try:
        while not attempt.ended.acquire(timeout=_CHECK_INTERVAL_S):
            check_peers()
            if time.perf_counter() > deadline_s:
                raise DeadlineExceededError(f"timed out after {timeout_s} s")
    except BaseException:
        abortable.abort()
        raise
    return attempt.result(), abortable


class _Attempt:
    """The thread that connects."""

    def __init__(self, connect: Callable[[AbortableStore], Any], store: AbortableStore) -> None:
        self.ended = threading.Lock()
        self.ended.acquire()
        self._results: list[Any] = []
        self._error: Exception | None = None
        threads.start_thread(partial(self._run, connect, store), "fddp-connecting", store.abort)

    def _run(self, connect: Callable[[AbortableStore], Any], store: AbortableStore) -> None:
        try:
            self._results.append(connect(store))
        except Exception as error:
            self._error = error
        self.ended.release()

    def result(self) -> Any:
        error, self._error = self._error, None
        if error is None:
            return self._results.pop()
        try:
            raise error
        finally:
            del error  # a cycle of it, its traceback and this frame
