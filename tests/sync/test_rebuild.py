"""A rebuilt `GradSync` continues: plan, means, weights, steps, hook state and shards."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fddp
from fddp import hooks
from fddp.testing import param_trees
from fddp.tree.pytree import flatten
from tests.support.endings import ending
from tests.support.models import batch, largest_difference, mean_gradients, mlp, mlp_loss, same_bits
from tests.support.rebuilding import SMALL, made, rebuilt, refused, scrambled, sorted_loss


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


def test_diverged_ranks_take_the_plan_of_the_most_advanced() -> None:
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

    outcome = fddp.loopback(3, train)
    assert [kind for kind, _ in outcome] == ["SyncTimeoutError", "no error", "SyncTimeoutError"]
    assert [len(grads) for _, grads in outcome] == [4] * 3
    assert same_bits([grads for _, grads in outcome])


def test_objects_of_the_old_sync_name_the_new_one() -> None:
    def use(group: Any) -> list[str]:
        old = fddp.GradSync(mlp(), group=group, **SMALL)
        step = old.value_and_grad(mlp_loss)
        closed = []
        with old.rebuild(group) as new:
            closed.append(ending(lambda: step(mlp(), batch(0, 0))).text)
            closed.append(ending(lambda: old(mlp())).text)
            closed.append(ending(lambda: old.rebuild(group)).text)
            assert new.value_and_grad(mlp_loss)(mlp(), batch(0, 0))
        closed.append(ending(lambda: new(mlp())).text)
        return closed

    for by_step, by_call, by_rebuild, by_close in fddp.loopback(2, use):
        assert "rebuild was called a second time" in by_rebuild
        assert "use the new one: sync = sync.rebuild(group)" in by_rebuild
        assert by_step == by_call
        assert by_call == (
            "this GradSync, or its owner, is closed (rebuild() has replaced it); use the new one: "
            "sync = sync.rebuild(group), and make a new step = sync.value_and_grad(loss_fn)"
        )
        assert by_close == (
            "this GradSync, or its owner, is closed (close() was called); build a new one on a "
            "working group, or rebuild this one there with its plan and state: "
            "sync = sync.rebuild(group)"
        )


def test_state_of_hooks_on_the_ranks_that_are_left() -> None:
    """Ranks 0 and 2 of three keep their states."""
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


# Shards


def test_shards_stay_where_the_ranks_do() -> None:
    old = made(2, algorithm="reduce_scatter")
    whole = rebuilt(old, lambda sync: sync.all_gather(sync.reduce_scatter(mlp())))
    assert largest_difference(whole[0], mlp()) < 1e-15

    for rank, outcome in enumerate(refused([*made(2, algorithm="reduce_scatter"), None])):
        assert outcome.kinds[0] == ("ValueError" if rank < 2 else "PlanMismatchError")
        own = rank % 2
        assert f"rank {own} of Topology(world=2) would be rank {own} of Topology(world=3)" in (
            outcome.text
        )
        assert "GradSync(sync.plan, algorithm='reduce_scatter', group=group)" in outcome.text
        assert "sync.shard(tree)" in outcome.text


def test_meshes() -> None:
    mesh = fddp.Topology(host=2, local=2)

    def begin(group: Any) -> fddp.GradSync:
        return fddp.GradSync(mlp(), group=group, mesh=mesh, algorithm="hierarchical")

    same = rebuilt(fddp.loopback(4, begin), lambda sync: (sync.schedule.topology, sync(mlp())))
    assert {str(axes) for axes, _ in same} == {str(mesh)}
    assert largest_difference(same[3][1], mlp()) < 1e-15
    for outcome in refused(fddp.loopback(4, begin)[:2]):
        assert "pass mesh= with the axes of the new group" in outcome.text
    for outcome in refused(fddp.loopback(4, begin)[:2], mesh=fddp.Topology(world=2)):
        assert "'hierarchical' needs a mesh of at least two axes" in outcome.text

    left = fddp.loopback(4, begin)[:2]

    def shrink(group: Any) -> Any:
        axes = fddp.Topology(host=1, local=2)
        with left[group.rank].rebuild(group, mesh=axes) as sync:
            return str(sync.schedule.topology), sync(mlp())

    for axes, grads in fddp.loopback(2, shrink):
        assert axes == "Topology(host=1, local=2)"
        assert largest_difference(grads, mlp()) < 1e-15


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
