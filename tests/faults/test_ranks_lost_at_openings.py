"""Ranks that end before the first call of fddp, or run another program: named on every other rank.

Time limits of the groups are far longer than those of the tests.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fddp
from tests.support.endings import Ending, ending
from tests.support.ranks import run_fresh

LOST = 1
LIMIT = timedelta(seconds=240)
LEAVES = {"w": torch.ones(3)}
CALLS: dict[str, Callable[[Any], Any]] = {
    "pmean": lambda group: fddp.pmean(torch.ones(3), group=group),
    "GradSync": lambda group: fddp.GradSync(LEAVES, group=group),
    "wrapper": lambda group: fddp.DistributedDataParallel(
        torch.nn.Linear(3, 3), process_group=group
    ),
    "new group": lambda group: dist.new_group(
        [0, LOST], backend="fddp", timeout=LIMIT, use_local_synchronization=True
    ),
}


def run_another_program() -> None:
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(200)"])


def end_before_the_first_call(rank: int, world_size: int, backend: str, call: str) -> Ending | None:
    group = dist.new_group(backend=backend, timeout=LIMIT)
    if rank == LOST:
        os._exit(3)
    if call == "new group" and rank != 0:
        return None
    return ending(lambda: CALLS[call](group))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", ["gloo", "fddp"])
def test_a_rank_that_ends_before_the_first_call(backend: str, call: str) -> None:
    outcomes = run_fresh(3, end_before_the_first_call, backend, call, timeout_s=60.0)
    assert outcomes[LOST].exitcode == 3
    for rank in (0, 2):
        seen, error, _ = outcomes[rank]
        assert error is None, error
        if call == "new group" and rank != 0:
            continue
        assert seen is not None, "it still waits"
        assert seen.kinds[0] == "RankLostError", seen
        assert "lost rank 1" in seen.text
        assert f"on rank {rank} of" in seen.text
        assert "its process has ended" in seen.text or "another rank reported" in seen.text


def replace(rank: int, world_size: int, name: str) -> Any:
    """Rank 1 runs another program; the others see it as lost while its process lives."""
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    if name == "fddp":
        group = dist.new_group(backend="fddp", timeout=LIMIT)
        call = lambda: dist.all_reduce(torch.ones(3), group=group)  # noqa: E731
    else:
        sync = fddp.GradSync(LEAVES, transport=name, timeout_s=LIMIT.total_seconds())  # type: ignore[arg-type]
        call = lambda: sync(LEAVES)  # noqa: E731
    call()
    if rank == LOST:
        run_another_program()
    seen = ending(call)
    os.kill(pids[LOST], 0)  # raises if the process is gone
    rest = dist.new_group([0, 2], use_local_synchronization=True)
    dist.barrier(rest)
    if rank == 0:
        os.kill(pids[LOST], signal.SIGKILL)
    return seen


@pytest.mark.parametrize("name", ["c10d", "shm", "fddp"])
def test_a_rank_that_runs_another_program(name: str) -> None:
    outcomes = run_fresh(3, replace, name, timeout_s=60.0)
    for rank in (0, 2):
        seen, error, _ = outcomes[rank]
        assert error is None, error
        assert seen is not None, "it still waits"
        assert seen.kinds[0] == ("DistBackendError" if name == "fddp" else "RankLostError"), seen
        assert "rank 1" in seen.text
