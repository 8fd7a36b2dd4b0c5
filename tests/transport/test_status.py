"""Status of other ranks, as reported to waiting ranks, its cost, and bounds on a silent store."""

from __future__ import annotations

import gc
import itertools
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fddp
from fddp.collectives.communicator import communicator_of
from fddp.telemetry.call_site import own_lines
from fddp.transport.c10d.rendezvous import AbortableStore, connect_with_abort
from fddp.transport.liveness import failure_detector, status, status_store
from fddp.transport.liveness.bounded_store import BoundedStore, StoreClientThread, StoreTimeoutError
from fddp.transport.liveness.interrupts import DeadlineExceededError, PeerFailureError
from fddp.transport.liveness.status_store import StoreStatusBoard
from tests.support.polling import soon
from tests.support.ranks import RankPool
from tests.support.source_lines import line_of

W = {"w": torch.ones(3)}


def board_of(sync: fddp.GradSync) -> StoreStatusBoard:
    board = sync._engine.transport.status.board
    assert isinstance(board, StoreStatusBoard)
    return board


# Polls


def test_polls_are_as_frequent_as_answers_need_and_a_store_can_serve() -> None:
    interval_s = status_store.poll_interval_s
    for timeout_s, size in itertools.product((0.5, 1.5, 8.0, 40.0, 60.0, 1800.0), (2, 16, 1000)):
        grace_s = min(failure_detector._GRACE_S, timeout_s / 2)
        assert interval_s(timeout_s, size) <= max(grace_s / 2, status_store._MIN_INTERVAL_S)
    for size in (2000, 5000):
        assert size / interval_s(1800.0, size) <= 1000.0
    assert interval_s(1800.0, 10**6) == 5.0


# Ranks that give up first


def test_what_a_rank_published_before_it_closed_is_its_answer() -> None:
    """Of the same transport, whenever it was; also if the rank answers no more."""
    store = dist.HashStore()
    first, late = (StoreStatusBoard(store, rank, 2) for rank in range(2))
    first.open("0/1").fail("bucket 0")
    first.publish("0/1")
    assert late.answers([0], "0/2", 0.0) == {0: None}
    assert late.answers([0], "", 0.0) == {0: None}
    found = late.answers([0], "0/1", 0.0)[0]
    assert found is not None
    assert found.last == "giving up bucket 0"


# What it costs where all is well


def over_a_file(rank: int, n: int, path: str) -> tuple[int, list[str]]:
    """By how many bytes the file of the job grows meanwhile, and the threads."""
    dist.destroy_process_group()
    gc.collect()
    assert soon(lambda: "fddp-status" not in names_of_threads()), "of an earlier group"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=n)
    with fddp.GradSync(W, timeout_s=0.8) as sync:
        sync(W)
        dist.barrier()
        time.sleep(0.2)
        size = os.path.getsize(path)
        time.sleep(1.0)
        grown = os.path.getsize(path) - size
        threads = names_of_threads()
        dist.barrier()
    return grown, threads


def names_of_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_queries_write_nothing(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    """A file store appends a record for each write, also for one that changes nothing. A single
    rank checks nothing."""
    for grown, threads in ranks.run(world_size, over_a_file, str(tmp_path / "file")):
        assert grown == 0
        assert ("fddp-status" in threads) == (world_size > 1)


def alone_and_dropped(rank: int, n: int) -> bool:
    sync = fddp.GradSync(W, transport="c10d")
    sync(W)
    board = board_of(sync)
    del sync
    return soon(lambda: not board.open_statuses and not board._timeouts_s)


def test_a_single_rank_keeps_nothing(ranks: RankPool) -> None:
    assert ranks.run(1, alone_and_dropped) == [True]


# Errors of the store


def answer_after_an_error(rank: int, n: int) -> str:
    with fddp.GradSync(W, timeout_s=0.8) as sync:
        board, answer, failed = board_of(sync), StoreStatusBoard.answer, threading.Event()

        def fail_once(*args: Any, **kwargs: Any) -> None:
            if not failed.is_set():
                failed.set()
                raise RuntimeError("Connection reset by peer")
            answer(board, *args, **kwargs)

        with mock.patch.object(board, "answer", fail_once):
            dist.barrier()
            found = board.answers([1], "", 5.0) if rank == 0 else {}
            dist.barrier()
        return str(found.get(1))


def test_a_passing_error_does_not_stop_the_reports(ranks: RankPool) -> None:
    heard, _ = ranks.run(2, answer_after_an_error)
    assert "in answer_after_an_error, from " in heard


def go_on_after_the_end(rank: int, n: int) -> tuple[bool, bool]:
    with fddp.GradSync(W, timeout_s=0.8) as sync:
        board = board_of(sync)
        responder = board._responder
        assert responder is not None
        gone = mock.Mock(side_effect=RuntimeError("Connection reset by peer"))
        with (
            mock.patch.object(responder, "_store", mock.Mock(check=gone, add=gone)),
            mock.patch.object(board, "answer", gone),
        ):
            if rank == 0:
                board.query()
            responder._thread.join(10.0)
        ended = not responder._thread.is_alive()
        with fddp.GradSync(W, timeout_s=0.8):
            after = board._responder
            assert after is not None
            return ended, after is not responder and after._thread.is_alive()


def test_opening_a_transport_restarts_answers(ranks: RankPool) -> None:
    """After the store was unreachable for a while."""
    assert ranks.run(2, go_on_after_the_end) == [(True, True)] * 2


# Where threads are


def test_the_named_line_is_the_users() -> None:
    """Not that of the standard library's which it calls."""
    mail: queue.Queue[int] = queue.Queue()

    def wait() -> None:
        mail.get(timeout=120.0)

    thread = threading.Thread(target=wait)
    thread.start()
    end_s = time.perf_counter() + 60.0
    text = status.line_of(thread.ident)
    while "in wait" not in text and time.perf_counter() < end_s:
        time.sleep(0.01)
        text = status.line_of(thread.ident)
    mail.put(1)
    thread.join()
    assert text == f"{__file__}:{line_of(__file__, 'mail.get(timeout=120.0)')} in wait"


# Names of transports


def keys(rank: int, n: int) -> tuple[str, ...]:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        fddp.psum(W, group)
    found = [communicator_of(group, None).transport.status.key for group in (*groups, None)]
    return tuple(found)


def test_keys_of_transports_are_unique(ranks: RankPool) -> None:
    """Over two groups of the same ranks, too, and the same on every rank."""
    first, second = ranks.run(2, keys)
    assert first == second
    assert len(set(first)) == 3


# Stores that are silent, and openings that others give up

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_errors_pass_through_and_the_thread_ends_when_idle(host: Any) -> None:
    with pytest.raises(RuntimeError, match="x is not there"):
        asked(host).get("x")
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


def test_lines_end_at_what_is_no_frame() -> None:
    """As `f_back` of another thread's frame may be, from which the thread returns meanwhile."""
    not_a_frame: Any = True
    assert own_lines(not_a_frame) == ""
