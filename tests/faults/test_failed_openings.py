"""Openings that fail on one rank, for lack of threads or by an interrupt: the others name the error
and not a lost rank, and the next opening works."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fddp
from fddp.transport import selection
from fddp.transport.backend import creation
from fddp.transport.c10d.transport import C10dTransport
from fddp.transport.lifetime import threads
from fddp.transport.liveness import bounded_store
from fddp.transport.liveness.bounded_store import StoreClientThread
from fddp.transport.liveness.membership import Membership
from tests.support.endings import Ending, ending
from tests.support.ranks import RankPool, run_fresh

LEAVES = {"w": torch.ones(3)}
LIMIT_S = 60.0
LIMIT = timedelta(seconds=LIMIT_S)
ERRORS = [threads.ThreadStartError("no thread is left"), KeyboardInterrupt()]
THREADS = ["fddp-status", "fddp-closer", "fddp-connecting"]
CALLS: list[tuple[Any, str]] = [
    (Membership, "open"),
    (C10dTransport, "set_title"),
    (selection, "discover_hosts"),
]
PARTS: list[tuple[Any, str]] = [
    (Membership, "open"),
    (creation, "_check_names"),
    (creation, "connect_with_abort"),
]


@contextlib.contextmanager
def without_thread(name: str, error: BaseException) -> Iterator[None]:
    start = threads.start_thread

    def failing(run: Any, called: str, stop: Any) -> Any:
        if called == name:
            raise error
        return start(run, called, stop)

    with mock.patch.object(threads, "start_thread", failing):
        yield


def failures() -> Iterator[tuple[str, Any]]:
    """Contexts in which an opening fails, by their name."""
    for error in ERRORS:
        kind = type(error).__name__
        for name in THREADS:
            yield f"{kind} at {name}", without_thread(name, error)
        for owner, name in CALLS:
            yield f"{kind} in {name}", mock.patch.object(owner, name, side_effect=error)


def open_again(rank: int, world_size: int, backend: str) -> Any:
    seen: dict[str, tuple[Ending, float]] = {}
    for name, failure in failures():
        group = dist.new_group(backend=backend, timeout=LIMIT)
        with failure if rank == 0 else contextlib.nullcontext():
            failed = ending(lambda group=group: fddp.GradSync(LEAVES, group=group))
        with fddp.GradSync(LEAVES, group=group) as sync:
            seen[name] = failed, sync(LEAVES)["w"].sum().item()
    return seen


def check(first: dict[str, tuple[Ending, Any]], second: dict[str, tuple[Ending, Any]]) -> None:
    for name, (seen, result) in first.items():
        assert seen.kinds[0] == name.split(" ")[0], (name, seen)
        other, _ = second[name]
        assert other.kinds[0] == "PeerError", (name, other)
        assert f"rank 0 failed: {name.split(' ')[0]}" in other.text, (name, other)
        assert result == second[name][1] == 3.0, name


@pytest.mark.parametrize("backend", ["gloo", "fddp"])
def test_the_next_opening_works(backend: str) -> None:
    """On fresh ranks, where no communicator of an earlier test has started the shared threads."""
    first, second = run_fresh(2, open_again, backend)
    assert first.error is second.error is None, (first.error, second.error)
    check(first.result, second.result)


def fail_while_others_open(rank: int, world_size: int, transport: Any) -> Any:
    group = dist.new_group(backend="gloo")
    options: Any = {"group": group, "timeout_s": 20.0, "transport": transport}

    def loss(params: dict[str, Any]) -> Any:
        if rank == 0:
            raise ArithmeticError("a bad batch")
        return fddp.pmean(params["w"].sum(), group)  # opens a communicator

    with fddp.GradSync(LEAVES, **options) as sync:
        failed = ending(lambda: sync.value_and_grad(loss)(LEAVES))
        total = sync(LEAVES)["w"].sum().item()
    with fddp.GradSync(LEAVES, **options) as sync:
        totals = total, sync(LEAVES)["w"].sum().item(), fddp.pmean(torch.ones(()), group).item()
    return failed, totals


@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_a_step_that_fails_while_others_open_an_operator(ranks: RankPool, transport: str) -> None:
    (own, totals), (other, others) = ranks.run(2, fail_while_others_open, transport)
    assert own.kinds[0] == "ArithmeticError"
    assert other.kinds[0] == "PeerError"
    assert "rank 0 failed: ArithmeticError: a bad batch" in other.text
    assert totals == others == (3.0, 3.0, 1.0)


def create_again(rank: int, world_size: int) -> Any:
    seen: dict[str, tuple[Ending, float]] = {}
    for error in ERRORS:
        for owner, part in PARTS:
            with (
                mock.patch.object(owner, part, side_effect=error)
                if rank == 0
                else contextlib.nullcontext()
            ):
                failed = ending(lambda: dist.new_group(backend="fddp", timeout=LIMIT))
            total = torch.ones(3)
            dist.all_reduce(total, group=dist.new_group(backend="fddp", timeout=LIMIT))
            seen[f"{type(error).__name__} in {part}"] = failed, total.sum().item() / 2
    return seen


def test_the_next_group_works(ranks: RankPool) -> None:
    check(*ranks.run(2, create_again))


def test_a_thread_that_ends_at_its_start_is_an_error() -> None:
    """As for lack of memory. `threading` itself waits for it without a limit."""
    with (
        mock.patch.object(threading.Thread, "_bootstrap_inner", side_effect=MemoryError()),
        mock.patch.object(sys, "unraisablehook"),
        pytest.raises(threads.ThreadStartError, match=r"'fddp-x' can't be started.*ulimit"),
    ):
        threads.start_thread(lambda: None, "fddp-x", lambda: None)


def test_a_store_is_asked_without_a_thread() -> None:
    client = StoreClientThread()
    with without_thread("fddp-store", ERRORS[0]):
        assert client.call(lambda: threading.current_thread(), 1.0) is threading.current_thread()
    answer: Callable[[], Any] = threading.current_thread
    assert client.call(answer, 10.0) is not threading.current_thread()


class Group:
    """A process group, for the thread of its requests."""


def test_the_thread_of_requests_ends_with_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_store, "_IDLE_S", 60.0)
    group = Group()
    thread = bounded_store.client_of(group).call(threading.current_thread, 10.0)
    assert thread.is_alive()
    del group
    gc.collect()
    thread.join(10.0)
    assert not thread.is_alive()
