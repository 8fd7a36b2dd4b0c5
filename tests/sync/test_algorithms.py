"""All algorithms give the same gradients: on threads as 2x4, and some on processes as 2x2."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fddp
from fddp import Topology
from fddp.core.schedule.op import is_collective
from fddp.runtime.program import Program
from fddp.testing import assert_mean, gradients, param_trees, schedules
from fddp.tree.pytree import flatten
from tests.support.branches import (
    Branch,
    branch_params,
    mean_of_branches,
    train_branches,
)
from tests.support.collectives import Issued, record_issued
from tests.support.examples import examples
from tests.support.groups import size_of
from tests.support.models import (
    batch,
    largest_difference,
    mean_gradients,
    mlp,
    mlp_loss,
    rand,
    same_bits,
)
from tests.support.ranks import RankPool
from tests.support.sparse_models import dense_loss, embedding_loss, embedding_params

SMALL = {"bucket_cap_mb": 0.0003, "first_bucket_mb": 0.0001}
FEW = {"bucket_cap_mb": 0.0005, "first_bucket_mb": 0.0001}


class Variant(NamedTuple):
    """A way to reduce; as a schedule of its own where a scaling is given."""

    algorithm: Any
    scaling: Any = None
    split_mb: float | None = None
    reduce_dtype: str | None = None


VARIANTS = {
    "all_reduce": Variant("all_reduce"),
    "all_reduce, average": Variant("all_reduce", "average"),
    "all_reduce, after, split": Variant("all_reduce", "after", 2e-4),
    "hierarchical": Variant("hierarchical"),
    "hierarchical, average, split": Variant("hierarchical", "average", 2e-4),
    "hierarchical, after, wide": Variant("hierarchical", "after", None, "float32"),
    "reduce_scatter": Variant("reduce_scatter"),
    "reduce_scatter, average": Variant("reduce_scatter", "average"),
    "reduce_scatter, after, split": Variant("reduce_scatter", "after", 2e-4),
}


RANKS = 8


def grid(world_size: int) -> Topology:
    return Topology(host=2, local=world_size // 2)


def opened(group: Any, tree: Any, name: str, *, sparse: tuple[str, ...] = ()) -> fddp.GradSync:
    variant, mesh = VARIANTS[name], grid(size_of(group))
    if variant.scaling is None:
        algorithm = variant.algorithm
        return fddp.GradSync(
            tree, group=group, mesh=mesh, algorithm=algorithm, sparse=sparse, **SMALL
        )
    schedule = fddp.make_schedule(
        fddp.plan_buckets(tree, sparse=sparse, **SMALL),
        mesh,
        algorithm=variant.algorithm,
        scaling=variant.scaling,
        split_mb=variant.split_mb,
        reduce_dtype=variant.reduce_dtype,
    )
    return fddp.GradSync(schedule, group=group)


def whole(sync: fddp.GradSync, grads: Any) -> Any:
    return sync.all_gather(grads) if sync.schedule.result == "sharded_mean" else grads


# Trees of gradients


@pytest.mark.slow
@examples(60)
@given(st.data())
def test_any_schedule_gives_the_mean_of_any_tree(data: st.DataObject) -> None:
    """With each scaling, split, `reduce_dtype` and topology."""
    algorithms: Any = ["all_reduce", "hierarchical", "reduce_scatter"]
    plan = st.just(fddp.plan_buckets(tree := data.draw(param_trees()), **FEW))
    deterministic = data.draw(st.booleans())
    schedule = data.draw(schedules(plan, algorithms=algorithms, deterministic=deterministic))
    ranks = schedule.topology.world_size
    trees = data.draw(gradients(tree, ranks))
    weight = st.sampled_from([0.0, 0.5, 1.0, 3.0, 1e4])
    weights = data.draw(st.lists(weight, min_size=ranks, max_size=ranks).filter(any))

    def run(group: Any) -> list[Any]:
        with fddp.GradSync(schedule, group=group) as sync:
            found = [assert_mean(sync, trees), assert_mean(sync, trees, weights)]
            return [*found, assert_mean(sync, trees)]

    assert same_bits(fddp.loopback(ranks, run))


# During backward


def gradients_of_branches(group: Any, name: str, steps: list[list[Branch]]) -> Any:
    with opened(group, branch_params(), name) as sync:
        return [
            (whole(sync, grads), info, len(sync.plan.buckets))
            for grads, info in train_branches(sync, steps)
        ]


def branches_of(world_size: int) -> list[list[Branch]]:
    """Steps in which ranks use different leaves, and get some of their gradients late."""
    every = Branch((i, "plain") for i in range(6))
    late = Branch([(5, "reentrant"), (0, "reentrant"), (5, "reentrant"), (2, "plain")])
    few = Branch([(1, "checkpoint")])
    none = Branch()
    others = [every, few, none, late]
    steps = [[every] * world_size, [late, *[few] * (world_size - 1)], [late] * world_size]
    return [*steps, [others[rank % 4] for rank in range(world_size)]]


def check_branches(runs: list[Any], steps: list[list[Branch]]) -> None:
    for number, branches in enumerate(steps):
        expected = mean_of_branches(number, branches)
        assert same_bits([run[number][0] for run in runs])
        assert largest_difference(runs[0][number][0], expected) < 1e-12
        infos = [run[number][1] for run in runs]
        assert len({(info.repaired, info.unused, info.all_finite) for info in infos}) == 1
        for info in infos:
            assert [times.bucket for times in info.timeline.buckets] == [*range(runs[0][number][2])]
            assert all(t.ready_s <= t.launch_s <= t.done_s for t in info.timeline.buckets)
    assert any(run[1][1].repaired for run in runs), "the second gradient of w5 comes late"
    assert runs[0][1][1].unused == ("w3", "w4")


@pytest.mark.parametrize("name", VARIANTS)
def test_unused_and_late_gradients(name: str) -> None:
    steps = branches_of(RANKS)
    check_branches(fddp.loopback(RANKS, gradients_of_branches, name, steps), steps)


@pytest.mark.parametrize("name", ["all_reduce", "hierarchical", "reduce_scatter, after, split"])
def test_unused_and_late_gradients_on_processes(ranks: RankPool, name: str) -> None:
    steps = branches_of(4)
    check_branches(ranks.run(4, on_process, name, steps), steps)


def on_process(rank: int, world_size: int, name: str, steps: list[list[Branch]]) -> Any:
    return gradients_of_branches(dist.group.WORLD, name, steps)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hierarchical", "reduce_scatter", "all_reduce, after, split"])
def test_gradients_packed_on_arrival(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fddp.runtime.program._EAGER_BYTES", 1)
    test_unused_and_late_gradients(name)


# What is issued


def listed(sync: fddp.GradSync, program: Program, late: tuple[int, ...]) -> list[Issued]:
    """The collectives in a program's schedule, as this rank should issue them."""
    schedule = program.schedule
    topology, issued = schedule.topology, []
    for op in schedule.ops:
        if not is_collective(op) or (op.when == "late" and op.bucket not in late):
            continue
        if op.kind == "control":
            everyone = tuple(range(sync.world_size))
            issued.append(Issued("all_reduce", "float64", program.control.size, everyone))
            continue
        # What an all-gather fills; what the others work on.
        cuts = op.region.shard[:-1] if op.kind == "all_gather" else op.region.shard
        numel = (op.region.stop - op.region.start) // topology.size(cuts)
        if op is schedule.ops[schedule.piggyback_op]:
            numel += program.control.size
        ranks = topology.group(op.axes, sync.rank)
        issued.append(Issued(op.kind, schedule.wire_dtypes[op.bucket], numel, ranks))
    return issued


