"""Start and end of the library's threads, and what they close: under no lock, and in time."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fddp
from fddp.collectives.communicator import communicator_of
from fddp.transport.lifetime import finalizer, threads
from fddp.transport.lifetime.finalizer import _Closer, _closer
from fddp.transport.liveness import status_store
from fddp.transport.liveness.bounded_store import client_of
from fddp.transport.liveness.status import StatusBoard
from tests.support import exits
from tests.support.endings import Ending, ending
from tests.support.pairwise import pairwise
from tests.support.polling import HANG_S, LONG_S, PROMPT_S, soon
from tests.support.ranks import Launch, launch_fixture, launch_over

W = {"w": torch.ones(3)}
NAMES = ("fddp-closer", "fddp-status")


launch = launch_fixture("c10d", "shm")


# At the end of the process

TORCH_FOREVER = """
import threading
from datetime import timedelta
import torch.distributed as dist
from fddp.transport.lifetime import threads

store, over = dist.HashStore(), threading.Event()

def ask():
    while not over.is_set():
        try:
            store.wait(["nothing"], timedelta(milliseconds=2))
        except RuntimeError:
            pass

threads.start_thread(ask, "asks", over.set)
"""


def test_a_thread_that_calls_torch_ends_first() -> None:
    """By itself it would come back to an interpreter that has ended, and abort the process."""
    run = subprocess.run([sys.executable, "-c", TORCH_FOREVER], capture_output=True, timeout=HANG_S)
    assert (run.returncode, run.stderr) == (0, b"")


ENDS_MEANWHILE = """
import threading, time, weakref
from fddp.transport.lifetime import threads
from fddp.transport.lifetime.finalizer import on_finalize

class Registry(dict):
    def items(self):
        for item in super().items():
            over.set()
            while threading.active_count() > 1:
                time.sleep(0.001)
            yield item

class Thing:
    pass

def run():
    over.wait()
    cancel()

thing, over = Thing(), threading.Event()
cancel = on_finalize(thing, print)
threads.start_thread(run, "ends", over.set)
weakref.finalize._registry = Registry(weakref.finalize._registry)
"""


def test_a_thread_may_end_while_finalizers_are_looked_through() -> None:
    """`weakref` does this at exit, and fails if one is removed meanwhile."""
    command = [sys.executable, "-c", ENDS_MEANWHILE]
    run = subprocess.run(command, capture_output=True, timeout=HANG_S)
    assert (run.returncode, run.stderr) == (0, b"")


SHORT_RUN = """
import sys
import torch, torch.distributed as dist
import fddp

path, rank = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=int(rank), world_size=2)
fddp.pmean(torch.ones(3))
sync = fddp.GradSync({"w": torch.ones(3)})
sync({"w": torch.ones(3)})
dist.destroy_process_group()
"""


@pytest.mark.parametrize("turn", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2))])
def test_a_run_that_ends_in_order_ends_with_0(tmp_path: Path, turn: int) -> None:
    """The last group takes its communicator with it, which another thread is closing by then."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SHORT_RUN, str(tmp_path / f"{turn}"), str(rank)],
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, outcome = rank.communicate(timeout=HANG_S)
        assert (rank.returncode, outcome) == (0, b"")


