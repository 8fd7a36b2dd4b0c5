"""Questions to a store that is silent, and openings that others give up, end in time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from fddp.transport.c10d.rendezvous import AbortableStore, connect_with_abort
from fddp.transport.liveness.bounded_store import BoundedStore, StoreClientThread, StoreTimeoutError
from fddp.transport.liveness.interrupts import DeadlineExceededError, PeerFailureError
from tests.support.polling import soon

LONG_S = 20.0  # what a wait takes that is not ended


class Host:
    """A store that can be silent."""

    def __init__(self) -> None:
        self.speaks = threading.Event()
        self.speaks.set()
        self.asked: list[str] = []
        self._store = dist.HashStore()

    def add(self, key: str, number: int) -> int:
        self.asked.append(key)
        self.speaks.wait(LONG_S)
        return self._store.add(key, number)

    def get(self, key: str) -> bytes:
        raise RuntimeError(f"{key} is not there")


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.speaks.set()


def asked(host: Any) -> BoundedStore:
    return BoundedStore(host, StoreClientThread(), 0.2)


def test_a_silent_store_is_not_waited_for(host: Host) -> None:
    store = asked(host)
    assert store.add("a", 1) == 1
    host.speaks.clear()
    begin_s = time.perf_counter()
    with pytest.raises(StoreTimeoutError, match="the group's store does not answer"):
        store.add("b", 1)
    for _ in range(5):  # no query waits behind one that is open for too long
        with pytest.raises(StoreTimeoutError):
            store.within(1.0).add("c", 1)
    assert time.perf_counter() - begin_s < 4.0, "1 s for all of them"
    host.speaks.set()
    assert store.within(LONG_S).add("a", 1) == 2
    assert host.asked == ["a", "b", "a"], "what was given up before it was put is never put"


def test_store_errors_pass_through(host: Host) -> None:
    with pytest.raises(RuntimeError, match="x is not there"):
        asked(host).get("x")


def test_the_thread_ends_when_idle(host: Any) -> None:
    client = StoreClientThread()
    for _ in range(2):
        BoundedStore(host, client, LONG_S).add("a", 1)
        assert client._serving_pid == os.getpid()
        assert soon(lambda: client._serving_pid == 0)


def test_an_opening_ends_with_failures_seen_meanwhile() -> None:
    """Here a rank would wait for an address that is never set."""
    threads: list[threading.Thread] = []

    def connect(meeting: AbortableStore) -> bytes:
        threads.append(threading.current_thread())
        return meeting.get("1")

    def look() -> None:
        raise PeerFailureError("another rank reported a failure")

    begin_s = time.perf_counter()
    with pytest.raises(PeerFailureError):
        connect_with_abort(connect, dist.HashStore(), LONG_S, look)
    threads[0].join(LONG_S / 2)
    assert not threads[0].is_alive(), "its store has reported the abort"
    assert time.perf_counter() - begin_s < LONG_S / 2


def test_an_opening_ends_in_time() -> None:
    done = threading.Event()
    with pytest.raises(DeadlineExceededError, match=r"timed out after 0\.3 s"):
        connect_with_abort(lambda meeting: done.wait(LONG_S), dist.HashStore(), 0.3, lambda: None)
    done.set()


def test_an_opening_returns_the_created_object() -> None:
    store = dist.HashStore()

    def connect(meeting: AbortableStore) -> tuple[bytes, bool]:
        meeting.set("1", "here")
        return meeting.get("1"), meeting.check(["2"])

    made, meeting = connect_with_abort(connect, store, LONG_S, lambda: None)
    assert made == (b"here", False)
    assert meeting.add("3", 2) == 2

    def fail(meeting: AbortableStore) -> None:
        raise ValueError("no such device")

    with pytest.raises(ValueError, match="no such device"):
        connect_with_abort(fail, store, LONG_S, lambda: None)
