"""Optimal plans: brute force as the oracle, and DDP's plans, never beaten by either."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fddp.core.plan.plan import Bucket, BucketPlan, LeafSpec, plan_leaves
from fddp.core.schedule.builder import make_schedule
from fddp.core.schedule.topology import Topology
from fddp.core.sim.cost import PRESETS, CostModel
from fddp.core.sim.optimal import Target, optimal_plan
from fddp.core.sim.simulator import simulate
from fddp.errors import NoGradientError
from fddp.tree.planner import plan_buckets, plan_optimal
from tests.support.examples import examples

TWO = Topology(world=2)
DDP_CAPS_BYTES = (2**20, 25 * 2**20)


def step_s(plan: BucketPlan, ready_s: Any, target: Target) -> float:
    schedule = make_schedule(plan, target.topology, algorithm=target.algorithm)
    return simulate(schedule, target.cost, ready_s).step_s


def ready_order(offered: list[int], ready_s: list[float]) -> list[int]:
    return sorted(offered, key=lambda i: 0.0 if math.isnan(ready_s[i]) else ready_s[i])


def all_splits(leaves: list[LeafSpec], order: list[int]) -> Iterator[BucketPlan]:
    """Every plan of one dtype whose dense buckets are contiguous in this order."""
    dense = [i for i in order if not leaves[i].sparse]
    sparse = [i for i in order if leaves[i].sparse]
    alone = plan_leaves(leaves, order=sparse, caps_bytes=[1]).buckets
    if not dense:
        yield BucketPlan(tuple(leaves), alone, (1,), tuple(order))
        return
    for cuts in itertools.product((False, True), repeat=len(dense) - 1):
        parts, part = [], [dense[0]]
        for leaf, is_cut in zip(dense[1:], cuts, strict=True):
            if is_cut:
                parts.append(part)
                part = []
            part.append(leaf)
        parts.append(part)
        buckets = []
        for part in parts:
            *offsets, numel = itertools.accumulate((leaves[i].numel for i in part), initial=0)
            dtype = leaves[part[0]].dtype
            buckets.append(Bucket(tuple(part), tuple(offsets), numel, dtype, "cpu", 1))
        yield BucketPlan(tuple(leaves), (*buckets, *alone), (1,), tuple(order))


costs = st.builds(
    CostModel,
    st.sampled_from((0.0, 1e-6, 1e-4, 1e-2)) | st.floats(0.0, 0.1),
    st.sampled_from((0.0, 1e-6, 1e-4, 1e-3)) | st.floats(0.0, 0.01),
    st.sampled_from(("ring", "tree", "direct")),
    st.sampled_from((1.0, 0.5)) | st.floats(0.1, 1.0),
)
moments = st.integers(0, 8).map(lambda n: n / 8) | st.floats(0.0, 1.0) | st.just(math.nan)


@st.composite
def problems(draw: st.DrawFn, most: int = 7) -> tuple[list[LeafSpec], list[int], list[float]]:
    """Leaves, the order in which they are offered, ready times."""
    count = draw(st.integers(1, most))
    sizes = st.sampled_from((0, 1, 10, 100)) | st.integers(0, 300)
    is_sparse = st.integers(0, 7).map(lambda n: n == 7)
    leaves = [
        LeafSpec(f"leaf{i:02}", (draw(sizes),), "float32", sparse=draw(is_sparse))
        for i in range(count)
    ]
    return leaves, draw(st.permutations(range(count))), [draw(moments) for _ in range(count)]


@examples(60)
@given(problems(), costs, st.integers(1, 5))
def test_as_good_as_brute_force(problem: Any, cost: CostModel, ranks: int) -> None:
    leaves, offered, ready_s = problem
    target = Target(cost, Topology(world=ranks))
    plan = optimal_plan(leaves, offered, ready_s, target)
    all_plans = all_splits(leaves, ready_order(offered, ready_s))
    best_s = min(step_s(other, ready_s, target) for other in all_plans)
    assert step_s(plan, ready_s, target) == pytest.approx(best_s, rel=1e-9, abs=1e-15)


@st.composite
def mixed_problems(draw: st.DrawFn) -> tuple[list[LeafSpec], list[int], list[float], Target]:
    """Several dtypes and devices, sparse leaves, sizes about DDP's caps, any algorithm."""
    leaves = [
        LeafSpec(
            f"leaf{i:02}",
            (draw(st.sampled_from((0, 1000, 2**18, 2**20, 2**23))),),
            draw(st.sampled_from(("float32", "bfloat16", "float64"))),
            device=draw(st.sampled_from(("cpu", "cuda"))),
            sparse=draw(st.integers(0, 7)) == 0,
        )
        for i in range(draw(st.integers(1, 12)))
    ]
    algorithms = ["all_reduce", "hierarchical"]
    if not any(leaf.sparse for leaf in leaves):
        algorithms.append("reduce_scatter")
    topology = draw(st.sampled_from((Topology(host=2, local=4), Topology(host=1, local=3))))
    link = st.sampled_from([*PRESETS.values(), CostModel(0.0, 1e-9, overlap=0.4)])
    cost = draw(link | st.fixed_dictionaries({"host": link, "local": link}))
    target = Target(cost, topology, draw(st.sampled_from(algorithms)))  # type: ignore[arg-type]
    ready_s = [draw(moments) for _ in leaves]
    return leaves, draw(st.permutations(range(len(leaves)))), ready_s, target