def issue(group: Any, name: str) -> Any:
    with opened(group, mlp(dtype=torch.float32), name) as sync:
        issued, checked = record_issued(sync), []
        step = sync.value_and_grad(mlp_loss, with_info=True)
        for number in range(3):
            program = sync._engine.program  # another one after the first step
            x = batch(sync.rank, number).float()
            _, grads, info = step(mlp(dtype=torch.float32), x)
            checked.append((list(issued), listed(sync, program, info.repaired)))
            issued.clear()
            gathering = sync._engine.gathering
            if gathering is not None:
                sync.all_gather(grads)
                checked.append((list(issued), listed(sync, gathering.program, ())))
            issued.clear()
        return checked


@pytest.mark.parametrize("name", VARIANTS)
def test_issued_operations_match_the_schedule(name: str) -> None:
    for checked in fddp.loopback(RANKS, issue, name):
        for issued, expected in checked:
            assert issued == expected
            assert len(issued) >= 3


# Norms, sparse leaves, float16


@pytest.mark.parametrize("name", ["all_reduce", "hierarchical", "reduce_scatter"])
def test_the_norm_is_that_of_a_ranks_results(name: str) -> None:
    def run(group: Any) -> tuple[float, float]:
        with opened(group, mlp(), name) as sync:
            _, grads, info = sync.value_and_grad(mlp_loss, with_info=True)(
                mlp(), batch(sync.rank, 0)
            )
            return info.grad_norm, sum(float(g.square().sum()) for g in flatten(grads)[0])

    runs = fddp.loopback(8, run)
    for norm, squares in runs:
        assert norm == pytest.approx(squares**0.5, rel=1e-12)
    every = [(batch(rank, 0),) for rank in range(8)]
    leaves = flatten(mean_gradients(mlp_loss, mlp(), every, [1.0] * 8))[0]
    total = sum(float(leaf.square().sum()) for leaf in leaves)
    shards = sum(squares for _, squares in runs)
    assert shards == pytest.approx(total if name == "reduce_scatter" else 8 * total, rel=1e-12)


