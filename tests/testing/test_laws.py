"""`fddp.testing`: strategies draw what they say, and assertions fail where they should."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisWarning, NoSuchExample
from torch import Tensor

import fddp
from fddp.core.schedule.op import COLLECTIVES, is_collective
from fddp.core.schedule.piggyback import with_separate_word
from fddp.testing import (
    arrivals,
    assert_mean,
    assert_same_collectives,
    assert_schedule_ok,
    check_adjoint,
    check_gradients,
    gradients,
    loopback,
    param_trees,
    plans,
    schedules,
    topologies,
)
from fddp.tree.pytree import flatten
from tests.support.endings import Ending, ending
from tests.support.examples import examples
from tests.support.groups import size_of
from tests.support.models import rand
from tests.support.ranks import Launch

SMALL = {"bucket_cap_mb": 1e-5, "first_bucket_mb": 1e-5}


# Strategies


def drawn(strategy: st.SearchStrategy[Any], is_one: Callable[[Any], bool]) -> Any:
    """An example that satisfies `is_one`."""
    quiet = settings(max_examples=5_000, database=None, phases=[Phase.generate])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HypothesisWarning)  # of long examples, which are not shrunk
        return find(strategy, is_one, settings=quiet)


@given(param_trees(max_leaves=5))
def test_param_trees_can_be_synchronised(tree: Any) -> None:
    leaves, _ = flatten(tree)
    assert 1 <= len(leaves) <= 5
    assert isinstance(tree, (dict, list, tuple))
    plan = fddp.plan_buckets(tree, **SMALL)
    for leaf, spec in zip(leaves, plan.leaves, strict=True):
        if leaf is not None and leaf.numel():
            assert leaf.stride() == (spec.strides or torch.empty(leaf.shape).stride()) or (
                1 in leaf.shape
            ), "dense"


LEAVES: dict[str, Callable[[Any], bool]] = {
    "None": lambda leaf: leaf is None,
    "an integer": lambda leaf: leaf is not None and leaf.dtype == torch.int64,
    "a scalar": lambda leaf: leaf is not None and leaf.shape == (),
    "empty": lambda leaf: leaf is not None and leaf.numel() == 0,
    "in another order": lambda leaf: leaf is not None and not leaf.is_contiguous(),
    "channels_last": lambda leaf: (
        leaf is not None
        and leaf.ndim == 4
        and min(leaf.shape) > 1
        and leaf.is_contiguous(memory_format=torch.channels_last)
    ),
    "bfloat16": lambda leaf: leaf is not None and leaf.dtype == torch.bfloat16,
    "complex": lambda leaf: leaf is not None and leaf.is_complex(),
}


@pytest.mark.parametrize("kind", LEAVES)
def test_kinds_of_leaves(kind: str) -> None:
    drawn(param_trees(), lambda tree: any(map(LEAVES[kind], flatten(tree)[0])))


@given(param_trees(dtypes=[torch.float64]))
def test_dtypes_can_be_chosen(tree: Any) -> None:
    found = {leaf.dtype for leaf in flatten(tree)[0] if leaf is not None}
    assert {dtype for dtype in found if dtype.is_floating_point} == {torch.float64}


@given(st.data())
def test_gradients_are_those_of_the_parameters(data: st.DataObject) -> None:
    params = data.draw(param_trees())
    trees = data.draw(gradients(params, ranks=3))
    assert len(trees) == 3
    leaves, treedef = flatten(params)
    for tree in trees:
        grads, grads_def = flatten(tree)
        assert grads_def == treedef
        for leaf, grad in zip(leaves, grads, strict=True):
            if grad is not None:
                assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)


@given(plans(max_leaves=6))
def test_plans(plan: fddp.BucketPlan) -> None:
    assert plan.buckets
    assert len(plan.leaves) <= 6
    assert not any(leaf.sparse for leaf in plan.leaves)
    assert fddp.BucketPlan.from_json(plan.to_json()) == plan


@pytest.mark.slow
def test_kinds_of_plans() -> None:
    drawn(plans(sparse=True), lambda p: any(b.sparse for b in p.buckets))
    drawn(plans(), lambda p: len(p.local) > 0)
    drawn(plans(), lambda p: p.order != tuple(sorted(p.order)))
    drawn(plans(), lambda p: any(len(b.leaves) > 2 for b in p.buckets))
    drawn(plans(), lambda p: any(leaf.strides for leaf in p.leaves))


@given(topologies(max_ranks=12, max_axes=2))
def test_topologies(topology: fddp.Topology) -> None:
    assert 1 <= topology.world_size <= 12
    assert len(topology.axes) <= 2


@given(schedules())
def test_schedules_are_right(schedule: fddp.Schedule) -> None:
    assert_schedule_ok(schedule)


def count_pieces(schedule: fddp.Schedule) -> Counter[int]:
    """By bucket, in how many pieces it travels."""
    first = ("all_reduce", "reduce_scatter")
    starts = {(op.bucket, op.region.start) for op in schedule.ops if op.kind in first}
    return Counter(bucket for bucket, _ in starts)


@pytest.mark.slow
def test_kinds_of_schedules() -> None:
    for kind in COLLECTIVES - {"stage"}:  # of hooks, which schedules() has none of
        drawn(schedules(), lambda s, k=kind: k in [op.kind for op in s.ops])
    for scaling in ("before", "after", "average"):
        drawn(schedules(), lambda s, k=scaling: s.scaling == k)
    for shards in (True, False):
        split = schedules(algorithms=["reduce_scatter" if shards else "hierarchical"])
        drawn(split, lambda s: max(count_pieces(s).values(), default=0) > 2)
    assert drawn(schedules(), lambda s: s.piggyback_op >= 0).ops
    with pytest.raises(NoSuchExample):
        find(
            schedules(piggyback=False),
            lambda s: s.piggyback_op >= 0,
            settings=settings(max_examples=50),
        )
    assert drawn(schedules(deterministic=True), lambda s: s.deterministic and s.retained).ops
    fixed = schedules(st.just(one_plan()), st.just(fddp.Topology(world=2)))
    assert drawn(fixed, lambda s: True).plan == one_plan()


@given(st.data())
def test_arrivals(data: st.DataObject) -> None:
    plan = data.draw(plans())
    orders = data.draw(arrivals(plan, ranks=2))
    assert len(orders) == 2
    assert {leaf for order in orders for leaf in order} <= {*plan.reduced, *plan.local}


def test_arrivals_have_repeats_and_omissions() -> None:
    drawn(arrivals(one_plan(), 1), lambda orders: orders[0].count(0) > 1)
    drawn(arrivals(one_plan(), 1), lambda orders: not orders[0])
    drawn(arrivals(one_plan(), 1), lambda orders: sorted(orders[0]) == [0, 1])


# Assertions on schedules


def one_plan() -> fddp.BucketPlan:
    return fddp.plan_buckets({"a": torch.zeros(3), "b": torch.zeros(4)}, **SMALL)


def one_schedule() -> fddp.Schedule:
    return fddp.make_schedule(one_plan(), fddp.Topology(world=2))


def test_a_broken_schedule_is_not_ok() -> None:
    broken = replace(one_schedule(), ops=one_schedule().ops[:-1])
    with pytest.raises(AssertionError, match="leaf 'a'") as caught:
        assert_schedule_ok(broken)
    assert isinstance(caught.value.__cause__, fddp.ScheduleError)


@examples(80)
@given(st.data())
def test_ranks_issue_the_same_collectives(data: st.DataObject) -> None:
    schedule = data.draw(schedules() | schedules(deterministic=True) | schedules(piggyback=False))
    plan, ranks = schedule.plan, min(4, schedule.topology.world_size)
    counts = st.lists(st.integers(0, 2), min_size=len(plan.leaves), max_size=len(plan.leaves))
    ops = assert_same_collectives(
        schedule,
        data.draw(arrivals(plan, ranks)),
        expected=data.draw(st.none() | st.lists(counts, min_size=ranks, max_size=ranks)),
    )
    always = [op for op in schedule.ops if is_collective(op) and op.when == "always"]
    assert [op for op in ops if op.when == "always"] == always


def repaired_before_it_is_known(schedule: fddp.Schedule) -> fddp.Schedule:
    """The control word moved to the end, its operations kept in order."""
    control = next(op for op in schedule.ops if op.kind == "control")
    others = [op for op in schedule.ops if op.kind != "control"]
    return replace(schedule, ops=(*others, control))


def test_a_repair_before_the_control_word_makes_ranks_diverge() -> None:
    bad = repaired_before_it_is_known(with_separate_word(one_schedule()))
    assert_same_collectives(bad, [[1, 0], [0, 1]])
    with pytest.raises(AssertionError) as caught:
        assert_same_collectives(bad, [[1, 0], [1, 0, 1]])
    assert str(caught.value) == (
        "ranks diverge at collective 2: rank 0 issues op 12 (the control word, along world) where "
        "rank 1 issues op 5 (all_reduce of bucket 0, leaf 'b' (repair), along world); let "
        "conditions that may differ between ranks depend on the control word"
    )


def test_as_many_other_collectives_are_not_the_same() -> None:
    plan = fddp.plan_buckets({name: torch.zeros(3) for name in "abc"}, **SMALL)
    schedule = fddp.make_schedule(plan, fddp.Topology(world=2))
    bad = repaired_before_it_is_known(with_separate_word(schedule))
    with pytest.raises(AssertionError, match=r"issues op .*leaf 'c'.* rank 1 issues op .*leaf 'b'"):
        assert_same_collectives(bad, [[2, 1, 2, 0], [2, 1, 1, 0]])


def test_what_is_late_on_one_rank_is_repaired_by_all() -> None:
    for schedule in (one_schedule(), with_separate_word(one_schedule())):
        kinds = [(op.when, op.bucket) for op in assert_same_collectives(schedule, [[1, 0, 1], []])]
        assert kinds.count(("late", 0)) == 1
        assert ("late", 1) not in kinds


def test_expected_order_decides_late_repairs() -> None:
    twice = [[1, 0, 1], [1, 0, 1]]
    repair = ("late", 0)
    kinds = [(op.when, op.bucket) for op in assert_same_collectives(one_schedule(), twice)]
    assert repair in kinds
    learned = assert_same_collectives(one_schedule(), twice, expected=[[1, 2]] * 2)
    assert repair not in [(op.when, op.bucket) for op in learned]


@pytest.mark.parametrize(
    ("orders", "expected", "text"),
    [([], None, "a list for each rank"), ([[0]], [[1, 1]] * 2, "2 ranks, and arrivals has 1")],
)
def test_arguments_of_assert_same_collectives(orders: Any, expected: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        assert_same_collectives(one_schedule(), orders, expected=expected)


# The mean


ALGORITHMS = st.sampled_from(["all_reduce", "hierarchical", "reduce_scatter"])


@examples(30)
@given(st.data())
def test_every_algorithm_gives_the_mean_of_any_tree(data: st.DataObject) -> None:
    topology = data.draw(topologies(max_ranks=6).filter(lambda t: len(t.axes) > 1))
    params, algorithm = data.draw(param_trees()), data.draw(ALGORITHMS)
    trees = data.draw(gradients(params, topology.world_size))
    weights = data.draw(st.none() | weights_of(topology.world_size))
    paths = fddp.plan_buckets(params).paths
    kept = data.draw(st.frozensets(st.sampled_from(paths), max_size=2))
    try:
        plan = fddp.plan_buckets(params, select=lambda path: path not in kept, **SMALL)
    except fddp.NoGradientError:
        plan = fddp.plan_buckets(params, **SMALL)

    def run(group: Any) -> None:
        with fddp.GradSync(plan, group=group, mesh=topology, algorithm=algorithm) as sync:
            assert_mean(sync, trees, weights)
            assert_mean(sync, trees[::-1], weights)

    loopback(topology.world_size, run)


def weights_of(ranks: int) -> st.SearchStrategy[list[float]]:
    weight = st.sampled_from([0.0, 1.0, 1.0, 3.0, 0.125, 1000.0])
    return st.lists(weight, min_size=ranks, max_size=ranks).filter(any)


def on_every_rank(world_size: int, call: Callable[[fddp.GradSync, int], Any]) -> list[Ending]:
    """Return the outcome of `call(sync, rank)` by rank, and check that ranks are in step
    afterwards."""

    def run(group: Any) -> Ending:
        with fddp.GradSync(own_trees(1)[0], group=group) as sync:
            end = ending(lambda: call(sync, group.rank))
            assert_mean(sync, own_trees(world_size))
            return end

    return loopback(world_size, run)


def own_trees(world_size: int) -> list[dict[str, Tensor]]:
    return [
        {"a": rand(3, seed=rank), "b": rand(2, 2, seed=9 + rank, dtype=torch.float32)}
        for rank in range(world_size)
    ]


def wrong_on(rank: int, change: Callable[[Any], Any]) -> Callable[[fddp.GradSync, int], Any]:
    def call(sync: fddp.GradSync, own_rank: int) -> None:
        def through(grads: Any) -> Any:
            result = sync(grads)
            return change(result) if own_rank == rank else result

        assert_mean(sync, own_trees(3), through=through)

    return call


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a sum": (lambda r: {**r, "a": 3 * r["a"]}, "leaf 'a' is off by"),
    "a little off": (lambda r: {**r, "b": r["b"] * (1 + 1e-4)}, "leaf 'b' is off by"),
    "a missing leaf": (lambda r: {**r, "a": None}, "leaf 'a' is None, but a rank"),
    "another dtype": (lambda r: {**r, "a": r["a"].float()}, "leaf 'a' is torch.float32 of shape"),
    "another shape": (
        lambda r: {**r, "a": r["a"][None]},
        r"of shape \(1, 3\), and the input is torch",
    ),
    "another structure": (lambda r: [r["a"], r["b"]], "another structure"),
    "not finite": (lambda r: {**r, "a": r["a"] / 0.0}, "leaf 'a' is finite where the mean is not"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_means_are_reported_on_every_rank(name: str) -> None:
    change, text = WRONG[name]
    for end in on_every_rank(3, wrong_on(1, change)):
        assert end.kinds[0] == "AssertionError"
        assert end.text.startswith("rank 1: ")
        with pytest.raises(AssertionError, match=text):
            raise AssertionError(end.text)


def test_a_bit_of_difference_between_ranks_is_reported() -> None:
    def off_by_one_bit(result: Any) -> Any:
        bits = result["a"].view(torch.int64) ^ 1
        return {**result, "a": bits.view(torch.float64)}

    for end in on_every_rank(3, wrong_on(2, off_by_one_bit)):
        assert end.kinds[0] == "AssertionError"
        assert end.text == "ranks 0 and 2 got different bits for leaf 'a'"


def test_an_unexpected_gradient_is_reported() -> None:
    def call(sync: fddp.GradSync, rank: int) -> None:
        trees = [{**tree, "a": None} for tree in own_trees(2)]
        zeros = torch.zeros(3, dtype=torch.float64)
        assert_mean(sync, trees, through=lambda grads: {**sync(grads), "a": zeros})

    for end in on_every_rank(2, call):
        assert "leaf 'a' is a tensor, but no rank of positive weight has a gradient" in end.text


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "values": lambda grad: grad.mul_(2.0),
    "version": lambda grad: grad.mul_(1.0),
    "values alone": lambda grad: grad.numpy().fill(7.0),
}


@pytest.mark.parametrize("how", WRITES)
def test_a_written_gradient_is_reported(how: str) -> None:
    def call(sync: fddp.GradSync, rank: int) -> None:
        def through(grads: Any) -> Any:
            result = sync(grads)
            if rank == 0:
                WRITES[how](grads["b"])
            return result

        assert_mean(sync, own_trees(2), through=through)

    for end in on_every_rank(2, call):
        assert end.text == "rank 0: leaf 'b' of the input gradients was written"


def test_leaves_that_only_ranks_of_no_weight_have_are_none() -> None:
    def run(group: Any) -> None:
        first, second = own_trees(2)
        with fddp.GradSync(first, group=group) as sync:
            mean = assert_mean(sync, [{**first, "a": None}, second], [1.0, 0.0])
            assert mean["a"] is None

    loopback(2, run)


def test_local_leaves_are_those_of_the_rank() -> None:
    def run(group: Any) -> None:
        trees = own_trees(2)
        with fddp.GradSync(trees[0], group=group, select=lambda path: path != "a") as sync:
            assert torch.equal(assert_mean(sync, trees)["a"], trees[group.rank]["a"])

    loopback(2, run)


def test_wrong_weights_are_reported() -> None:
    def call(sync: fddp.GradSync, rank: int) -> None:
        assert_mean(
            sync, own_trees(2), [1.0, 2.0], through=lambda grads, weight: sync(grads, weight=1.0)
        )

    for end in on_every_rank(2, call):
        assert "leaf 'a' is off by" in end.text


def test_as_many_trees_as_ranks() -> None:
    for end in on_every_rank(2, lambda sync, rank: assert_mean(sync, own_trees(3))):
        assert end.text == "trees must have one for each of 2 ranks"
    for end in on_every_rank(2, lambda sync, rank: assert_mean(sync, own_trees(2), [1.0])):
        assert end.text == "weights must have one for each of 2 ranks"


def compress(grads: Any) -> Any:
    return fddp.tree_map(lambda g: g.to(torch.bfloat16).to(g.dtype), grads)


def a_users_hook(group: Any) -> Ending:
    with fddp.GradSync(own_trees(1)[0], group=group) as sync:
        trees = own_trees(sync.world_size)
        assert_mean(sync, trees, through=lambda grads: sync(compress(grads)), rtol=2.0**-8)
        return ending(lambda: assert_mean(sync, trees, through=lambda g: sync(compress(g))))


@pytest.mark.parametrize("launch", ["shm"], indirect=True)
def test_a_users_own_hook(launch: Launch) -> None:
    for end in launch(2, a_users_hook):
        assert "pass rtol" in end.text, "a lossy one needs a tolerance"


def a_users_schedule(group: Any) -> Any:
    averaging = fddp.make_schedule(
        fddp.plan_buckets(own_trees(1)[0], **SMALL),
        fddp.Topology(world=size_of(group)),
        scaling="average",
    )
    assert_schedule_ok(averaging)
    with fddp.GradSync(averaging, group=group) as sync:
        assert sync.schedule == averaging
        return assert_mean(sync, own_trees(sync.world_size))


def test_a_users_own_schedule() -> None:
    first, second = fddp.loopback(2, a_users_schedule)
    assert torch.equal(first["a"], second["a"])


# Sparse leaves, NaN


def test_sparse_gradients_and_nan() -> None:
    def run(group: Any) -> None:
        params = {"e": torch.zeros(4, 2), "w": torch.zeros(2)}
        trees = [
            {"e": torch.eye(4, 2).to_sparse(1) * (1 + rank), "w": torch.tensor([1.0, torch.nan])}
            for rank in range(2)
        ]
        for algorithm in ("all_reduce", "hierarchical"):
            with fddp.GradSync(
                params,
                group=group,
                sparse=["e"],
                mesh=fddp.Topology(host=2, local=1),
                algorithm=algorithm,
            ) as sync:
                assert_mean(sync, trees)
                assert_mean(sync, trees, [1.0, 0.0])

    loopback(2, run)


# Derivatives


class Scaled(torch.autograd.Function):
    """The identity, whose derivatives are multiplied by a factor in each mode."""

    @staticmethod
    def forward(x: Tensor, reverse: float, forward: float) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.reverse, ctx.forward = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        return ctx.reverse * cotangent, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return ctx.forward * tangent


def scaled(reverse: float, forward: float) -> Callable[[Tensor], Tensor]:
    return lambda x: Scaled.apply(x, reverse, forward)  # type: ignore[no-untyped-call, no-any-return]


class MeanOfCotangents(torch.autograd.Function):
    """The identity, whose reverse mode is that of a mean over ranks."""

    @staticmethod
    def forward(x: Tensor, group: Any) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return fddp.pmean(cotangent, ctx.group), None


X = torch.tensor([0.5, -2.0], dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # of torch.func.jvp
@pytest.mark.parametrize(
    ("reverse", "forward"), [(2.0, 1.0), (1.0, -1.0), (torch.nan, 1.0), (1.0, torch.nan)]
)
def test_wrong_adjoints_are_reported(reverse: float, forward: float) -> None:
    """On one rank, as threads share torch's forward mode."""
    with pytest.raises(AssertionError, match="summed over 1 ranks, <c, J t> is "):
        loopback(1, lambda group: check_adjoint(scaled(reverse, forward), X, group))