@given(mixed_problems())
def test_never_worse_than_ddp(problem: Any) -> None:
    leaves, offered, ready_s, target = problem
    plan = optimal_plan(leaves, offered, ready_s, target)
    found_s = step_s(plan, ready_s, target)
    for order in (offered, ready_order(offered, ready_s)):
        ddp = plan_leaves(leaves, order=order, caps_bytes=DDP_CAPS_BYTES)
        assert found_s <= step_s(ddp, ready_s, target)
    assert set(plan.order) == set(offered)
    again = optimal_plan(leaves, offered, ready_s, target)
    assert again.digest == plan.digest


@examples(25)
@given(problems(most=4), problems(most=4), costs)
def test_boundaries_between_two_dtypes_are_optimal(one: Any, other: Any, cost: Any) -> None:
    leaves = [leaf._replace(sparse=False) for leaf in one[0]]
    leaves += [LeafSpec(f"other{i}", leaf.shape, "float64") for i, leaf in enumerate(other[0])]
    ready_s = [*one[2], *other[2]]
    order = ready_order(list(range(len(leaves))), ready_s)
    target = Target(cost, TWO)
    plan = optimal_plan(leaves, order, ready_s, target)
    found_s = step_s(plan, ready_s, target)
    # Both are optimised in turn without regard to what their number adds to the control word.
    slots_s = cost.time_s("control", 8.0 * len(leaves), 2) - cost.time_s("control", 0.0, 2)
    for dtype in ("float32", "float64"):
        kept = [bucket for bucket in plan.buckets if bucket.dtype != dtype]
        for split in all_splits(leaves, [i for i in order if leaves[i].dtype == dtype]):
            buckets = [*split.buckets, *kept]
            buckets.sort(key=lambda bucket: max(map(order.index, bucket.leaves)))
            changed = dataclasses.replace(plan, buckets=tuple(buckets))
            assert found_s <= step_s(changed, ready_s, target) + slots_s + 1e-12


def test_plan_of_an_optimal_partition() -> None:
    leaves = [
        LeafSpec("a", (100,), "float32"),
        LeafSpec("b", (50,), "bfloat16"),
        LeafSpec("c", (0,), "float32"),
        LeafSpec("e", (10, 4), "float32", sparse=True),
        LeafSpec("n", (), "int64"),
        LeafSpec("z", (100,), "float32"),
    ]
    ready_s = [0.5, 0.6, math.nan, 0.1, math.nan, 0.2]
    target = Target(CostModel(1e-3, 1e-9), TWO)
    plan = optimal_plan(leaves, [5, 3, 2, 1, 0], ready_s, target)
    assert plan.order == (2, 3, 5, 0, 1)
    assert [bucket.leaves for bucket in plan.buckets] == [(2, 5, 0), (1,), (3,)]
    assert [bucket.cap_bytes for bucket in plan.buckets] == [800, 100, 0]
    assert plan.caps_bytes == (800,)
    assert plan.local == ()


def test_few_buckets_where_more_gain_nothing() -> None:
    leaves = [LeafSpec(f"leaf{i:03}", (1000,), "float32") for i in range(500)]
    ready_s = {leaf.path: i * 1e-3 for i, leaf in enumerate(leaves)}
    target = Target(CostModel(1e-6, 1e-10), TWO)
    plan = optimal_plan(leaves, list(range(500)), ready_s, target)
    assert len(plan.buckets) == 2  # all but the last are done before backward ends
    assert plan.buckets[1].leaves == (499,)


# From trees


def tree() -> dict[str, Any]:
    return {
        "w": np.zeros((1000, 10), np.float32),
        "b": np.zeros(10, np.float32),
        "e": np.zeros((100, 4), np.float32),
        "step": np.zeros((), np.int64),
    }


def test_plans_from_trees() -> None:
    cost = CostModel(1e-3, 1e-9)
    ready_s = {"w": 0.01, "b": 0.001, "e": 0.002}
    plan = plan_optimal(tree(), ready_s, cost)
    assert plan.leaves == plan_buckets(tree()).leaves
    in_order = [ready_s.get(path, math.nan) for path in plan.paths]
    assert plan_optimal(tree(), in_order, cost) == plan
    assert plan_optimal(tree(), in_order, cost, topology=TWO, algorithm="all_reduce") == plan
    some = plan_optimal(tree(), ready_s, cost, sparse=["e"], select=lambda path: path != "b")
    assert [some.paths[leaf] for leaf in some.order] == ["e", "w"]
    assert [bucket.sparse for bucket in some.buckets] == [False, True]
    assert some.local == (plan.paths.index("b"),)


def test_ties_are_in_the_reverse_of_registration_order() -> None:
    plan = plan_optimal(tree(), dict.fromkeys(("w", "b", "e"), 0.5), CostModel(1e-3, 1e-9))
    assert plan.order == plan_buckets(tree()).order


def test_bad_arguments() -> None:
    cost = CostModel(1e-3, 1e-9)
    with pytest.raises(ValueError, match="the plan of 4 leaves needs 'e' and 0 more"):
        plan_optimal(tree(), {"w": 0.0, "b": 0.0}, cost)
    with pytest.raises(ValueError, match="'hierarchical' needs a topology with at least two axes"):
        plan_optimal(tree(), [0.0] * 4, cost, algorithm="hierarchical")
    with pytest.raises(ValueError, match="none of the axis 'world'"):
        plan_optimal(tree(), [0.0] * 4, {"host": cost})
    with pytest.raises(ValueError, match="sparse holds 1 path"):
        plan_optimal(tree(), [0.0] * 4, cost, sparse=["x"])
    with pytest.raises(NoGradientError, match="there is nothing to reduce"):
        plan_optimal({"step": np.zeros((), np.int64)}, [0.0], cost)
