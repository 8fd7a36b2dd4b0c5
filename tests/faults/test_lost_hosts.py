"""Ranks that are lost where the others can't hear of it: while they connect, or with the store."""

from __future__ import annotations

import _weakrefset
import contextlib
import gc
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fddp
from fddp.transport.c10d import gloo, peer_monitor, shared_memory
from fddp.transport.liveness import failure_detector
from fddp.transport.liveness.membership import Membership
from tests.support.polling import PROMPT_S
from tests.support.python_steps import only_python
from tests.support.ranks import RankPool, run_fresh

TIMEOUT_S = 2.0
STOPPED_S = 10.0  # long after the time of the others is over
PATIENCE_S = 3.0  # for an answer, where other processes load the host
TREE = {"w": torch.ones(4)}


class Seen(NamedTuple):
    """Outcome of a call on a rank."""

    kind: str
    ranks: tuple[int, ...]
    text: str
    took_s: float


def seen(call: Callable[[], Any]) -> Seen:
    begin_s = time.perf_counter()
    try:
        call()
    except fddp.FddpError as error:
        took_s = time.perf_counter() - begin_s
        return Seen(type(error).__name__, getattr(error, "ranks", ()), str(error), took_s)
    return Seen("", (), "", time.perf_counter() - begin_s)


def later(delay_s: float, number: int) -> None:
    """Sends this process a signal, from another one."""
    victim = os.getpid()
    if os.fork() == 0:
        time.sleep(delay_s)
        os.kill(victim, number)
        os._exit(0)


