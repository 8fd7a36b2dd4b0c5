"""Shards: a sharded Adam ends where plain Adam does, and no element is lost or owned twice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fddp
from fddp import Topology
from fddp.testing import assert_mean, gradients, param_trees, schedules, topologies
from fddp.tree.pytree import flatten
from tests.support.collectives import on_start
from tests.support.endings import Ending, ending
from tests.support.models import (
    batch,
    largest_difference,
    mean_gradients,
    mlp,
    mlp_loss,
    same_bits,
)
from tests.support.ranks import Launch
from tests.support.rebuilding import scrambled, sorted_loss

SMALL = {"bucket_cap_mb": 0.0003, "first_bucket_mb": 0.0001}
STEPS = 5


class Adam:
    """torch's Adam over the leaves of a tree, which it writes."""

    def __init__(self, tree: Any) -> None:
        self._leaves = flatten(tree)[0]
        self._optimizer = torch.optim.Adam(self._leaves, lr=0.02, weight_decay=0.1)

    def update_(self, grads: Any) -> None:
        for leaf, grad in zip(self._leaves, flatten(grads)[0], strict=True):
            leaf.grad = grad
        self._optimizer.step()

    @property
    def state_numel(self) -> int:
        """Elements of the first moments."""
        return sum(state["exp_avg"].numel() for state in self._optimizer.state.values())


class Trained(NamedTuple):
    params: Any
    state_numel: int
    bucket_numels: tuple[int, ...]


def train_sharded(group: Any, mesh: Topology) -> Trained:
    """Each rank keeps the optimizer's state of its own shard only."""
    params = mlp()
    with fddp.GradSync(params, group=group, mesh=mesh, algorithm="reduce_scatter", **SMALL) as sync:
        shards = sync.shard(params)
        adam, step = Adam(shards), sync.value_and_grad(mlp_loss)
        for number in range(STEPS):
            _, grads = step(params, batch(sync.rank, number))
            adam.update_(grads)
            params = sync.all_gather(shards)
        numels = tuple(bucket.numel for bucket in sync.plan.buckets)
        return Trained(params, adam.state_numel, numels)


def train_alone(world_size: int) -> Any:
    """Plain Adam in one process, on the mean of all ranks' gradients."""
    params = mlp()
    adam = Adam(params)
    for number in range(STEPS):
        own = [(batch(rank, number),) for rank in range(world_size)]
        adam.update_(mean_gradients(mlp_loss, params, own, [1.0] * world_size))
    return params


