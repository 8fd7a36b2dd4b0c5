"""Questions to the store of a job that end in time, whoever hosts it.

[Note: a silent store] A store is served by one process, often by rank 0. While that is stopped,
each question waits for as long as it is: the store's own timeout holds only for keys that are not
there yet. So a thread of its own puts the questions, and who asks waits for the thread, no longer
than it may. A question that was put can't be taken back; while it is open no other one is put.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch.distributed as dist

from fddp.transport.lifetime import threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ANSWER_S = 2.0  # what a store gets to answer, unless more is at stake
GLANCE_S = 0.25  # the same where an operation goes on without the answer
_LEAST_S = 0.02  # what a question gets behind one that is open for too long already
_IDLE_S = 0.5  # without a question, until the thread ends

T = TypeVar("T")


class StoreTimeoutError(RuntimeError):
    """The store did not answer in time."""

    def __init__(self) -> None:
        super().__init__("the group's store does not answer")


class StoreClientThread:
    """A thread that puts questions to the stores of one job, in order; it ends when idle."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._requests: queue.SimpleQueue[_Request[Any] | None] = queue.SimpleQueue()
        self._serving_pid = 0  # the process that has the thread: one that is forked off has none
        self._open_since_s: float | None = None

    def call(self, fn: Callable[[], T], within_s: float) -> T:
        """What `fn` returns or raises.

        Raises:
            SilentError: it took longer than `within_s`; if it was not begun by then, it never is.
        """
        request = _Request(fn)
        since_s = self._open_since_s
        if since_s is not None:
            within_s = max(_LEAST_S, min(within_s, since_s + within_s - time.perf_counter()))
        with self._lock:
            self._requests.put(request)
            starts = self._serving_pid != os.getpid()
            self._serving_pid = os.getpid()
        if starts:
            self._start()
        return request.result(within_s)

    def _start(self) -> None:
        try:
            threads.start_thread(self._run, "fddp-store", partial(self._requests.put, None))
        except BaseException:
            self._serving_pid = 0
            raise

    def _run(self) -> None:
        while True:
            try:
                request = self._requests.get(timeout=_IDLE_S)
            except queue.Empty:
                request = None
            if request is None:
                with self._lock:
                    if self._requests.empty():
                        self._serving_pid = 0
                        return
                continue
            self._open_since_s = time.perf_counter()
            request.run()
            self._open_since_s = None
            del request  # and what it refers to


class _Request(Generic[T]):
    """One question, from the thread that waits to the thread that asks."""

    def __init__(self, fn: Callable[[], T]) -> None:
        self._fn = fn
        self._open = threading.Lock()
        self._open.acquire()
        self._abandoned = False
        self._results: list[T] = []
        self._error: Exception | None = None

    def run(self) -> None:
        if self._abandoned:
            return
        try:
            self._results.append(self._fn())
        except Exception as error:
            self._error = error
        self._open.release()

    def result(self, within_s: float) -> T:
        try:
            done = self._open.acquire(timeout=max(within_s, 0.0))
        finally:
            self._abandoned = True
        if not done:
            raise StoreTimeoutError
        error, self._error = self._error, None
        if error is None:
            return self._results[0]
        try:
            raise error
        finally:
            del error  # a cycle of it, its traceback and this frame


class BoundedStore:
    """A store, or a part of it, whose questions end in time. What a store raises passes through.

    Attributes:
        raw: the store itself.
    """

    def __init__(
        self, store: dist.Store, client: StoreClientThread, within_s: float = ANSWER_S
    ) -> None:
        self.raw = store
        self._client = client
        self._within_s = within_s

    def within(self, within_s: float) -> BoundedStore:
        """The same, whose questions may take so long."""
        return BoundedStore(self.raw, self._client, within_s)

    def prefixed(self, prefix: str) -> BoundedStore:
        """The keys that begin so."""
        return BoundedStore(dist.PrefixStore(prefix, self.raw), self._client, self._within_s)

    def check(self, keys: list[str]) -> bool:
        return self._client.call(lambda: self.raw.check(keys), self._within_s)

    def get(self, key: str) -> bytes:
        """A value that is there."""
        return self._client.call(lambda: self.raw.get(key), self._within_s)

    def set(self, key: str, value: str) -> None:
        self._client.call(lambda: self.raw.set(key, value), self._within_s)

    def add(self, key: str, number: int) -> int:
        return self._client.call(lambda: self.raw.add(key, number), self._within_s)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self._client.call(lambda: self.raw.compare_set(key, expected, value), self._within_s)

    def delete(self, keys: Sequence[str]) -> None:
        """Not every store can."""
        self._client.call(lambda: [self.raw.delete_key(key) for key in keys], self._within_s)

    def append(self, key: str, value: str) -> None:
        """Not every store can."""
        self._client.call(
            lambda: self.raw.append(key, value),  # type: ignore[attr-defined]
            self._within_s,
        )


_clients: weakref.WeakKeyDictionary[Any, StoreClientThread] = weakref.WeakKeyDictionary()


def client_of(group: Any) -> StoreClientThread:
    """The thread of the job that `group` is in: all its groups share the store of the default one,
    so that one that is silent is waited for once."""
    with contextlib.suppress(ValueError):  # there is no default group
        group = dist.group.WORLD or group
    return _clients.setdefault(group, StoreClientThread())