@pytest.mark.nightly
def test_handlers_at_exit_may_close_transports() -> None:
    """Closing starts threads, which end before the interpreter does, as do those of others."""
    ways = pairwise(exits.REGISTERED, exits.CALLS, exits.BESIDE, exits.TRANSPORTS, exits.ENDS)
    run = subprocess.run(
        [sys.executable, "-m", exits.__name__, *map("/".join, ways)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    ends = dict(zip(ways, run.stdout.splitlines(), strict=True))
    codes = {way: exits.EXIT_CODES[way[-1]] for way in ways}
    assert ends == {way: f"{code},{code},," for way, code in codes.items()}


# At their beginning


def open_and_close(world: Any) -> None:
    group = dist.new_group([0, 1])
    for _ in range(2):
        fddp.psum(torch.ones(2), group)
        with fddp.GradSync(W, group=group) as sync:
            sync(W)
    dist.destroy_process_group(group)


def start_under_no_lock(world: Any) -> dict[str, bool]:
    """Return, by name of the thread, whether a lock was held that a collection may also take."""
    held: dict[str, bool] = {}
    start = threads.start_thread
    locks: list[Any] = [status_store._lock, _closer._lock, client_of(world)._lock]

    def watched(run: Callable[[], None], name: str, stop: Callable[[], None]) -> Any:
        held[name] = held.get(name, False) or any(lock._is_owned() for lock in locks)
        return start(run, name, stop)

    client_of(world).end()  # the next request starts the thread
    with mock.patch.object(threads, "start_thread", watched):
        open_and_close(world)
    return held


def test_threads_are_started_under_no_lock(launch: Launch) -> None:
    """A collection on a thread that starts may close what takes it, while others wait for it."""
    for held in launch(2, start_under_no_lock):
        assert "fddp-store" in held
        assert not any(held.values()), held


def fail_to_start(world: Any) -> list[tuple[str, Ending, bool]]:
    start, outcome = threads.start_thread, []
    for name in NAMES:
        failures = iter([True])

        def fail_once(
            run: Callable[[], None],
            title: str,
            stop: Callable[[], None],
            name: str = name,
            failures: Iterator[bool] = failures,
        ) -> Any:
            if title == name and next(failures, False):
                raise RuntimeError("can't start new thread")
            return start(run, title, stop)

        group = dist.new_group([0, 1])
        with (
            mock.patch.object(finalizer, "_closer", _Closer()),
            mock.patch.object(threads, "start_thread", fail_once),
        ):
            seen = ending(lambda: fddp.GradSync(W, group=group, timeout_s=5.0))  # noqa: B023
        dist.barrier()
        sync = fddp.GradSync(W, group=group)
        result = sync(W)["w"].tolist()
        transport = sync._engine.transport
        answers = transport.status.board.answers([0, 1], "", 5.0)
        del sync
        dist.barrier()
        outcome.append((name, seen, result == [1.0] * 3 and None not in answers.values()))
        del transport
    return outcome


def test_a_thread_that_can_not_be_started_is_started_next_time(
    request: pytest.FixtureRequest,
) -> None:
    for outcome in launch_over("c10d", request)(2, fail_to_start):
        for name, seen, well in outcome:
            assert seen.kinds[0] == "RuntimeError", (name, seen)
            assert well, name


# While a transport is opened


def interrupt_an_opening(world: Any) -> tuple[Ending, float, list[float]]:
    """Rank 1 is interrupted where it waits, as rank 0 does, for rank 2 to open as well."""
    rank, begin_s = dist.get_rank(), time.perf_counter()
    if rank == 2:
        time.sleep(4.0)
        seen = ending(lambda: None)
    else:
        if rank == 1:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.6)
        seen = ending(lambda: fddp.GradSync(W, timeout_s=LONG_S))
    took_s = time.perf_counter() - begin_s
    dist.barrier()
    with fddp.GradSync(W, group=dist.new_group([0, 1, 2])) as sync:
        return seen, took_s, sync(W)["w"].tolist()


def test_an_opening_that_is_interrupted_ends_on_all_ranks(launch: Launch) -> None:
    (first, took_s, _), (second, _, _), _ = outcome = launch(3, interrupt_an_opening)
    assert second.kinds[0] == "KeyboardInterrupt"
    assert first.kinds[0] == "PeerError", "rank 1 is not lost"
    assert "rank 1 failed: KeyboardInterrupt" in first.text
    assert took_s < PROMPT_S
    assert all(mean == [1.0] * 3 for _, _, mean in outcome)


# Objects that were dropped without having been closed


class Thing:
    """An object to be dropped."""


def collect_where_a_lock_is_held(world: Any) -> None:
    """As where a thread is started that others wait for, under a lock, and that collects."""
    group = dist.new_group([0, 1])
    fddp.psum(torch.ones(4), group)
    transport = communicator_of(group, None).transport
    cycle: list[Any] = [group, fddp.GradSync(W, group=world)]
    cycle.append(cycle)
    gone = weakref.ref(group)
    dist.destroy_process_group(group)
    del group, cycle
    with status_store._lock:
        collector = threading.Thread(target=gc.collect, daemon=True)
        collector.start()
        collector.join(10.0)
        assert not collector.is_alive(), "it waits for the lock"
        assert gone() is None
    assert soon(lambda: transport.closed_by)


def test_the_collector_waits_for_no_lock(launch: Launch) -> None:
    launch(2, collect_where_a_lock_is_held)


def test_the_thread_runs_while_it_may_be_needed() -> None:
    closer, closed = _Closer(), []
    things = [Thing(), Thing()]
    for number, thing in enumerate(things):
        closer.watch(thing, lambda number=number: closed.append(number))  # type: ignore[misc]
    assert closer._has_thread
    things.pop(0)
    del thing
    assert soon(lambda: closed == [0])
    assert closer._has_thread
    things.clear()
    assert soon(lambda: closed == [0, 1])
    assert soon(lambda: not closer._has_thread)
    more = Thing()
    closer.watch(more, lambda: closed.append(2))
    del more
    assert soon(lambda: closed == [0, 1, 2])


def test_closed_objects_are_not_watched() -> None:
    closer, closed = _Closer(), []
    things = [Thing(), Thing()]
    first, second = [closer.watch(thing, lambda: closed.append(1)) for thing in things]
    first()
    first()
    assert closer._has_thread
    second()
    assert soon(lambda: not closer._has_thread)
    things.clear()
    assert closed == []


def test_failing_close_does_not_block_others(capsys: pytest.CaptureFixture[str]) -> None:
    closer, closed = _Closer(), []

    def fail() -> None:
        raise OSError("no such connection")

    things = [Thing(), Thing()]
    for thing, close in zip(things, (fail, lambda: closed.append(1)), strict=True):
        closer.watch(thing, close)
    del thing
    things.clear()
    assert soon(lambda: closed)
    assert "OSError: no such connection" in capsys.readouterr().err


# Beside other threads


class Changing(list[Any]):
    """Changes while it is looked through for the first time."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        self.looks += 1
        if self.looks == 1:
            raise RuntimeError("Set changed size during iteration")
        return super().__iter__()


def test_transports_may_open_while_a_rank_looks_at_them() -> None:
    board = StatusBoard()
    status = board.open("one")
    board._statuses = Changing([status])  # type: ignore[assignment]
    assert board.open_statuses == [status]
