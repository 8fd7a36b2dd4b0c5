"""Ranks that die or stall in the middle of a step: named on every other rank, in time."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fddp
from tests.support.backward_calls import call_in_backward
from tests.support.endings import Ending, ending
from tests.support.models import batch, mlp, mlp_loss
from tests.support.on_ranks import on_processes
from tests.support.polling import LONG_S, PROMPT_S
from tests.support.process_resources import Resources, growth, resources
from tests.support.ranks import RankPool, run_fresh

STALL_S = 3.0
LOST = 1
SMALL = {"bucket_cap_mb": 0.001, "first_bucket_mb": 0.0003}


def stop(how: str) -> None:
    if how == "exit":
        os._exit(3)
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        time.sleep(STALL_S)


def stopping_loss(p: Any, x: Tensor, where: str, how: str) -> Tensor:
    """`mlp_loss`, in which the process ends: before backward, or with some gradients sent."""
    if where == "forward":
        stop(how)
    for name, layer in p.items():
        if name == "layer2" and where == "backward":
            x = call_in_backward(x, lambda: stop(how))
        x = torch.tanh(x @ layer["weight"] + layer["bias"])
    return x.square().mean()


class Place(NamedTuple):
    """Position of a failure: as the error names it, and as the plan describes the bucket."""

    ranks: tuple[int, ...]
    bucket: int
    paths: tuple[str, ...]
    step: int
    planned: tuple[str, ...]


def placed(call: Callable[[], Any], sync: fddp.GradSync) -> tuple[Ending, Place | None]:
    """Outcome and position of a step on a rank that others leave."""
    places = []

    def noted() -> None:
        plan = sync.plan
        try:
            call()
        except (fddp.RankLostError, fddp.SyncTimeoutError) as error:
            leaves = plan.buckets[error.bucket].leaves if error.bucket >= 0 else ()
            planned = tuple(plan.leaves[leaf].path for leaf in leaves)
            places.append(Place(error.ranks, error.bucket, error.paths, error.step, planned))
            raise

    return ending(noted), (places or [None])[0]


def lose_a_rank(rank: int, world_size: int, transport: str, where: str, how: str) -> Any:
    sync = fddp.GradSync(mlp(), **SMALL, transport=transport, timeout_s=LONG_S)
    assert sync.transport == transport
    step = sync.value_and_grad(mlp_loss)
    for number in range(2):
        step(mlp(), batch(rank, number))
    params = mlp()
    begin_s = time.perf_counter()
    if rank == LOST:
        sync.value_and_grad(stopping_loss)(params, batch(rank, 2), where, how)
    seen, place = placed(lambda: step(params, batch(rank, 2)), sync)
    took_s = time.perf_counter() - begin_s
    closed = ending(lambda: step(params, batch(rank, 3)))
    unchanged = fddp.tree_map(torch.equal, params, mlp())

    # The surviving ranks continue in a group of their own.
    left = [r for r in range(world_size) if r != LOST]
    group = dist.new_group(left, use_local_synchronization=True)
    with fddp.GradSync(params, group=group, timeout_s=LONG_S) as sync:
        after = sync({**fddp.tree_map(lambda p: torch.full_like(p, float(rank)), params)})
    return seen, place, closed, took_s, unchanged, after["layer0"]["bias"][0].item()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("how", ["exit", "kill"])
@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_a_rank_that_dies_mid_step(transport: str, where: str, how: str) -> None:
    outcomes = run_fresh(3, lose_a_rank, transport, where, how)
    assert outcomes[LOST].exitcode == (3 if how == "exit" else -signal.SIGKILL)
    for rank in (0, 2):
        result, error, _ = outcomes[rank]
        assert error is None, error
        seen, place, closed, took_s, unchanged, after = result
        assert (place.ranks, place.step) == ((LOST,), 2)
        assert place.paths == place.planned
        assert bool(place.paths) == (f"bucket {place.bucket} (" in seen.text)
        assert seen.kinds[0] == "RankLostError", seen
        assert "step 2" in seen.text
        assert "bucket" in seen.text or "control word" in seen.text
        assert "rank 1" in seen.text, "the one that is lost"
        assert f"on rank {rank} of 3" in seen.text
        assert "checkpoint" in seen.text, "the way out"
        assert took_s < PROMPT_S
        assert closed.kinds[0] == "ClosedError"
        assert "build a new one" in closed.text
        assert all(layer["weight"] and layer["bias"] for layer in unchanged.values())
        assert after == 1.0, "the mean of ranks 0 and 2"


def stall(rank: int, world_size: int, transport: str, where: str) -> Any:
    timeout_s = 1.0
    sync = fddp.GradSync(mlp(), **SMALL, transport=transport, timeout_s=timeout_s)
    assert sync.transport == transport
    step = sync.value_and_grad(mlp_loss)
    step(mlp(), batch(rank, 0))
    place = None
    begin_s = time.perf_counter()
    if rank == LOST:
        slow = sync.value_and_grad(stopping_loss)
        seen = ending(lambda: slow(mlp(), batch(rank, 1), where, "stall"))
    else:
        seen, place = placed(lambda: step(mlp(), batch(rank, 1)), sync)
    took_s = time.perf_counter() - begin_s
    dist.barrier()  # all are alive: the same group is usable
    with fddp.GradSync(mlp(), timeout_s=20.0) as sync:
        after = sync.value_and_grad(mlp_loss)(mlp(), batch(0, 0))[1]
    return seen, place, took_s, torch.func.grad(mlp_loss)(mlp(), batch(0, 0)), after


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_a_rank_that_stalls_mid_step(ranks: RankPool, transport: str, where: str) -> None:
    for rank, outcome in enumerate(ranks.run(3, stall, transport, where)):
        seen, place, took_s, expected, after = outcome
        if rank == LOST:
            assert seen.kinds[0] == "SyncTimeoutError", seen
            assert re.search(
                r"after \d+\.\d s of timeout_s=1\.0, because the time limit of .+ expired",
                seen.text,
            )
            assert "every rank is alive" in seen.text
        else:
            assert seen.kinds[0] == "SyncTimeoutError", seen
            assert "step 1" in seen.text
            assert "bucket" in seen.text or "control word" in seen.text
            assert "timeout_s=1.0" in seen.text
            assert took_s < PROMPT_S
            assert (place.ranks, place.step) == ((LOST,), 1)
            assert place.paths == place.planned
        assert torch.allclose(after["layer0"]["weight"], expected["layer0"]["weight"], rtol=1e-12)


@on_processes(3)
def test_a_rank_that_does_not_build_its_sync(rank: int, world_size: int) -> None:
    begin_s = time.perf_counter()
    found = None if rank == LOST else ending(lambda: fddp.GradSync(mlp(), timeout_s=0.5))
    took_s = time.perf_counter() - begin_s
    dist.barrier()  # until the others have given up
    if found is not None:
        assert found.kinds[0] == "SyncTimeoutError"
        assert f"opening a GradSync on rank {rank} of 3: rank 1 did not" in found.text
        assert "timeout_s=0.5" in found.text
        assert took_s < PROMPT_S


@pytest.mark.parametrize("transport", ["c10d", "shm"])
@on_processes(2)
def test_a_sync_that_is_dropped_without_close_leaves_nothing(
    rank: int, world_size: int, transport: Any
) -> None:
    with fddp.GradSync(mlp(), transport=transport) as sync:
        sync(mlp())
    dist.barrier()
    before = resources()
    for _ in range(10):
        sync = fddp.GradSync(mlp(), transport=transport)
        sync(mlp())
        del sync
    assert growth(before) == Resources(0, 0, 0)
    dist.barrier()
