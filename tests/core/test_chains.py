"""Schedules of functions from buckets to collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fddp
from fddp import Bucket, Topology, check_schedule, make_schedule
from fddp.errors import ScheduleError
from fddp.extend import Chain, Chains, Scaling
from fddp.testing import assert_mean, gradients, loopback, param_trees, plans
from tests.support.examples import examples

GRID = Topology(host=2, local=2)
PLAN = fddp.plan_buckets({"w": torch.zeros(24), "b": torch.zeros(3)}, bucket_cap_mb=[1e-5])
HIERARCHICAL: Chain = (
    ("reduce_scatter", "c"),
    ("reduce_scatter", "b"),
    ("all_reduce", "a"),
    ("all_gather", "b"),
    ("all_gather", "c"),
)
SCATTER: Chain = tuple(("reduce_scatter", axis) for axis in "cba")


def torus(bucket: Bucket) -> list[Chain]:
    return [colour("host", "local"), colour("local", "host")]


def colour(first: str, second: str) -> Chain:
    scatter = ("reduce_scatter", first), ("reduce_scatter", second)
    return (*scatter, ("all_gather", second), ("all_gather", first))


@st.composite
def right_chains(draw: st.DrawFn, topology: Topology) -> Chain:
    """Each axis is summed once, in any order; what is divided is joined again."""
    left = list(draw(st.permutations(topology.names)))
    chain: list[tuple[str, ...]] = []
    divided: list[tuple[str, ...]] = []
    while left:
        count = draw(st.integers(1, len(left)))
        axes = tuple(axis for axis in topology.names if axis in left[:count])
        left = left[count:]
        divides = draw(st.booleans())
        chain.append(("reduce_scatter" if divides else "all_reduce", *axes))
        divided += [axes] if divides else []
    return [*chain, *(("all_gather", *axes) for axes in reversed(divided))]


@st.composite
def functions(draw: st.DrawFn, topology: Topology) -> Chains:
    """Other chains, and other numbers of them, for small buckets than for large ones."""
    one, other = (draw(st.lists(right_chains(topology), min_size=1, max_size=3)) for _ in range(2))
    return lambda bucket: one if bucket.numel < 4 else other


TOPOLOGIES = (Topology(world=2), GRID, Topology(a=2, b=2, c=2), Topology(host=1, local=3))


@given(st.data())
def test_right_chains_make_right_schedules(data: st.DataObject) -> None:
    """With any split, word, device of the plan and scaling; late gradients are repaired."""
    topology = data.draw(st.sampled_from(TOPOLOGIES))
    schedule = make_schedule(
        data.draw(plans(sparse=True)),
        topology,
        algorithm=data.draw(functions(topology)),
        scaling=data.draw(st.sampled_from(get_args(Scaling))),
        split_mb=data.draw(st.sampled_from([None, 2.0**-18, 2.0**-16])),
        piggyback=data.draw(st.booleans()),
    )
    check_schedule(schedule)
    assert schedule.result == "replicated_mean"


@examples(10)
@given(st.data())
def test_ranks_get_the_mean(data: st.DataObject) -> None:
    topology = data.draw(st.sampled_from(TOPOLOGIES[:2]))
    ranks, params = topology.world_size, data.draw(param_trees())
    trees = data.draw(gradients(params, ranks))
    plan = fddp.plan_buckets(params, bucket_cap_mb=[3e-5])
    schedule = make_schedule(plan, topology, algorithm=data.draw(functions(topology)))

    def run(group: Any) -> None:
        with fddp.GradSync(schedule, group=group) as sync:
            assert_mean(sync, trees)

    loopback(ranks, run)


@pytest.mark.parametrize(
    ("algorithm", "chain"),
    [
        ("all_reduce", (("all_reduce", "a", "b", "c"),)),
        ("hierarchical", HIERARCHICAL),
        ("reduce_scatter", SCATTER),
    ],
)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("split_mb", [None, 2.0**-16])
def test_built_in_algorithms_are_such_functions(
    algorithm: Any, chain: Chain, deterministic: bool, split_mb: float | None
) -> None:
    options: dict[str, Any] = {"deterministic": deterministic, "split_mb": split_mb}
    topology = Topology(a=2, b=3, c=2)
    own = make_schedule(PLAN, topology, algorithm=lambda bucket: [chain], **options)
    assert own == make_schedule(PLAN, topology, algorithm=algorithm, **options)


def test_parts_of_a_bucket_run_along_different_axes_at_the_same_time() -> None:
    schedule = make_schedule(PLAN, GRID, algorithm=torus)
    check_schedule(schedule)
    own = [op for op in schedule.ops if op.bucket == 1 and op.when == "always"]
    first = [(op.axes, op.region[1:3]) for op in own if op.kind == "reduce_scatter"][:2]
    assert first == [(("host",), (0, 12)), (("local",), (12, 24))]
    assert own[1].deps == own[2].deps
    late = [(op.kind, *op.axes) for op in schedule.ops if op.bucket == 1 and op.when == "late"]
    one, other = torus(PLAN.buckets[1])
    assert late == [("pack",), *one, ("add",), *other, ("add",)]


def test_a_short_last_chain_carries_the_word_once() -> None:
    """While longer chains of earlier buckets go on."""

    def mixed(bucket: Bucket) -> list[Chain]:
        return torus(bucket) if bucket.numel == 3 else [[("all_reduce", "host", "local")]]

    schedule = make_schedule(PLAN, GRID, algorithm=mixed)
    check_schedule(schedule)
    assert schedule.piggyback_op >= 0
    assert [op.kind for op in schedule.ops].count("control") == 1


def test_chains_are_of_parts_that_hold_something() -> None:
    """A bucket of 3 elements, padded to 4, has one part of 4, which ranks divide among them."""
    schedule = make_schedule(PLAN, GRID, algorithm=torus)
    assert {op.region[1:3] for op in schedule.ops if op.bucket == 0} == {(0, 4)}


@pytest.mark.parametrize(
    ("chain", "text"),
    [
        ([("all_reduce", "local")], r"summed along local only: .* reduce it along host too"),
        ([], r"not summed over ranks: .* reduce it along host and local too"),
        (
            [("all_reduce", "local"), ("all_reduce", "host", "local")],
            r"each gradient counted 2 times",
        ),
        (
            [("reduce_scatter", "local"), ("all_gather", "host")],
            r"it gathers chunks along host, but its elements are sharded along local",
        ),
        (
            [("reduce_scatter", "local"), ("all_reduce", "host", "local")],
            r"its elements are sharded along local: .* would be summed",
        ),
    ],
)
def test_wrong_chains_are_refused_by_the_check(chain: Chain, text: str) -> None:
    schedule = make_schedule(PLAN, GRID, algorithm=lambda bucket: [chain])
    with pytest.raises(ScheduleError, match=text):
        check_schedule(schedule)


def test_the_second_colour_sums_in_another_order() -> None:
    schedule = make_schedule(PLAN, GRID, algorithm=torus, deterministic=True)
    with pytest.raises(ScheduleError, match="the schedule is deterministic; sum along local first"):
        check_schedule(schedule)


def test_chunks_that_are_left_are_shards_of_the_mean() -> None:
    chain = [("reduce_scatter", "host", "local")]
    schedule = make_schedule(PLAN, GRID, algorithm=lambda bucket: [chain])
    check_schedule(schedule)
    assert schedule.result == "sharded_mean"
    tree = {"e": torch.zeros(4, 2), "w": torch.zeros(4)}
    mixed = fddp.plan_buckets(tree, sparse=["e"])
    with pytest.raises(ValueError, match="'<lambda>' can't shard the sparse leaf 'e'; plan it"):
        make_schedule(mixed, GRID, algorithm=lambda bucket: [chain])


@pytest.mark.parametrize(
    ("chains", "text"),
    [
        ([], r"it must return a list of one or more chains, such as \[\[\('all_reduce', 'host', "),
        (iter([[]]), r"it must return a list of one or more chains, .* got <list_iterator"),
        (
            [("all_reduce", "host")],
            r"chain 0 must be a list of collectives, such as \[\('all_reduce', 'host', 'local'\)\],"
            r" got \('all_reduce', 'host'\)$",
        ),
        (
            [[("all_reduce", "host", "local")], [("all_reduce",)]],
            r"chain 1 has \('all_reduce',\); write a kind and one or more axes, such as ",
        ),
        ([[("all_reduce", ("host",))]], r".*; write a kind and one or more axes"),
        (
            [[("reduce_scater", "host")]],
            r".*; kind must be one of reduce_scatter, all_reduce, all_gather, got "
            r"'reduce_scater'; did you mean 'reduce_scatter'\?$",
        ),
        (
            [[("all_reduce", "hosts")]],
            r".*; axis must be one of host, local, got 'hosts'; did you mean 'host'\?$",
        ),
    ],
)
def test_errors_of_the_form(chains: Any, text: str) -> None:
    def mine(bucket: Bucket) -> Any:
        return chains

    with pytest.raises(ValueError, match=rf"^algorithm 'mine', bucket 0: {text}"):
        make_schedule(PLAN, GRID, algorithm=mine)


def test_an_error_of_the_function_is_raised() -> None:
    def fails(bucket: Bucket) -> Any:
        raise RuntimeError("no chain today")

    with pytest.raises(RuntimeError, match="no chain today"):
        make_schedule(PLAN, GRID, algorithm=fails)


def test_grad_sync_takes_the_schedule_and_no_function() -> None:
    def run(group: Any, algorithm: Callable[[Bucket], Any]) -> None:
        fddp.GradSync({"w": torch.zeros(3)}, group=group, algorithm=algorithm)  # type: ignore[arg-type]

    text = r"algorithm must be a name, got a function; pass GradSync\(fddp.make_schedule\("
    with pytest.raises(TypeError, match=text):
        loopback(1, run, torus)