def embed(group: Any, name: str) -> Any:
    p = embedding_params()
    with opened(group, p, name, sparse=("emb",)) as sync:
        _, grads = sync.value_and_grad(embedding_loss)(p, index_of(sync.rank))
        return {**grads, "emb": grads["emb"].to_dense()}


def index_of(rank: int) -> Tensor | None:
    return None if rank == 1 else torch.tensor([rank, 2, 2, 9 - rank])


@pytest.mark.parametrize("name", [n for n, v in VARIANTS.items() if v[0] != "reduce_scatter"])
def test_sparse_leaves(name: str) -> None:
    p = embedding_params()
    inputs = [(index_of(rank),) for rank in range(RANKS)]
    expected = mean_gradients(dense_loss, p, inputs, [1.0] * RANKS)
    runs = fddp.loopback(RANKS, embed, name)
    assert same_bits(runs)
    assert largest_difference(runs[0], expected) < 1e-13


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_up_to_one_in_float16(name: str) -> None:
    def run(group: Any) -> None:
        trees = [{"w": rand(5, seed=r, dtype=torch.float16) * 100} for r in range(8)]
        with opened(group, trees[0], name) as sync:
            for weight in (1.0, 0.25, 0.6):
                assert_mean(sync, trees, [weight / (1 + rank % 2) for rank in range(8)])

    fddp.loopback(8, run)


@pytest.mark.parametrize("name", ["hierarchical", "reduce_scatter", "reduce_scatter, after, split"])
def test_accumulated_gradients(name: str) -> None:
    def run(group: Any) -> Any:
        earlier = batch(group.rank, 1)
        rows = float(len(earlier))
        sums = fddp.tree_map(lambda g: g * rows, torch.func.grad(mlp_loss)(mlp(), earlier))
        with opened(group, mlp(), name) as sync:
            step = sync.value_and_grad(mlp_loss, weight_fn=lambda p, x: len(x))
            return whole(sync, step(mlp(), batch(group.rank, 0), accumulated=(sums, rows))[1])

    inputs = [(batch(rank, number),) for rank in range(RANKS) for number in (0, 1)]
    expected = mean_gradients(mlp_loss, mlp(), inputs, [float(len(x)) for (x,) in inputs])
    for grads in fddp.loopback(RANKS, run):
        assert largest_difference(grads, expected) < 1e-12
