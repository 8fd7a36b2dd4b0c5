"""Ranks are lost and join: rebuilt `GradSync`s of real processes."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import fddp
from fddp import hooks
from tests.support.backward_calls import call_in_backward
from tests.support.endings import ending
from tests.support.models import batch, largest_difference, mean_gradients, mlp, mlp_loss, same_bits
from tests.support.ranks import run_fresh
from tests.support.rebuilding import SMALL

TIMEOUT_S = 6.0
LOST, LATE = 1, 3


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying_loss(p: Any, x: Tensor) -> Tensor:
    """`mlp_loss`, which ends its process in backward."""
    layer = fddp.tree_map(lambda leaf: call_in_backward(leaf, kill_self), p["layer2"])
    return mlp_loss({**p, "layer2": layer}, x)


def among(ranks: list[int]) -> Any:
    return dist.new_group(ranks, use_local_synchronization=True)


def anew_with(rank: int, world_size: int, store_port: int) -> None:
    """Makes the default group anew, of other ranks."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def lose_one_and_take_one_in(rank: int, world_size: int, transport: str, store_port: int) -> Any:
    """Ranks 0 to 2 train; 1 is killed; 0 and 2 continue; 3 joins them without a state."""
    hook = hooks.power_sgd(2)
    options = {"transport": transport, "timeout_s": TIMEOUT_S}
    params, state, step, seen = mlp(), None, None, {}
    if rank != LATE:
        sync = fddp.GradSync(mlp(), group=among([0, 1, 2]), **SMALL, **options, hook=hook)
        first, state = sync.value_and_grad(mlp_loss), sync.init_state()
        for number in range(2):
            _, grads, state = first(params, batch(rank, number), hook_state=state)
        step = 2
        if rank == LOST:
            sync.value_and_grad(dying_loss)(params, batch(rank, 2), hook_state=state)
        failed = ending(lambda: first(params, batch(rank, 2), hook_state=state))
        assert "RankLostError" in failed.kinds, failed
        plan = sync.plan
        sync = sync.rebuild(among([0, 2]))
        seen["stale"] = ending(lambda: first(params, batch(rank, 2), hook_state=state)).text
        seen["plan"] = sync.plan == plan
        grads, state, info = sync.update(mlp(), state, with_info=True)
        seen["step"] = info.step
    anew_with({0: 0, 2: 1, LATE: 2}[rank], 3, store_port)
    if rank == LATE:
        sync = fddp.GradSync.join(hook=hook, **options)
        mine = None
    else:
        sync = sync.rebuild()
        mine = {"params": params, "hook": state}
    newest, step = fddp.reconcile(mine, step=step, timeout_s=TIMEOUT_S)
    step_fn = sync.value_and_grad(mlp_loss, with_info=True)
    _, grads, _, info = step_fn(newest["params"], batch(rank, 3), hook_state=newest["hook"])
    seen |= {"late plan": sync.plan.to_json(), "late step": info.step, "of": sync.transport}
    return seen, newest["params"], grads, step


_stores: list[dist.TCPStore] = []


def new_store() -> dist.TCPStore:
    """A store of this process, which outlives the test."""
    _stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    return _stores[-1]


@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_a_rank_is_lost_and_another_joins(transport: str) -> None:
    outcomes = run_fresh(4, lose_one_and_take_one_in, transport, new_store().port)
    assert outcomes[LOST].exitcode == -signal.SIGKILL
    left = [outcomes[rank] for rank in (0, 2, LATE)]
    assert [outcome.error for outcome in left] == [None] * 3
    for outcome in left[:2]:
        seen = outcome.result[0]
        assert "sync.rebuild(group), and make a new step = sync.value_and_grad" in seen["stale"]
        assert seen["plan"]
        assert seen["step"] == 3
    assert {outcome.result[0]["late plan"] for outcome in left} == {
        outcomes[0].result[0]["late plan"]
    }
    assert [outcome.result[0]["late step"] for outcome in left] == [4] * 3
    assert {outcome.result[0]["of"] for outcome in left} == {transport}
    assert same_bits([outcome.result[1] for outcome in left])
    assert same_bits([outcome.result[2] for outcome in left])
    assert [outcome.result[3] for outcome in left] == [2] * 3
    inputs = [(batch(rank, 3),) for rank in (0, 2, LATE)]
    expected = mean_gradients(mlp_loss, mlp(), inputs, [1.0] * 3)
    for name, layer in expected.items():  # biases are not compressed
        assert largest_difference(layer["bias"], left[2].result[2][name]["bias"]) < 1e-12


def anew(rank: int, world_size: int, store_port: int) -> Any:
    """The default group is destroyed and made anew, as after a restart of the others."""
    sync = fddp.GradSync(mlp(), **SMALL)
    step = sync.value_and_grad(mlp_loss)
    before = step(mlp(), batch(rank, 0))[1]
    plan = sync.plan
    anew_with(world_size - 1 - rank, world_size, store_port)
    with sync.rebuild() as sync:
        after = sync.value_and_grad(mlp_loss)(mlp(), batch(rank, 0))[1]
        return before, after, sync.plan == plan, sync.rank


def test_after_the_default_group_was_made_anew() -> None:
    outcomes = run_fresh(2, anew, new_store().port)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, outcome.error
        before, after, is_same, own = outcome.result
        assert same_bits([before, after])
        assert is_same
        assert own == 1 - rank
