"""Processes that ranks fork, for instance to load data, and what these inherit of communicators."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import fddp
from tests.support.models import batch, mlp, mlp_loss
from tests.support.polling import LONG_S, PROMPT_S
from tests.support.ranks import run_fresh, split_into_hosts

_LONGEST_S = 30.0  # that a forked process may take
_FORKS = multiprocessing.get_context("fork")

Held = dict[str, Any]


def collect(held: Held) -> None:
    held["itself"] = held
    left = dict(held)
    left["itself"] = left
    held.clear()
    del left
    gc.collect()


def close(held: Held) -> None:
    held["sync"].close()
    held.clear()


def use(held: Held) -> None:
    for call in (lambda: held["sync"](mlp()), lambda: held["step"](mlp(), batch(0, 0))):
        with pytest.raises(fddp.ClosedError, match="the process that this one was forked from"):
            call()
    for call in (lambda: fddp.pmean(torch.ones(2)), lambda: fddp.GradSync(mlp())):
        with pytest.raises(fddp.ClosedError, match="this process was forked from a rank"):
            call()


WORKERS: dict[str, Callable[[Held], object]] = {
    "keep": lambda held: None,
    "drop": lambda held: held.clear(),
    "collect": collect,
    "close": close,
    "use": use,
}
LEAVE: dict[str, Callable[[], object]] = {
    "return": lambda: None,
    "exit": lambda: sys.exit(0),
    "at once": lambda: os._exit(0),
}


def worker(do: str, leave: str, held: Held) -> None:
    WORKERS[do](held)
    LEAVE[leave]()


def ended(process: Any) -> int | None:
    """The exit code of a process that was started; None where it hangs."""
    process.join(_LONGEST_S)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    return code


def fork(rank: int, world_size: int, transport: str) -> dict[str, int | None]:
    held: Held = {"sync": fddp.GradSync(mlp(), transport=transport, timeout_s=30.0)}
    held["step"] = held["sync"].value_and_grad(mlp_loss)
    before = held["step"](mlp(), batch(rank, 0))[1]
    fddp.pmean(torch.ones(2))
    codes = {}
    for do, leave in itertools.product(WORKERS, LEAVE):
        process = _FORKS.Process(target=worker, args=(do, leave, held))
        # Ranks of tests are daemons, which may not have children.
        settings: Any = multiprocessing.current_process()
        with mock.patch.dict(settings._config, daemon=False):
            process.start()
        codes[f"{do}, {leave}"] = ended(process)
        # And its parent continues.
        grads = held["step"](mlp(), batch(rank, 0))[1]
        same = fddp.tree_map(torch.equal, grads, before)
        assert all(all(layer.values()) for layer in same.values())
        assert fddp.pmean(torch.tensor(float(rank))).item() == 0.5
    held["sync"].close()
    return codes


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_forked_processes_end_without_affecting_their_parent(transport: str) -> None:
    """On processes of their own: of those of other tests, torch's groups may be left in garbage,
    which a child that collects it frees, without their threads."""
    for outcome in run_fresh(2, fork, transport):
        assert outcome.error is None
        assert len(outcome.result) == 15
        assert {how: code for how, code in outcome.result.items() if code != 0} == {}


def outlived(rank: int, world_size: int) -> tuple[str, tuple[int, ...], float]:
    """Rank 1 is killed, and what it forked holds its connections."""
    with split_into_hosts([[0], [1]]):
        sync = fddp.GradSync(mlp(), timeout_s=LONG_S)
    assert sync.transport == "c10d"
    step = sync.value_and_grad(mlp_loss)
    step(mlp(), batch(rank, 0))
    if rank == 1:
        if os.fork() == 0:
            time.sleep(LONG_S)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    begin_s = time.perf_counter()
    with pytest.raises(fddp.RankLostError) as caught:
        step(mlp(), batch(rank, 1))
    return str(caught.value), caught.value.ranks, time.perf_counter() - begin_s


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_rank_is_lost_although_what_it_forked_lives() -> None:
    survivor, _ = run_fresh(2, outlived)
    assert survivor.error is None, survivor.error
    text, lost, took_s = survivor.result
    assert "lost rank 1 (its process has ended)" in text
    assert "step 1" in text
    assert lost == (1,)
    assert took_s < PROMPT_S