MESHES = [
    Topology(host=2, local=2),
    Topology(host=1, local=3),
    Topology(world=2),
    Topology(world=1),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_sharded_adam_ends_where_plain_adam_does(launch: Launch, mesh: Topology) -> None:
    world_size = mesh.world_size
    runs = launch(world_size, train_sharded, mesh)
    expected = train_alone(world_size)
    assert largest_difference(expected, mlp()) > 0.05, "it has moved"
    assert same_bits([run.params for run in runs])
    assert largest_difference(runs[0].params, expected) < 1e-12
    # The state is divided by the ranks.
    total = sum(leaf.numel() for leaf in flatten(mlp())[0])
    assert sum(run.state_numel for run in runs) == total
    for run in runs:
        assert run.state_numel <= sum(-(-numel // world_size) for numel in run.bucket_numels)


# Laws


def assert_equal(found: Any, expected: Any) -> None:
    """Bits, dtypes, strides and structure."""
    leaves, treedef = flatten(found)
    wanted, wanted_def = flatten(expected)
    assert treedef == wanted_def
    for leaf, want in zip(leaves, wanted, strict=True):
        assert (leaf is None) == (want is None)
        if leaf is not None:
            assert leaf.dtype == want.dtype
            assert torch.equal(leaf, want)
            assert leaf.numel() < 2 or 1 in leaf.shape or leaf.stride() == want.stride()


def numbered(leaf: Tensor) -> Tensor:
    """Each element its position in memory; small enough for every dtype."""
    order = torch.empty_like(leaf, dtype=torch.float64)
    if leaf.numel():
        order.as_strided((leaf.numel(),), (1,)).copy_(torch.arange(leaf.numel()))
    return order.to(leaf.dtype)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_every_element_is_owned_once(data: st.DataObject) -> None:
    tree = fddp.tree_map(numbered, data.draw(param_trees()))
    plan = fddp.plan_buckets(tree, **SMALL)
    schedule = data.draw(schedules(st.just(plan), algorithms=["reduce_scatter"]))
    topology = schedule.topology

    def run(group: Any) -> list[Any]:
        with fddp.GradSync(schedule, group=group) as sync:
            shards = sync.shard(tree)
            before = fddp.tree_map(torch.clone, shards)
            assert_equal(sync.all_gather(shards), tree)
            assert same_bits([shards, before]), "shards are not written"
            return flatten(shards)[0]

    every = fddp.loopback(topology.world_size, run)
    for leaf, *shards in zip(flatten(tree)[0], *every, strict=True):
        if leaf is None or not (leaf.is_floating_point() or leaf.is_complex()):
            continue
        owned = [shard.real.tolist() for shard in shards]
        assert all(shard.ndim == 1 for shard in shards)
        assert all(own == sorted(own) for own in owned), "in the order of memory"
        assert sorted(x for own in owned for x in own) == [*range(leaf.numel())]


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_scatter_and_gather_give_the_bits_of_all_reduce(data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, 4))
    tree = data.draw(param_trees())
    trees = data.draw(gradients(tree, world_size))
    # Their sums are exact in float64. The two schedules carry the control word in different
    # formats, and a total weight that has to be rounded may be rounded differently.
    few_bits = st.floats(0.5, 8.0, width=16)
    weights = data.draw(st.lists(few_bits, min_size=world_size, max_size=world_size))

    def run(group: Any) -> None:
        plan = fddp.plan_buckets(tree, **SMALL)
        own, weight = trees[group.rank], weights[group.rank]
        with (
            fddp.GradSync(plan, group=group) as flat,
            fddp.GradSync(plan, group=group, algorithm="reduce_scatter") as sharded,
        ):
            shards = sharded.reduce_scatter(own, weight=weight)
            assert same_bits([sharded.all_gather(shards), flat(own, weight=weight)])

    fddp.loopback(world_size, run)


@settings(max_examples=30)
@given(st.data())
def test_shards_of_a_mean_are_shards_of_the_whole_mean(data: st.DataObject) -> None:
    topology, tree = data.draw(topologies(max_ranks=4)), data.draw(param_trees())
    trees = data.draw(gradients(tree, topology.world_size))

    def run(group: Any) -> None:
        with fddp.GradSync(
            tree, group=group, mesh=topology, algorithm="reduce_scatter", **SMALL
        ) as sync:
            shards = sync.reduce_scatter(trees[sync.rank])
            assert same_bits([sync.shard(sync.all_gather(shards)), shards])

    fddp.loopback(topology.world_size, run)


# Values, and who takes part


def test_shards_are_values() -> None:
    def run(group: Any) -> None:
        grads = {"a": torch.arange(5.0), "b": torch.ones(3)}
        with fddp.GradSync(grads, group=group, algorithm="reduce_scatter") as sync:
            first = sync.reduce_scatter(grads)
            kept = fddp.tree_map(torch.clone, first)
            second = sync.reduce_scatter(fddp.tree_map(lambda g: 2 * g, grads))
            whole = sync.all_gather(second)
            assert same_bits([first, kept])
            for shard in flatten(second)[0]:
                shard.zero_()
            assert same_bits([sync.all_gather(first), grads])
            assert whole["a"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
            own = sync.shard(grads)
            own["a"].zero_()
            assert grads["a"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]

    fddp.loopback(2, run)


def test_what_pads_a_bucket_is_zero() -> None:
    """No rank sends what memory happened to hold."""

    def run(group: Any) -> list[Any]:
        grads, padding = {"w": torch.ones(5)}, []
        with fddp.GradSync(grads, group=group, algorithm="reduce_scatter") as sync:
            engine = sync._engine
            engine._pool._allocate = lambda n, dtype, _: torch.full((n,), math.nan, dtype=dtype)

            def note(operation: Any) -> None:
                if operation.kind == "reduce_scatter":
                    padding.append(operation.tensor[5:].tolist())

            on_start(sync, before=note)
            sync.reduce_scatter(grads)
            sync.value_and_grad(lambda params: params["w"].sum())(grads)
        return padding

    assert fddp.loopback(3, run) == [[[0.0]] * 2] * 3


def test_one_rank_alone_may_take_its_shard() -> None:
    def run(group: Any) -> int:
        params = {"a": torch.ones(5)}
        with fddp.GradSync(params, group=group, algorithm="reduce_scatter") as sync:
            shards = [sync.shard(params)["a"] for _ in range(1 + 3 * group.rank)]
            assert_equal(sync.all_gather({"a": shards[-1]}), params)
            return shards[0].numel()

    assert fddp.loopback(2, run) == [3, 2]


def test_leaves_in_no_bucket_stay_whole() -> None:
    def run(group: Any) -> None:
        params = {"w": torch.ones(4), "own": torch.full((3,), 1.0 + group.rank), "n": None}
        with fddp.GradSync(
            params, group=group, algorithm="reduce_scatter", select=lambda path: path != "own"
        ) as sync:
            shards = sync.reduce_scatter(params)
            assert shards["w"].shape == (2,)
            assert torch.equal(shards["own"], params["own"])
            assert shards["n"] is None
            whole = sync.all_gather(shards)
            assert_equal(whole, params)
            shards["own"].zero_()
            assert_equal(whole, params)

    fddp.loopback(2, run)


def test_plans_of_shards_stay() -> None:
    """Though gradients arrive in another order than that of the plan."""

    def run(group: Any) -> None:
        params = scrambled()
        with fddp.GradSync(params, group=group, algorithm="reduce_scatter", **SMALL) as sync:
            plan = sync.plan
            for number in range(3):
                sync.value_and_grad(sorted_loss)(params, batch(sync.rank, number))
            assert sync.plan == plan

    fddp.loopback(2, run)


def test_pieces_may_be_handed_out_in_any_order() -> None:
    plan = fddp.plan_buckets({"a": torch.zeros(8)})
    topology = fddp.Topology(world=2, one=1)
    built = fddp.make_schedule(plan, topology, algorithm="reduce_scatter", split_mb=16 / 2**20)
    *others, first, second = built.ops
    assert (first.kind, second.kind) == ("unpack", "unpack")
    # An axis of one place divides nothing, whether it is named or not.
    named = second._replace(region=second.region._replace(shard=("one", "world")))
    schedule = dataclasses.replace(built, ops=(*others, named, first))

    def there_and_back(group: Any) -> Any:
        with fddp.GradSync(schedule, group=group) as sync:
            shards = sync.reduce_scatter({"a": torch.arange(8.0)})
            return sync.all_gather(shards)["a"].tolist()

    assert fddp.loopback(2, there_and_back) == [[*map(float, range(8))]] * 2


# Bad input: errors on every rank, after which the group is still usable

GRID = Topology(host=2, local=2)


def two_leaves() -> dict[str, Tensor]:
    return {"a": torch.ones(3), "b": torch.full((2,), 2.0)}


@pytest.mark.parametrize("algorithm", ["all_reduce", "hierarchical", "reduce_scatter"])
@pytest.mark.parametrize("culprits", [(1,), (0, 1, 2, 3)], ids=["one", "all"])
def test_methods_of_another_algorithm(algorithm: Any, culprits: tuple[int, ...]) -> None:
    def run(group: Any) -> None:
        with fddp.GradSync(two_leaves(), group=group, mesh=GRID, algorithm=algorithm) as own:
            whole = {"sync(grads)": own, "reduce_(grads)": own.reduce_}
            shards = {
                "reduce_scatter(grads)": own.reduce_scatter,
                "all_gather(shards)": own.all_gather,
            }
            is_sharded = algorithm == "reduce_scatter"
            right = own.reduce_scatter if is_sharded else own
            for name, wrong in (whole if is_sharded else shards).items():
                call = wrong if group.rank in culprits else right
                end = ending(lambda: call(two_leaves()))  # noqa: B023 - called at once
                found = end.text if group.rank in culprits else end.failures[1]
                assert end.kinds[0] == ("ValueError" if group.rank in culprits else "PeerError")
                assert f"{name} needs a GradSync whose schedule gives a " in found
                assert "build it with another algorithm" in found
            if not is_sharded:
                assert ending(lambda: own.shard(two_leaves())).kinds[0] == "ValueError"
            assert_mean(own, [two_leaves()] * 4)

    fddp.loopback(4, run)


SHARDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "whole leaves": (lambda shards: two_leaves(), "of the shards is float32 of shape"),
    "of another dtype": (
        lambda shards: {**shards, "b": shards["b"].double()},
        "leaf 'b' of the shards is float64 of shape",
    ),
    "no tensors": (
        lambda shards: {**shards, "a": 3.0},
        "leaf 'a' of the shards is a float where this rank owns",
    ),
    "of another structure": (
        lambda shards: {"a": shards["a"]},
        "shards does not have the expected leaves",
    ),
}


def gather_wrongly(group: Any, name: str) -> tuple[Ending, list[float]]:
    with fddp.GradSync(two_leaves(), group=group, algorithm="reduce_scatter") as own:
        shards = own.reduce_scatter(two_leaves())
        wrong = SHARDS[name][0](shards) if own.rank == 1 else shards
        end = ending(lambda: own.all_gather(wrong))
        assert_mean(own, [two_leaves()] * own.world_size)
        return end, own.all_gather(shards)["a"].tolist()


@pytest.mark.parametrize("name", SHARDS)
def test_shards_that_a_rank_does_not_own(name: str) -> None:
    for rank, (end, whole) in enumerate(fddp.loopback(2, gather_wrongly, name)):
        text = end.text if rank == 1 else end.failures[1]
        assert end.kinds[0] == ("TreeMismatchError" if rank == 1 else "PeerError")
        assert SHARDS[name][1] in text
        assert whole == [1.0] * 3


def test_a_shard_that_is_none_on_some_ranks() -> None:
    def leave_out(group: Any) -> Ending:
        with fddp.GradSync(two_leaves(), group=group, algorithm="reduce_scatter") as own:
            shards = own.shard(two_leaves())
            missing = {**shards, "a": None} if own.rank == 0 else shards
            end = ending(lambda: own.all_gather(missing))
            assert own.all_gather({**shards, "a": None})["a"] is None
            assert_mean(own, [two_leaves()] * own.world_size)
            return end

    for end in fddp.loopback(2, leave_out):
        assert end.kinds[0] == "TreeMismatchError"
        assert "leaf 'a' of the shards is None on 1 of 2 ranks" in end.text
        assert "pass its shard on every rank, or None on all" in end.text


def test_different_calls_are_reported() -> None:
    def run(group: Any) -> Ending:
        with fddp.GradSync(
            two_leaves(), group=group, algorithm="reduce_scatter", timeout_s=5
        ) as own:
            shards = own.shard(two_leaves())
            if group.rank == 0:
                return ending(lambda: own.all_gather(shards))
            return ending(lambda: own.reduce_scatter(two_leaves()))

    for end in fddp.loopback(2, run):
        assert "DesyncError" in end.kinds
