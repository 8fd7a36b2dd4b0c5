"""Store requests with a time limit.

[Note: a silent store] A store is served by one process, often by rank 0. While that process is
stopped, each request blocks: the store's own timeout applies only to keys that do not exist yet.
Requests are therefore issued on a separate thread, and the caller waits for that thread with a time
limit. A request that was issued can't be cancelled; no other one is issued until it ends.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from fddp.transport.lifetime import threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REQUEST_S = 2.0  # default time limit
GLANCE_S = 0.25  # time limit of requests whose answer is optional
_LEAST_S = 0.02  # time limit behind a request that is already late
_IDLE_S = 0.1  # idle time after which the thread ends; it starts in less than a millisecond
_END_S = 0.1  # longest wait for the end of the thread

T = TypeVar("T")


class StoreTimeoutError(RuntimeError):
    """The store did not answer in time."""

    def __init__(self) -> None:
        super().__init__("the group's store does not answer")


class StoreClientThread:
    """A thread that issues requests to the stores of one job, in order. It ends when idle."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._requests: queue.SimpleQueue[_Request[Any] | None] = queue.SimpleQueue()
        self._serving_pid = 0  # process of the thread; a forked process has none
        self._pending_since_s: float | None = None
        self._thread: threading.Thread | None = None

    def call(self, fn: Callable[[], T], within_s: float) -> T:
        """Call `fn` on the thread; return its result or raise its exception.

        Raises:
            StoreTimeoutError: `fn` did not return within `within_s` seconds. It is not called if
                it had not been started by then.
        """
        request = _Request(fn)
        since_s = self._pending_since_s
        if since_s is not None:
            within_s = max(_LEAST_S, min(within_s, since_s + within_s - time.perf_counter()))
        starts = False
        try:
            with self._lock:
                self._requests.put(request)
                starts = self._serving_pid != os.getpid()
                self._serving_pid = os.getpid()
            if starts:
                self._thread = threads.start_thread(
                    self._run, "fddp-store", partial(self._requests.put, None)
                )
        except threads.ThreadStartError:
            # Calls wait on this thread then, without a limit.
            self._serving_pid = 0
            self._run_all()
        except BaseException:  # of a signal handler, at any of these lines
            if starts:
                self._serving_pid = 0
            raise
        return request.wait(within_s)

    def end(self) -> None:
        """End the thread unless a request is pending; the next request starts another one."""
        thread = self._thread
        if thread is not None and thread.is_alive() and self._pending_since_s is None:
            self._requests.put(None)
            if threading.current_thread() is not thread:
                thread.join(_END_S)

    def wake(self) -> None:
        """End the thread if it is idle. Takes no lock, so that finalizers may call it."""
        self._requests.put(None)

    def _run_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while (request := self._requests.get_nowait()) is not None:
                request.run()

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
            self._pending_since_s = time.perf_counter()
            request.run()
            self._pending_since_s = None
            del request  # releases what `fn` refers to


class _Request(threads.Call[T]):
    _abandoned = False

    def run(self) -> None:
        if not self._abandoned:
            super().run()

    def wait(self, within_s: float) -> T:
        try:
            done = self.ended.acquire(timeout=max(within_s, 0.0))
        finally:
            self._abandoned = True
        if not done:
            raise StoreTimeoutError
        return self.result()


class BoundedStore:
    """A store, or a part of it, whose requests have a time limit. Errors of the store propagate.
    `raw` is the wrapped store."""

    def __init__(
        self, store: dist.Store, client: StoreClientThread, within_s: float = REQUEST_S
    ) -> None:
        self.raw = store
        self._client = client
        self._within_s = within_s

    def within(self, within_s: float) -> BoundedStore:
        return BoundedStore(self.raw, self._client, within_s)

    def end(self) -> None:
        """End the thread of requests, see `StoreClientThread.end`."""
        self._client.end()

    def prefixed(self, prefix: str) -> BoundedStore:
        return BoundedStore(dist.PrefixStore(prefix, self.raw), self._client, self._within_s)

    def check(self, keys: list[str]) -> bool:
        return self._client.call(lambda: self.raw.check(keys), self._within_s)

    def get(self, key: str) -> bytes:
        return self._client.call(lambda: self.raw.get(key), self._within_s)

    def set(self, key: str, value: str) -> None:
        self._client.call(lambda: self.raw.set(key, value), self._within_s)

    def add(self, key: str, number: int) -> int:
        return self._client.call(lambda: self.raw.add(key, number), self._within_s)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self._client.call(lambda: self.raw.compare_set(key, expected, value), self._within_s)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete keys; some stores raise NotImplementedError."""
        self._client.call(lambda: [self.raw.delete_key(key) for key in keys], self._within_s)

    def append(self, key: str, value: str) -> None:
        """Append to a value; some stores raise RuntimeError."""
        self._client.call(
            lambda: self.raw.append(key, value),  # type: ignore[attr-defined]
            self._within_s,
        )


_clients: weakref.WeakKeyDictionary[Any, StoreClientThread] = weakref.WeakKeyDictionary()


def client_of(group: Any) -> StoreClientThread:
    """Return the request thread of the job of `group`.

    All groups of a job share the default group's store, so one thread serves them all.
    """
    with contextlib.suppress(ValueError):  # no default group
        group = dist.group.WORLD or group
    client = _clients.get(group)
    if client is None:
        client = _clients.setdefault(group, StoreClientThread())
        weakref.finalize(group, client.wake).atexit = False
    return client
