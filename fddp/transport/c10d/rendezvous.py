"""Connection of a backend with concurrent checks of the other ranks.

[Note: connecting] A backend that connects its ranks blocks in its constructor, and checks neither
the other ranks' failure reports nor their processes. gloo also occupies the connection to the
group's store while it waits for a key. The constructor therefore runs on a separate thread, with a
store that polls for keys and can be aborted. If it already has the keys and waits for another rank
to answer, the thread lasts until the backend's own timeout.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fddp.transport.lifetime import threads
from fddp.transport.liveness.interrupts import DeadlineExceededError
from fddp.transport.liveness.membership import CHECK_INTERVAL_S

if TYPE_CHECKING:
    from collections.abc import Callable

_LONGEST_PAUSE_S = 0.01  # between two polls for a key


class AbortableStore(dist.Store):
    """A store whose waits can be aborted, and end `timeout_s` after its construction."""

    def __init__(self, store: dist.Store, timeout_s: float) -> None:
        super().__init__()
        self._aborted = False
        self.keys_set: list[str] = []  # by this rank
        self._store = store
        self._deadline_s = time.perf_counter() + timeout_s

    def abort(self) -> None:
        """End current and future waits for keys."""
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

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    deleteKey = delete_key  # the name that the extension calls  # noqa: N815

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
    """Return the result of `connect` and its store, which must live as long as the result.

    Args:
        connect: creates the backend; called on another thread.
        store: part of the group's store for this backend only.
        timeout_s: time limit, after which DeadlineExceededError is raised.
        check_peers: called repeatedly during the wait; an exception aborts the connection.
    """
    abortable = AbortableStore(store, timeout_s)
    made = call_with_checks(lambda: connect(abortable), timeout_s, check_peers, abortable.abort)
    return made, abortable


def call_with_checks(
    call: Callable[[], Any],
    timeout_s: float,
    check_peers: Callable[[], None],
    abort: Callable[[], None] = lambda: None,
) -> Any:
    """Return the result of a function that blocks until other ranks call it.

    Args:
        call: called on another thread.
        timeout_s: time limit, after which DeadlineExceededError is raised.
        check_peers: called repeatedly during the wait; may raise.
        abort: called if the wait ends with an error; makes `call` return soon where it can.
    """
    deadline_s = time.perf_counter() + timeout_s
    running = threads.Call(call)
    threads.start_thread(running.run, "fddp-connecting", abort)
    try:
        while not running.ended.acquire(timeout=CHECK_INTERVAL_S):
            check_peers()
            if time.perf_counter() > deadline_s + CHECK_INTERVAL_S:  # later than a store
                raise DeadlineExceededError(f"timed out after {timeout_s} s")
    except BaseException:
        abort()
        raise
    return running.result()
