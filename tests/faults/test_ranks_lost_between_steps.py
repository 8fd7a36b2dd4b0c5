"""Ranks that end between two calls, where others open what the next one needs."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fddp
from fddp.transport.liveness import failure_detector
from tests.support.endings import ending
from tests.support.models import batch, mlp, mlp_loss
from tests.support.polling import LONG_S, PROMPT_S
from tests.support.ranks import launch_over, run_fresh, split_into_hosts

LOST = 1


def calls(sync: fddp.GradSync) -> dict[str, Callable[[], Any]]:
    """Calls of the surviving ranks; later ones close what earlier ones opened."""
    group, params = dist.group.WORLD, mlp()
    return {
        "reconcile": lambda: fddp.reconcile(params, step=0, timeout_s=LONG_S),
        "check_replicas": lambda: fddp.check_replicas(params, group),
        "pmean": lambda: fddp.pmean(torch.ones(2), group),
        "broadcast": lambda: fddp.broadcast(params, timeout_s=LONG_S),
        "a step": lambda: sync.value_and_grad(mlp_loss)(params, batch(sync.rank, 0)),
        "rebuild": lambda: sync.rebuild(group),
        "a GradSync": lambda: fddp.GradSync(params, timeout_s=LONG_S),
    }


def lose_a_rank(rank: int, world_size: int, transport: str) -> Any:
    with split_into_hosts([[0], [1], [2]] if transport == "c10d" else [[0, 1, 2]]):
        sync = fddp.GradSync(mlp(), timeout_s=LONG_S)
        assert sync.transport == transport
        again = calls(sync)
        for call in list(again.values())[:-2]:
            call()
        dist.barrier()
        if rank == LOST:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = {}
        for name, call in again.items():
            begin_s = time.perf_counter()
            with pytest.raises(fddp.FddpError) as caught:
                call()
            took_s = time.perf_counter() - begin_s
            error = caught.value
            answer[name] = type(error).__name__, getattr(error, "ranks", None), took_s, str(error)
        return answer


@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_a_rank_that_ends_between_two_calls_is_lost(transport: str) -> None:
    outcomes = run_fresh(3, lose_a_rank, transport)
    assert outcomes[LOST].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].error
        for name, (kind, ranks, took_s, text) in outcomes[rank].result.items():
            assert (kind, ranks) == ("RankLostError", (LOST,)), (name, text)
            assert f"rank {LOST}" in text.replace("on rank", "")
            assert took_s < PROMPT_S, (name, took_s)


def leave_a_loop(group: Any, busy: bool) -> Any:
    """Rank 1 makes one step less, closes its GradSync, and continues with the next one. Rank 2 may
    not even be able to report that it is alive."""
    # What ranks are given to say so, which on a busy host takes long.
    answers_s = failure_detector._GRACE_S if busy else PROMPT_S / 2
    with (
        mock.patch.object(failure_detector, "_GRACE_S", answers_s),
        fddp.GradSync(mlp(), group=group, timeout_s=LONG_S) as sync,
    ):
        rank, begin_s = sync.rank, 0.0
        sync(mlp())
        if busy and rank == 2:
            ctypes.PyDLL(None).usleep(4_000_000)  # with Python's lock
        if rank != LOST:
            begin_s = time.perf_counter()
            seen = ending(lambda: sync(mlp()))
    took_s = time.perf_counter() - begin_s
    with fddp.GradSync(mlp(), group=group, timeout_s=LONG_S) as sync:
        sync(mlp())
    return None if rank == LOST else (seen, took_s)


@pytest.mark.parametrize(
    ("launch", "busy"), [("c10d", False), ("c10d", True), ("shm", False), ("loopback", False)]
)
def test_a_rank_that_has_closed_in_order_is_named(
    launch: str, busy: bool, request: pytest.FixtureRequest
) -> None:
    """It is alive and reports its status; ending in order is distinguished from a crash."""
    answer = launch_over(launch, request)(3, leave_a_loop, busy)
    for seen, took_s in (answer[0], answer[2]):
        assert seen.kinds[0] == "RankLostError", seen
        assert "step 1" in seen.text
        assert "rank 2" not in seen.text.replace("on rank 2", "")
        assert re.search(r"lost rank 1 \(?(it closed|left) its transport", seen.text), seen.text
        assert took_s < PROMPT_S


def end_early(rank: int, world_size: int, transport: str) -> Any:
    """Ranks 2 and 3 have done their part, and end, while rank 0 waits for rank 1 alone."""
    with split_into_hosts([[r] for r in range(4)] if transport == "c10d" else [[*range(4)]]):
        communicator = fddp.Communicator(mesh=fddp.Topology(host=2, local=2))
        fddp.psum(torch.ones(2), communicator, axis="local")
        dist.barrier()
        time.sleep(4.0 if rank == 1 else 0.0)
        mean = fddp.psum(torch.ones(2), communicator, axis="local")
        if rank > 1:
            os._exit(0)
        return mean.tolist()


@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_ranks_that_have_no_part_in_an_operation_may_end(transport: str) -> None:
    outcomes = run_fresh(4, end_early, transport)
    assert [outcome.exitcode for outcome in outcomes[2:]] == [0, 0]
    for outcome in outcomes[:2]:
        assert outcome.error is None
        assert outcome.result == [2.0, 2.0]