def host_the_store(rank: int, world_size: int) -> None:
    """A default group whose store rank 0 serves, as without a launcher."""
    hosted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports = [hosted.port]
    dist.broadcast_object_list(ports)
    dist.destroy_process_group()
    store = hosted if rank == 0 else dist.TCPStore("127.0.0.1", ports[0], is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()


# A rank is killed while the ranks connect


def die_while_connecting(rank: int, world_size: int, lost: int, how: str) -> Seen | None:
    sync = fddp.GradSync(TREE, timeout_s=TIMEOUT_S, transport="c10d")
    meet = Membership.open

    def meet_and_wait(*args: Any, **options: Any) -> tuple[int, ...]:
        absent = meet(*args, **options)
        if rank == lost:
            later(0.3, signal.SIGKILL)
        elif rank == max({0, 1, 2} - {lost}):
            time.sleep(0.8)
        return absent

    dist.barrier()
    with mock.patch.object(Membership, "open", meet_and_wait):
        if how == "new":
            return seen(lambda: fddp.GradSync(TREE, timeout_s=TIMEOUT_S))
        return seen(lambda: sync.rebuild(dist.group.WORLD))


def test_a_rank_that_is_killed_while_the_others_connect() -> None:
    for lost, how in ((0, "new"), (1, "rebuild")):
        outcomes = run_fresh(3, die_while_connecting, lost, how)
        assert outcomes[lost].exitcode == -signal.SIGKILL
        for rank in {0, 1, 2} - {lost}:
            answer, error, exitcode = outcomes[rank]
            assert (error, exitcode) == (None, 0)
            assert (answer.kind, answer.ranks) == ("RankLostError", (lost,)), answer
            assert answer.took_s < PROMPT_S


# A killed rank that only a connection reveals


def die_beside_one_that_computes(rank: int, world_size: int) -> Seen | None:
    with (
        mock.patch.object(failure_detector.FailureDetector, "refresh_processes"),
        mock.patch.object(failure_detector, "_GRACE_S", PATIENCE_S),
    ):
        sync = fddp.GradSync(TREE, timeout_s=4 * PATIENCE_S, transport="c10d")
        sync(TREE)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            time.sleep(2 * PATIENCE_S)  # for longer than it is given to report
        return seen(lambda: sync(TREE))


def test_a_rank_that_computes_is_not_taken_for_lost() -> None:
    outcomes = run_fresh(3, die_beside_one_that_computes)
    for rank in (0, 2):
        answer, error, _ = outcomes[rank]
        assert error is None, error
        assert (answer.kind, answer.ranks) == ("RankLostError", (1,)), answer


# The rank that hosts the store is stopped, or gone


def stop_the_host(rank: int, world_size: int) -> list[Seen]:
    host_the_store(rank, world_size)
    syncs = [fddp.GradSync(TREE, timeout_s=TIMEOUT_S, transport=t) for t in ("shm", "c10d")]
    for sync in syncs:
        sync(TREE)
    if rank == 0:
        later(STOPPED_S, signal.SIGCONT)
        os.kill(os.getpid(), signal.SIGSTOP)
    answer = [seen(lambda sync=sync: sync(TREE)) for sync in syncs]
    if rank != 0:
        answer.append(seen(lambda: fddp.GradSync(TREE, timeout_s=TIMEOUT_S)))
    for sync in syncs:
        sync.close()
    return answer


def test_the_store_of_a_rank_that_is_stopped() -> None:
    outcomes = run_fresh(3, stop_the_host)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert all(answer.kind for answer in outcomes[0].result), "it raises, too, once it goes on"
    for rank in (1, 2):
        assert len(outcomes[rank].result) == 3
        for answer in outcomes[rank].result:
            assert (answer.kind, answer.ranks) == ("SyncTimeoutError", (0,)), answer
            assert f"on rank {rank} of 3" in answer.text
            assert answer.took_s < PROMPT_S, answer
        for answer in outcomes[rank].result[1:]:
            assert "rank 0: stopped, or ended; the group's store does not answer" in answer.text


def lose_the_host(rank: int, world_size: int, transport: str) -> list[Seen]:
    host_the_store(rank, world_size)
    sync = fddp.GradSync(TREE, timeout_s=TIMEOUT_S, transport=transport)
    sync(TREE)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return [
        seen(lambda: sync(TREE)),
        seen(lambda: fddp.GradSync(TREE, timeout_s=TIMEOUT_S)),
        seen(lambda: fddp.reconcile(TREE, step=1, timeout_s=TIMEOUT_S)),
        seen(lambda: fddp.check_replicas(TREE)),
    ]


@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_the_store_of_a_rank_that_is_killed(transport: str) -> None:
    outcomes = run_fresh(2, lose_the_host, transport)
    answer, error, _ = outcomes[1]
    assert error is None, error
    assert [each.kind for each in answer] == ["RankLostError"] * 4, answer
    assert answer[0].ranks == (0,)
    for each in answer[1:]:
        assert "the rank or agent that hosts it is gone: start the job again" in each.text
        assert each.took_s < PROMPT_S


# An error that is none of the transport's


class PreemptedError(RuntimeError):
    pass


def preempt(number: int, frame: Any) -> None:
    raise PreemptedError("by the scheduler")


def fail_in_a_handler(rank: int, world_size: int, transport: str) -> str:
    sync = fddp.GradSync(TREE, timeout_s=20.0, transport=transport)
    sync(TREE)
    if rank == 1:
        time.sleep(1.0)
    else:
        signal.signal(signal.SIGUSR2, preempt)
        later(0.3, signal.SIGUSR2)
    try:
        sync(TREE)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_handler_error_is_raised_from_a_wait(ranks: RankPool) -> None:
    for transport in ("shm", "c10d"):
        answer = ranks.run(2, fail_in_a_handler, transport)
        assert answer[0] == "PreemptedError: by the scheduler"


@contextlib.contextmanager
def failing_at(number: int) -> Iterator[list[int]]:
    """Raise as a signal handler would, once as many functions were entered or have returned.

    Callbacks of weak references and finalizers do not count: Python ignores errors in them. Yields
    a list that holds `number` from then on.
    """
    gc.collect()
    gc.disable()  # finalizers of what earlier calls have left
    signal.signal(signal.SIGUSR2, preempt)
    events = itertools.count(1)
    raised: list[int] = []

    def count(frame: Any, event: str, _: Any) -> None:
        if frame.f_code.co_filename == _weakrefset.__file__:
            return
        if event in ("call", "c_return", "c_exception") and next(events) == number:
            raised.append(number)
            preempt(signal.SIGUSR2, frame)

    sys.setprofile(count)
    try:
        yield raised
    finally:
        sys.setprofile(None)
        gc.enable()


def fail_at_calls(
    rank: int, world_size: int, transport: str, compiled: bool, numbers: range
) -> list[str]:
    endings = []
    for number in numbers:
        with (
            contextlib.nullcontext() if compiled else only_python(),
            fddp.GradSync(TREE, timeout_s=20.0, transport=transport) as sync,
        ):
            sync(TREE)
            raised = []
            try:
                if rank == 0:
                    with (
                        mock.patch.object(gloo, "CHECK_INTERVAL_S", 0.001),
                        mock.patch.object(shared_memory, "CHECK_INTERVAL_S", 0.001),
                        mock.patch.object(peer_monitor, "_CHECK_PROCESSES_AFTER_S", 0.0),
                        failing_at(number) as raised,
                    ):
                        sync(TREE)
                else:
                    time.sleep(0.02)
                    sync(TREE)
                endings.append("suppressed" if raised else "no error")
            except RuntimeError as error:
                endings.append(type(error).__name__)
        dist.barrier()
    return endings


@pytest.mark.parametrize(
    ("transport", "compiled", "step"),
    [
        ("c10d", True, 12),
        ("shm", True, 3),
        pytest.param("c10d", True, 3, marks=pytest.mark.nightly),
        pytest.param("c10d", False, 10, marks=pytest.mark.nightly),
        pytest.param("shm", False, 10, marks=pytest.mark.nightly),
    ],
)
def test_a_handler_error_is_raised_at_any_time(
    ranks: RankPool, transport: str, compiled: bool, step: int
) -> None:
    """Code that suppresses errors of stores and backends lets those of signal handlers through."""
    # A compiled step over shared memory waits within one call.
    numbers = range(3, 63, step) if compiled else range(5, 400, step)
    first, second = ranks.run(2, fail_at_calls, transport, compiled, numbers)
    # On a busy machine, rank 1 may be there before rank 0 has waited for as many calls.
    assert set(first) <= {"PreemptedError", "no error"}, dict(zip(numbers, first, strict=True))
    assert first.count("PreemptedError") > len(numbers) // 2
    # Rank 1 may have met rank 0 before that failed.
    assert set(second) <= {"RankLostError", "PeerError", "no error"}