WRONG_DERIVATIVES: dict[str, tuple[Callable[[Any], Callable[[Tensor], Tensor]], str]] = {
    "twice": (lambda group: scaled(2.0, 1.0), "element 0 of rank 0's inputs is 2.0, and by diff"),
    "NaN": (lambda group: scaled(torch.nan, 1.0), "inputs is nan, and by differences "),
    "of one element": (
        lambda group: lambda x: torch.cat([x[:1], scaled(3.0, 1.0)(x[1:])]),
        "the derivative of element 1 of rank 0's outputs by element 1 of rank 0's inputs is 3.0",
    ),
    "of another rank": (
        lambda group: lambda x: MeanOfCotangents.apply(x, group),  # type: ignore[no-untyped-call]
        "is 0.5, and by differences ",
    ),
}


@pytest.mark.parametrize("name", WRONG_DERIVATIVES)
def test_wrong_derivatives_are_reported(name: str) -> None:
    fn_of, text = WRONG_DERIVATIVES[name]
    with pytest.raises(AssertionError, match=f"reverse mode: .*{text}"):
        loopback(2, lambda group: check_gradients(fn_of(group), X, group))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # of torch.func.jvp
def test_wrong_derivatives_of_forward_mode_are_reported() -> None:
    def run(group: Any) -> None:
        check_gradients(scaled(1.0, 2.0), X, group)
        check_gradients(scaled(1.0, 2.0), X, group, forward=True)

    with pytest.raises(AssertionError, match=r"forward mode: .* is 2\.0, and by differences "):
        loopback(1, run)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # of torch.func.jvp
def test_derivatives_of_complex_numbers_are_those_of_pairs() -> None:
    z = torch.tensor([1 + 2j, -0.5j], dtype=torch.complex128)

    def run(group: Any) -> None:
        check_gradients(lambda z: {"a": z * z, "b": [z.abs()]}, z, group, forward=True)
        check_adjoint(lambda z: fddp.pmean(z.conj() * z.exp(), group), z, group)

    loopback(1, run)


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("fddp.testing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ImportError, match=r"pip install fddp\[testing\]"):
        importlib.import_module("fddp.testing")
