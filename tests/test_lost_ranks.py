"""Ranks that die or stall in the middle of a step: named on every other rank, in time."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fddp
from models import batch, mlp, mlp_loss
from ranks import RankPool, run_fresh
from test_errors import Ending, ending

TIMEOUT_S = 6.0
LOST = 1
SMALL = {"bucket_cap_mb": 0.001, "first_bucket_mb": 0.0003}


class Stops(torch.autograd.Function):
    """Ends its process, or stalls, when backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str) -> Tensor:
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        stop(ctx.how)
        return grad, None


def stop(how: str) -> None:
    if how == "exit":
        os._exit(3)
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        time.sleep(TIMEOUT_S / 2)


def stopping_loss(p: Any, x: Tensor, where: str, how: str) -> Tensor:
    """`mlp_loss`, in which the process ends: before backward, or with some gradients sent."""
    if where == "forward":
        stop(how)
    for name, layer in p.items():
        if name == "layer2" and where == "backward":
            x = Stops.apply(x, how)
        x = torch.tanh(x @ layer["weight"] + layer["bias"])
    return x.square().mean()


def lose_a_rank(rank: int, world_size: int, transport: str, where: str, how: str) -> Any:
    sync = fddp.GradSync(mlp(), **SMALL, transport=transport, timeout_s=TIMEOUT_S)
    assert sync.transport == transport
    step = sync.value_and_grad(mlp_loss)
    for number in range(2):
        step(mlp(), batch(rank, number))
    params = mlp()
    begin_s = time.perf_counter()
    if rank == LOST:
        sync.value_and_grad(stopping_loss)(params, batch(rank, 2), where, how)
    seen = ending(lambda: step(params, batch(rank, 2)))
    took_s = time.perf_counter() - begin_s
    closed = ending(lambda: step(params, batch(rank, 3)))
    unchanged = fddp.tree_map(torch.equal, params, mlp())

    # The ranks that are left go on in a group of their own.
    left = [r for r in range(world_size) if r != LOST]
    group = dist.new_group(left, use_local_synchronization=True)
    with fddp.GradSync(params, group=group, timeout_s=TIMEOUT_S) as sync:
        after = sync({**fddp.tree_map(lambda p: torch.full_like(p, float(rank)), params)})
    return seen, closed, took_s, unchanged, after["layer0"]["bias"][0].item()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("how", ["exit", "kill"])
@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_a_rank_that_dies_mid_step(transport: str, where: str, how: str) -> None:
    outcomes = run_fresh(3, lose_a_rank, transport, where, how, timeout_s=60.0)
    assert outcomes[LOST].exitcode == (3 if how == "exit" else -signal.SIGKILL)
    for rank in (0, 2):
        result, error, _ = outcomes[rank]
        assert error is None, error
        seen, closed, took_s, unchanged, after = result
        assert seen.kinds[0] == "RankLostError", seen
        assert "step 2" in seen.text
        assert "bucket" in seen.text or "control word" in seen.text
        assert "rank 1" in seen.text, "the one that is lost"
        assert f"on rank {rank} of 3" in seen.text
        assert "checkpoint" in seen.text, "the way out"
        assert took_s < TIMEOUT_S + 2.0
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
    begin_s = time.perf_counter()
    if rank == LOST:
        slow = sync.value_and_grad(stopping_loss)
        seen = ending(lambda: slow(mlp(), batch(rank, 1), where, "stall"))
    else:
        seen = ending(lambda: step(mlp(), batch(rank, 1)))
    took_s = time.perf_counter() - begin_s
    dist.barrier()  # all are alive: the same group goes on
    with fddp.GradSync(mlp(), timeout_s=20.0) as sync:
        after = sync.value_and_grad(mlp_loss)(mlp(), batch(0, 0))[1]
    return seen, took_s, torch.func.grad(mlp_loss)(mlp(), batch(0, 0)), after


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_a_rank_that_stalls_mid_step(ranks: RankPool, transport: str, where: str) -> None:
    for rank, told in enumerate(ranks.run(3, stall, transport, where)):
        seen, took_s, expected, after = told
        if rank == LOST:
            assert {"SyncTimeoutError", "RankLostError"} & set(seen.kinds), seen
        else:
            assert seen.kinds[0] == "SyncTimeoutError", seen
            assert "step 1" in seen.text
            assert "bucket" in seen.text or "control word" in seen.text
            assert "timeout_s=1.0" in seen.text
            assert took_s < 1.0 + 2.5
        assert torch.allclose(after["layer0"]["weight"], expected["layer0"]["weight"], rtol=1e-12)


def absent(rank: int, world_size: int) -> Any:
    if rank == LOST:
        time.sleep(2.5)
        return None
    begin_s = time.perf_counter()
    seen = ending(lambda: fddp.GradSync(mlp(), timeout_s=0.5))
    return seen, time.perf_counter() - begin_s


def test_a_rank_that_does_not_build_its_sync(ranks: RankPool) -> None:
    for rank, told in enumerate(ranks.run(3, absent)):
        if rank == LOST:
            continue
        seen, took_s = told
        assert seen.kinds[0] == "SyncTimeoutError"
        assert "rank 1" in seen.text
        assert "timeout_s=0.5" in seen.text
        assert took_s < 2.4


def leave(group: Any) -> Ending:
    """Rank 1 closes its sync where the others have one step more."""
    with fddp.GradSync(mlp(), group=group, timeout_s=2.0) as sync:
        sync.value_and_grad(mlp_loss)(mlp(), batch(0, 0))
        if group.rank == LOST:
            return ending(lambda: None)
        return ending(lambda: sync.value_and_grad(mlp_loss)(mlp(), batch(0, 1)))


def test_a_rank_that_leaves_early() -> None:
    for rank, seen in enumerate(fddp.loopback(3, leave)):
        if rank != LOST:
            assert seen.kinds[0] == "RankLostError"
            assert "step 1" in seen.text
            assert "rank 1" in seen.text
