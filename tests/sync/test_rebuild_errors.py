"""Errors of `rebuild` and `join`, raised on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fddp
from fddp import hooks
from tests.support.backward_calls import call_in_backward
from tests.support.endings import ending
from tests.support.models import batch, largest_difference, mlp, mlp_loss
from tests.support.rebuilding import SMALL, made, rebuilt, refused, scrambled


def test_another_plan_is_named() -> None:
    small, large = fddp.plan_buckets(mlp(), bucket_cap_mb=0.001), fddp.plan_buckets(mlp())

    def begin(plan: fddp.BucketPlan) -> list[Any]:
        return fddp.loopback(3, lambda group: fddp.GradSync(plan, group=group))

    one, other = begin(small), begin(large)
    for outcome in refused([one[0], one[1], other[2]]):
        assert "PlanMismatchError" in outcome.kinds
        assert "caps is [1048576, 1048] on rank 0 and [1048576, 26214400] on rank 2" in outcome.text
    order = fddp.rebucket(small, [3, 1])
    for outcome in refused([one[0], one[1], begin(order)[2]]):
        assert "ranks 0 and 2 have the same leaves but other buckets or order" in outcome.text
    wider = {**mlp(), "layer0": {"weight": torch.zeros(8, 8), "bias": torch.zeros(9)}}
    for outcome in refused([made(2)[0], made(2, tree=wider)[1]]):
        assert "leaf 'layer0.bias' of shape (8,), float64 on cpu" in outcome.text
        assert "where rank 1 has leaf 'layer0.bias' of shape (9,)" in outcome.text


def test_options_that_differ_are_named() -> None:
    for outcome in refused([made(2)[0], made(2, deterministic=True)[1]]):
        assert "PlanMismatchError" in outcome.kinds
        assert "deterministic is False on rank 0 and True on rank 1" in outcome.text
    for outcome in refused([made(2, hook=hooks.fp16_compress)[0], None], hook=hooks.bf16_compress):
        assert "the same hook" in outcome.text
    for outcome in refused([None, None]):
        assert "none of the 2 ranks has a GradSync to go on with" in outcome.text


def test_new_sync_does_not_meet_continuing_ones() -> None:
    old = made(2)

    def run(group: Any) -> Any:
        if group.rank == 2:
            return ending(lambda: fddp.GradSync(scrambled(), group=group, **SMALL))
        return ending(lambda: old[group.rank].rebuild(group))

    for outcome in fddp.loopback(3, run):
        assert outcome.kinds[0] == "DesyncError"
        assert "progress" in outcome.text
        assert "terms" in outcome.text


def test_local_failures_are_raised_on_all_ranks() -> None:
    kinds = []
    for outcome in refused([made(1)[0], None], params=[torch.zeros(3)]):
        assert "has leaf 'layer1.bias' of shape (8,), float64, and params has no" in outcome.text
        kinds.append(outcome.kinds[0])
    assert kinds == ["PlanMismatchError"] * 2
    for outcome in refused([made(1)[0], None], timeout_s=-1.0):
        assert "rank 1" in outcome.text
        assert "timeout_s must be above 0" in outcome.text
    for outcome in refused([made(1)[0], None], mesh=fddp.Topology(host=2, local=2)):
        assert "the mesh Topology(host=2, local=2) has 4 ranks, and the group 2" in outcome.text


def test_a_schedule_that_was_passed_in_is_for_its_ranks() -> None:
    plan = fddp.plan_buckets(mlp())
    schedule = fddp.make_schedule(plan, fddp.Topology(world=2))
    old = fddp.loopback(2, lambda group: fddp.GradSync(schedule, group=group))
    grads = rebuilt(old, lambda sync: sync(mlp()))
    assert largest_difference(grads[1], mlp()) < 1e-15
    old = fddp.loopback(2, lambda group: fddp.GradSync(schedule, group=group))
    for outcome in refused([*old, None]):
        assert "the schedule was passed in for Topology(world=2), and the group has" in outcome.text


def test_not_within_a_step() -> None:
    """In its loss function, also after another step has been taken there, or in backward. Where the
    GradSync was closed in a loss function, it can be rebuilt later."""

    def run(group: Any) -> Any:
        sync = fddp.GradSync(mlp(), group=group, **SMALL)
        plain = sync.value_and_grad(mlp_loss)

        def loss_fn(p: Any, x: Tensor, first: Any) -> Tensor:
            first()
            sync.rebuild(group)
            return mlp_loss(p, x)

        def in_backward(p: Any, x: Tensor) -> Tensor:
            return call_in_backward(mlp_loss(p, x), lambda: sync.rebuild(group))

        step = sync.value_and_grad(loss_fn)
        x = batch(0, 0)
        outcome = [
            ending(lambda: step(mlp(), x, lambda: None)),
            ending(lambda: step(mlp(), x, lambda: plain(mlp(), x))),
            ending(lambda: sync.value_and_grad(in_backward)(mlp(), x)),
        ]
        after = sync(mlp())  # it is as it was
        ending(lambda: step(mlp(), x, sync.close))
        return outcome, after, sync.rebuild(group)(mlp())

    for outcome, *_ in fddp.loopback(2, run):
        places = [
            "the loss function of a step",
            "the loss function of a step",
            "backward of a step",
        ]
        for seen, place in zip(outcome, places, strict=True):
            assert seen.kinds[0] == "ReentryError"
            assert f"rebuild was called while {place} runs" in seen.text
            assert seen.text.count("rank 0") <= 1, seen.text


@pytest.mark.parametrize("group", ["x", 3, ["a"]])
def test_invalid_groups_are_refused(group: Any) -> None:
    sync = made(1)[0]
    for call in (
        lambda: sync.rebuild(group),
        lambda: fddp.GradSync.join(group),
        lambda: fddp.GradSync(mlp(), group=group),
        lambda: fddp.reconcile(1.0, group, step=0),
    ):
        with pytest.raises(TypeError, match=f"group must be .* got a {type(group).__name__}"):
            call()
    assert rebuilt([sync], lambda sync: sync.world_size) == [1], "it is as it was"


def test_a_rank_that_is_lost_meanwhile() -> None:
    old = made(3)

    def run(group: Any) -> Any:
        if group.rank == 2:
            return None
        return ending(lambda: old[group.rank].rebuild(group))

    for outcome in fddp.loopback(3, run)[:2]:
        assert "RankLostError" in outcome.kinds
        assert "rank 2" in outcome.text
    # The survivors continue without it, too.
    assert [sync.plan for sync in rebuilt(old[:2])] == [old[0].plan] * 2
