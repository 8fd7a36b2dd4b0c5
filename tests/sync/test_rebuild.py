"""A `GradSync` goes on: on the ranks that are left, on more ranks, after every kind of failure."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fddp
from fddp import hooks
from fddp.core.protocol.calls import Method
from fddp.runtime.contributions import TreeContributions
from fddp.sync.engine import Engine
from fddp.testing import param_trees
from fddp.tree.pytree import flatten
from tests.support.endings import ending
from tests.support.models import batch, largest_difference, mean_gradients, mlp, mlp_loss, same_bits
from tests.support.pages import alone, run_script, run_sessions
from tests.support.ranks import run_fresh

TIMEOUT_S = 6.0
SMALL = {"bucket_cap_mb": 0.001, "first_bucket_mb": 0.0003}
LOST, LATE = 1, 3


class Kills(torch.autograd.Function):
    """Ends its process when backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return grad


def dying_loss(p: Any, x: Tensor) -> Tensor:
    return mlp_loss({**p, "layer2": fddp.tree_map(Kills.apply, p["layer2"])}, x)


def among(ranks: list[int]) -> Any:
    return dist.new_group(ranks, use_local_synchronization=True)


def anew_with(rank: int, world_size: int, store_port: int) -> None:
    """Makes the default group anew, of other ranks."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def lose_one_and_take_one_in(rank: int, world_size: int, transport: str, store_port: int) -> Any:
    """Ranks 0 to 2 train; 1 is killed; 0 and 2 go on; 3 joins them, with nothing of its own."""
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
        assert "sync = sync.rebuild(group), and step = sync.value_and_grad" in seen["stale"]
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


# On threads


def scrambled() -> Any:
    """Parameters that are registered in another order than they are used in."""
    params = mlp()
    return {f"layer{i}": params[f"layer{i}"] for i in (2, 0, 3, 1)}


def sorted_loss(p: Any, x: Tensor) -> Tensor:
    return mlp_loss(dict(sorted(p.items())), x)


def made(world_size: int, *, steps: int = 0, tree: Any = None, **options: Any) -> list[Any]:
    """A `GradSync` of each rank of a group, after some steps; the group is gone."""

    def run(group: Any) -> fddp.GradSync:
        sync = fddp.GradSync(tree or scrambled(), group=group, **{**SMALL, **options})
        step = sync.value_and_grad(sorted_loss)
        for number in range(steps):
            step(scrambled(), batch(group.rank, number))
        return sync

    return fddp.loopback(world_size, run)


def rebuilt(syncs: list[Any], then: Any = lambda sync: sync, **options: Any) -> list[Any]:
    """What `then` gives on each rank of a new group; None in place of a rank that joins."""

    def run(group: Any) -> Any:
        sync = syncs[group.rank]
        if sync is None:
            return then(fddp.GradSync.join(group, **options))
        return then(sync.rebuild(group))

    return fddp.loopback(len(syncs), run)


def refused(syncs: list[Any], **options: Any) -> list[Any]:
    def run(group: Any) -> Any:
        sync = syncs[group.rank]
        mesh = options.get("mesh")
        return ending(
            lambda: (
                fddp.GradSync.join(group, **options)
                if sync is None
                else sync.rebuild(group, mesh=mesh)
            )
        )

    return fddp.loopback(len(syncs), run)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), before=st.integers(1, 3), after=st.integers(1, 4))
def test_plan_and_means_over_any_numbers_of_ranks(data: Any, before: int, after: int) -> None:
    tree = data.draw(param_trees())
    options = data.draw(
        st.fixed_dictionaries(
            {"deterministic": st.booleans(), "bucket_cap_mb": st.sampled_from([1e-5, 25.0])}
        )
    )
    old = fddp.loopback(before, lambda g: fddp.GradSync(tree, group=g, **options))
    syncs = [old[rank] if rank < before else None for rank in range(after)]

    def mean(sync: fddp.GradSync) -> Any:
        grads = fddp.tree_map(lambda leaf: torch.full_like(leaf, 1.0 + sync.rank), tree)
        return sync.plan, sync(grads)

    for plan, grads in rebuilt(syncs, mean):
        assert plan == old[0].plan
        for leaf in plan.reduced:
            values = flatten(grads)[0][leaf].to(torch.complex128)
            assert torch.allclose(values, torch.full_like(values, (1 + after) / 2))


def test_ranks_that_parted_take_the_plan_of_the_one_that_is_ahead() -> None:
    behind, ahead = made(3), made(3, steps=1)
    assert behind[0].plan != ahead[0].plan
    syncs = rebuilt([behind[0], ahead[1], behind[2]])
    assert [sync.plan for sync in syncs] == [ahead[0].plan] * 3
    grads = rebuilt(syncs, lambda sync: sync.value_and_grad(mlp_loss)(mlp(), batch(sync.rank, 5)))
    expected = mean_gradients(mlp_loss, mlp(), [(batch(r, 5),) for r in range(3)], [1.0] * 3)
    assert largest_difference(expected, grads[1][1]) < 1e-12


def test_a_plan_is_rebuilt_by_arrival_if_it_was_not_yet() -> None:
    """Behind with all: the first step after it does what the first step would have done."""
    syncs = rebuilt(made(2))

    def two_steps(sync: fddp.GradSync) -> Any:
        sync.value_and_grad(sorted_loss)(scrambled(), batch(sync.rank, 0))
        return sync.plan

    assert rebuilt(syncs, two_steps) == [made(2, steps=1)[0].plan] * 2


@pytest.mark.parametrize("weights", [(10.0, 10.0), (3.0, 10.0)])
def test_weighted_bits_are_those_of_an_undisturbed_run(weights: tuple[float, float]) -> None:
    def step(sync: fddp.GradSync, number: int) -> Any:
        fn = sync.value_and_grad(mlp_loss, weight_fn=lambda *_: weights[sync.rank])
        return fn(mlp(), batch(sync.rank, number))[1]

    def undisturbed(group: Any) -> Any:
        with fddp.GradSync(mlp(), group=group) as sync:
            return [step(sync, number) for number in range(4)]

    def first(group: Any) -> Any:
        sync = fddp.GradSync(mlp(), group=group)
        return sync, [step(sync, number) for number in range(2)]

    begun = fddp.loopback(2, first)
    rest = rebuilt(
        [sync for sync, _ in begun], lambda sync: [step(sync, number) for number in range(2, 4)]
    )
    whole = fddp.loopback(2, undisturbed)
    for rank in range(2):
        assert same_bits([whole[rank], begun[rank][1] + rest[rank]])


def test_after_ranks_were_at_different_steps() -> None:
    def part(group: Any) -> Any:
        sync = fddp.GradSync(mlp(), group=group, timeout_s=2.0, **SMALL)
        if group.rank == 0:
            sync._engine.step += 1  # as if it had taken one step more
        parted = ending(lambda: sync(mlp()))
        sync = sync.rebuild(group)
        return parted.kinds[0], sync(mlp(), with_info=True)[1].step

    assert fddp.loopback(3, part) == [("DesyncError", 2)] * 3


def test_after_a_timeout_and_into_a_new_loop() -> None:
    """Rank 1 comes too late; all begin again, with loops of unequal length."""

    def train(group: Any) -> Any:
        sync = fddp.GradSync(mlp(), group=group, timeout_s=0.5, **SMALL)
        end = ending(lambda: time.sleep(0.8) if group.rank == 1 else sync(mlp()))
        sync = sync.rebuild(group)
        step = sync.value_and_grad(mlp_loss)
        batches = [batch(group.rank, n) for n in range(2 + group.rank)]
        return end.kinds[0], [step(mlp(), one)[1] for one in fddp.uneven(batches, sync)]

    told = fddp.loopback(3, train)
    assert [kind for kind, _ in told] == ["SyncTimeoutError", "no error", "SyncTimeoutError"]
    assert [len(grads) for _, grads in told] == [4] * 3
    assert same_bits([grads for _, grads in told])


def test_objects_of_the_old_sync_name_the_new_one() -> None:
    def use(group: Any) -> list[str]:
        old = fddp.GradSync(mlp(), group=group, **SMALL)
        step = old.value_and_grad(mlp_loss)
        closed = []
        with old.rebuild(group) as new:
            closed.append(ending(lambda: step(mlp(), batch(0, 0))).text)
            closed.append(ending(lambda: old(mlp())).text)
            assert new.value_and_grad(mlp_loss)(mlp(), batch(0, 0))
        closed.append(ending(lambda: new(mlp())).text)
        return closed

    for by_step, by_call, by_close in fddp.loopback(2, use):
        assert by_step == by_call
        assert by_call == (
            "this GradSync, or what it belongs to, is closed (rebuild() goes on with another in "
            "its place); take steps with the one that it returned: sync = sync.rebuild(group), and "
            "step = sync.value_and_grad(loss_fn) anew"
        )
        assert by_close == (
            "this GradSync, or what it belongs to, is closed (close() was called); build a new one "
            "on a working group, or go on with this one's plan and state there: "
            "sync = sync.rebuild(group)"
        )


# State of hooks that the engine carries, as it does for wrapped modules


def carry_step(engine: Engine, factor: float) -> None:
    step = engine.open(Method.CALL, with_stats=False)
    leaves = [leaf * factor for leaf in flatten(mlp())[0]]
    step.begin(TreeContributions(engine.program, leaves, 1.0), leaves)
    engine.finish(step)


def test_carried_state_of_hooks() -> None:
    hook = hooks.top_k(0.25)

    def begin(group: Any, steps: int) -> Any:
        sync = fddp.GradSync(mlp(), group=group, deterministic=False, **SMALL)
        sync._engine.set_hook(hook)
        for number in range(steps):
            carry_step(sync._engine, 1 + number + group.rank)
        return sync

    def states(sync: fddp.GradSync) -> Any:
        held = sync._engine.hook_states
        carry_step(sync._engine, 1)
        return held

    two = fddp.loopback(2, begin, 2)
    own = [sync._engine.hook_states for sync in two]
    assert not same_bits(own)
    assert same_bits([own, rebuilt(two, states)])

    # Rank 0 is a step ahead; the others, one of which has just come, take what it has.
    ahead, behind = fddp.loopback(2, begin, 2)[0], fddp.loopback(2, begin, 1)[1]
    first = ahead._engine.hook_states
    assert same_bits([first, *rebuilt([ahead, behind, None], states, hook=hook)])


def test_state_of_hooks_on_the_ranks_that_are_left() -> None:
    """What callers carry, and what engines do, goes on with 0 and 2 of three ranks."""
    hook = hooks.top_k(0.25)

    def grads_of(rank: int, step: int) -> Any:
        torch.manual_seed(10 * rank + step)
        return fddp.tree_map(torch.randn_like, mlp())

    def begin(group: Any) -> Any:
        sync = fddp.GradSync(mlp(), group=group, hook=hook, **SMALL)
        state = sync.init_state()
        for number in range(2):
            _, state = sync.update(grads_of(group.rank, number), state)
        return sync, state

    left = [fddp.loopback(3, begin)[rank] for rank in (0, 2)]
    plan = left[0][0].plan

    def go_on(group: Any) -> Any:
        old, state = left[group.rank]
        grads = grads_of(group.rank, 2)
        with fddp.GradSync(plan, group=group, hook=hook) as fresh:
            expected = fresh.update(grads, state)
            without = fresh.update(grads, fresh.init_state())
        with old.rebuild(group) as new:
            assert new.plan == plan
            return new.update(grads, state), expected, without

    for found, expected, without in fddp.loopback(2, go_on):
        assert same_bits([found, expected])
        assert not same_bits([found, without]), "residuals count"

    def carry(group: Any) -> Any:
        sync = fddp.GradSync(mlp(), group=group, **SMALL)
        sync._engine.set_hook(hook)
        carry_step(sync._engine, 1 + group.rank)
        return sync

    syncs = [fddp.loopback(3, carry)[rank] for rank in (0, 2)]
    own = [sync._engine.hook_states for sync in syncs]
    assert not same_bits(own)

    def held(sync: fddp.GradSync) -> Any:
        states = sync._engine.hook_states
        carry_step(sync._engine, 1)
        return states

    assert same_bits([own, rebuilt(syncs, held)])


# Shards


def test_shards_stay_where_the_ranks_do() -> None:
    old = made(2, algorithm="reduce_scatter")
    whole = rebuilt(old, lambda sync: sync.all_gather(sync.reduce_scatter(mlp())))
    assert largest_difference(whole[0], mlp()) < 1e-15

    for rank, told in enumerate(refused([*made(2, algorithm="reduce_scatter"), None])):
        assert told.kinds[0] == ("ValueError" if rank < 2 else "PlanMismatchError")
        own = rank % 2
        assert f"rank {own} of Topology(world=2) would be rank {own} of Topology(world=3)" in (
            told.text
        )
        assert "GradSync(sync.plan, algorithm='reduce_scatter', group=group)" in told.text
        assert "sync.shard(tree)" in told.text


# Refused, on every rank


def test_another_plan_is_named() -> None:
    small, large = fddp.plan_buckets(mlp(), bucket_cap_mb=0.001), fddp.plan_buckets(mlp())

    def begin(plan: fddp.BucketPlan) -> list[Any]:
        return fddp.loopback(3, lambda group: fddp.GradSync(plan, group=group))

    one, other = begin(small), begin(large)
    for told in refused([one[0], one[1], other[2]]):
        assert "PlanMismatchError" in told.kinds
        assert "caps is [1048576, 1048] on rank 0 and [1048576, 26214400] on rank 2" in told.text
    order = fddp.rebucket(small, [3, 1])
    for told in refused([one[0], one[1], begin(order)[2]]):
        assert "ranks 0 and 2 have the same leaves but other buckets or order" in told.text
    wider = {**mlp(), "layer0": {"weight": torch.zeros(8, 8), "bias": torch.zeros(9)}}
    for told in refused([made(2)[0], made(2, tree=wider)[1]]):
        assert "leaf 'layer0.bias' of shape (8,), float64 on cpu" in told.text
        assert "where rank 1 has leaf 'layer0.bias' of shape (9,)" in told.text


def test_options_that_differ_are_named() -> None:
    for told in refused([made(2)[0], made(2, deterministic=True)[1]]):
        assert "PlanMismatchError" in told.kinds
        assert "deterministic is False on rank 0 and True on rank 1" in told.text
    for told in refused([made(2, hook=hooks.fp16_compress)[0], None], hook=hooks.bf16_compress):
        assert "the same hook" in told.text
    for told in refused([None, None]):
        assert "none of the 2 ranks has a GradSync to go on with" in told.text


def test_new_sync_does_not_meet_continuing_ones() -> None:
    old = made(2)

    def run(group: Any) -> Any:
        if group.rank == 2:
            return ending(lambda: fddp.GradSync(scrambled(), group=group, **SMALL))
        return ending(lambda: old[group.rank].rebuild(group))

    for told in fddp.loopback(3, run):
        assert told.kinds[0] == "DesyncError"
        assert "standing" in told.text
        assert "terms" in told.text


def test_local_failures_are_raised_on_all_ranks() -> None:
    kinds = []
    for told in refused([made(1)[0], None], params=[torch.zeros(3)]):
        assert "has the leaf 'layer1.bias' of shape (8,), float64, and params has no" in told.text
        kinds.append(told.kinds[0])
    assert kinds == ["PlanMismatchError"] * 2
    for told in refused([made(1)[0], None], timeout_s=-1.0):
        assert "rank 1" in told.text
        assert "timeout_s must be above 0" in told.text
    for told in refused([made(1)[0], None], mesh=fddp.Topology(host=2, local=2)):
        assert "the mesh Topology(host=2, local=2) has 4 ranks, and the group 2" in told.text


def test_a_schedule_that_was_passed_in_is_for_its_ranks() -> None:
    plan = fddp.plan_buckets(mlp())
    schedule = fddp.make_schedule(plan, fddp.Topology(world=2))
    old = fddp.loopback(2, lambda group: fddp.GradSync(schedule, group=group))
    grads = rebuilt(old, lambda sync: sync(mlp()))
    assert largest_difference(grads[1], mlp()) < 1e-15
    old = fddp.loopback(2, lambda group: fddp.GradSync(schedule, group=group))
    for told in refused([*old, None]):
        assert "schedule that was passed in, for Topology(world=2), and the group has" in told.text


def test_meshes() -> None:
    mesh = fddp.Topology(host=2, local=2)

    def begin(group: Any) -> fddp.GradSync:
        return fddp.GradSync(mlp(), group=group, mesh=mesh, algorithm="hierarchical")

    same = rebuilt(fddp.loopback(4, begin), lambda sync: (sync.schedule.topology, sync(mlp())))
    assert {str(axes) for axes, _ in same} == {str(mesh)}
    assert largest_difference(same[3][1], mlp()) < 1e-15
    for told in refused(fddp.loopback(4, begin)[:2]):
        assert "pass mesh= with the axes of the ranks that are left" in told.text
    for told in refused(fddp.loopback(4, begin)[:2], mesh=fddp.Topology(world=2)):
        assert "'hierarchical' needs a mesh of at least two axes" in told.text

    left = fddp.loopback(4, begin)[:2]

    def shrink(group: Any) -> Any:
        axes = fddp.Topology(host=1, local=2)
        with left[group.rank].rebuild(group, mesh=axes) as sync:
            return str(sync.schedule.topology), sync(mlp())

    for axes, grads in fddp.loopback(2, shrink):
        assert axes == "Topology(host=1, local=2)"
        assert largest_difference(grads, mlp()) < 1e-15


def test_not_within_a_backward_pass() -> None:
    def run(group: Any) -> Any:
        sync = fddp.GradSync(mlp(), group=group, **SMALL)

        class Rebuilds(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                sync.rebuild(group)
                return grad

        step = sync.value_and_grad(lambda p, x: Rebuilds.apply(mlp_loss(p, x)))
        seen = ending(lambda: step(mlp(), batch(0, 0)))
        return seen, sync(mlp())  # it is as it was

    for seen, _ in fddp.loopback(2, run):
        assert seen.kinds[0] == "ReentryError"
        assert "rebuild was called while backward of a step runs" in seen.text


def test_not_within_a_loss_function() -> None:
    """Nor after another step has been taken in it, nor where it was closed in it."""

    def run(group: Any) -> Any:
        sync = fddp.GradSync(mlp(), group=group, **SMALL)
        plain = sync.value_and_grad(mlp_loss)

        def loss_fn(p: Any, x: Tensor, first: Any) -> Tensor:
            first()
            sync.rebuild(group)
            return mlp_loss(p, x)

        step = sync.value_and_grad(loss_fn)
        x = batch(0, 0)
        told = [
            ending(lambda: step(mlp(), x, lambda: None)),
            ending(lambda: step(mlp(), x, lambda: plain(mlp(), x))),
        ]
        after = sync(mlp())  # it is as it was
        told.append(ending(lambda: step(mlp(), x, sync.close)))
        return told, after, sync.rebuild(group)(mlp())

    for told, *_ in fddp.loopback(2, run):
        alone, nested, _ = told
        for seen in (alone, nested):
            assert seen.kinds[0] == "ReentryError"
            assert "rebuild was called while the loss function of a step runs" in seen.text
            assert seen.text.count("rank 0") <= 1, seen.text


def test_not_a_second_time() -> None:
    def run(group: Any) -> Any:
        old = fddp.GradSync(mlp(), group=group, **SMALL)
        new = old.rebuild(group)
        seen = ending(lambda: old.rebuild(group))
        return seen, new(mlp())

    for seen, _ in fddp.loopback(2, run):
        assert seen.kinds[0] == "ClosedError"
        assert "rebuild was called a second time" in seen.text
        assert "take steps with the one that it returned" in seen.text


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

    for told in fddp.loopback(3, run)[:2]:
        assert "RankLostError" in told.kinds
        assert "rank 2" in told.text
    # Those that are left go on without it, too.
    assert [sync.plan for sync in rebuilt(old[:2])] == [old[0].plan] * 2


def test_local_leaves_may_differ() -> None:
    def begin(group: Any) -> fddp.GradSync:
        tree = {"own": torch.zeros(1 + group.rank), "w": torch.zeros(3)}
        return fddp.GradSync(tree, group=group, select=lambda path: path == "w")

    old = fddp.loopback(2, begin)

    def run(group: Any) -> Any:
        tree = {"own": torch.ones(1 + group.rank), "w": torch.full((3,), float(group.rank))}
        if group.rank < 2:
            sync = old[group.rank].rebuild(group)
        else:
            sync = fddp.GradSync.join(group, params=tree)
        return fddp.tree_map(torch.Tensor.tolist, sync(tree))

    for rank, grads in enumerate(fddp.loopback(3, run)):
        assert grads == {"own": [1.0] * (1 + rank), "w": [1.0] * 3}


def test_arrays_of_jax() -> None:
    jnp = pytest.importorskip("jax.numpy")
    tree = {"w": jnp.zeros(3), "b": jnp.zeros(16)}
    old = fddp.loopback(2, lambda group: fddp.GradSync(tree, group=group))

    def run(group: Any) -> Any:
        late = group.rank == 2
        sync = fddp.GradSync.join(group, params=tree) if late else old[group.rank].rebuild(group)
        return sync({"w": jnp.full(3, float(group.rank)), "b": None})

    for grads in fddp.loopback(3, run):
        assert type(grads["w"]) is type(tree["w"])
        assert grads["w"].tolist() == [1.0] * 3


# The page


@pytest.mark.slow
def test_the_page_runs_on_two_ranks(tmp_path: Path) -> None:
    run_script("docs/going_on.md", tmp_path)


def loop_of_the_page(rank: int, world_size: int) -> Any:
    """The loop of the page's first block; rank 1 is killed in its sixth loss function."""
    page: dict[str, Any] = {}
    exec(alone("docs/going_on.md", "python").split("dist.init_process_group")[0], page)
    calls, loss_fn = [], page["loss_fn"]

    def dying(params: Any, x: Tensor) -> Tensor:
        calls.append(x)
        if rank == LOST and len(calls) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss_fn(params, x)

    page["loss_fn"] = dying
    zeros = {"w": torch.zeros(3, 1)}
    state, sync = page["train"]({"params": zeros, "momenta": zeros}, 0, steps=9)
    return state, sync.world_size, len(calls)


def test_the_loop_of_the_page_loses_a_rank() -> None:
    outcomes = run_fresh(3, loop_of_the_page)
    assert outcomes[LOST].exitcode == -signal.SIGKILL
    (zero, size, calls), (two, *same) = outcomes[0].result, outcomes[2].result
    assert same_bits([zero, two])
    assert [size, calls] == same == [2, 10], "the step that failed is taken again"


def test_sessions_of_the_page() -> None:
    failed, attempted = run_sessions("docs/going_on.md")
    assert attempted
    assert not failed
