"""Schedules as values, and that the runtime carries out these and nothing else."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fddp
from fddp.core.check import check_schedule
from fddp.core.plan.plan import BucketPlan, LeafSpec, plan_leaves
from fddp.core.schedule.builder import make_schedule
from fddp.core.schedule.op import Region, chunk
from fddp.core.schedule.schedule import Schedule, Topology
from fddp.errors import ScheduleError
from tests.support.collectives import Issued, record_issued
from tests.support.examples import examples
from tests.support.models import batch, mlp, mlp_loss
from tests.support.on_ranks import on_threads
from tests.support.schedules import right_chains

WORLD = Topology(world=2)


def plan_of(*leaves: tuple[str, str], sparse: tuple[str, ...] = ()) -> BucketPlan:
    """A bucket for each leaf, given as path and dtype."""
    specs = [LeafSpec(path, (3,), dtype, sparse=path in sparse) for path, dtype in leaves]
    order = [i for i, spec in enumerate(specs) if spec.reducible]
    return plan_leaves(specs, order=order, caps_bytes=[1])


# The values


def example() -> Schedule:
    plan = plan_of(("a", "float32"), ("e", "float32"), ("h", "float16"), sparse=("e",))
    return make_schedule(plan, Topology(host=4))


def test_the_digest_is_stable() -> None:
    # Ranks may run different builds: a digest that changes is a change of what they agree on.
    assert example().digest == "17a764a3df704e3dedd361e61621fe116004cf37f6d33e4142a8b350b4ebd682"
    assert (
        example().shared_digest
        == "0d55f2a05a71f516d96c55961deb2454dff8c614c9b4f009c9c19df284ab741a"
    )


def test_shared_digest_ignores_local_leaves() -> None:
    """Ranks may have different leaves that are not reduced."""
    one, other = (
        make_schedule(plan_of(("a", "float32"), ("steps", dtype)), WORLD)
        for dtype in ("int64", "int32")
    )
    assert one.shared_digest == other.shared_digest
    assert one.digest != other.digest


def test_equality_and_hash() -> None:
    assert example() == example()
    assert hash(example()) == hash(example())
    assert pickle.loads(pickle.dumps(example())) == example()
    plan = plan_of(("a", "float32"))
    others = [
        make_schedule(plan, WORLD),
        make_schedule(plan, WORLD, scaling="after"),
        make_schedule(plan, WORLD, algorithm="reduce_scatter"),
        make_schedule(plan, WORLD, split_mb=1e-6),
        make_schedule(plan, Topology(world=3)),
        make_schedule(plan, Topology(host=2)),
        make_schedule(plan_of(("b", "float32")), WORLD),
        make_schedule(plan_of(("a", "bfloat16")), WORLD),
        make_schedule(plan_of(("a", "bfloat16")), WORLD, reduce_dtype="float32"),
    ]
    assert len(set(others)) == len({schedule.digest for schedule in others}) == len(others)


def test_pickles_omit_cached_values() -> None:
    schedule = example()
    before = len(pickle.dumps(schedule))
    assert schedule.digest
    assert schedule.sequence
    assert len(pickle.dumps(schedule)) == before


@pytest.mark.parametrize(
    ("position", "text"),
    [
        (0, "op 0 (pack of bucket 1, leaves 'a' to 'b')"),
        (1, "op 1 (reduce_scatter of bucket 1, leaves 'a' to 'b', along local)"),
        (2, "op 2 (the control word, along host and local)"),
        (6, "op 6 (reduce_scatter of bucket 1, leaves 'a' to 'b' (repair), along local)"),
        (10, "op 10 (gather of bucket 0, leaf 'e', along host and local)"),
    ],
)
def test_operations_in_words(position: int, text: str) -> None:
    leaves = [LeafSpec(path, (3,), "float32", sparse=path == "e") for path in "abe"]
    plan = plan_leaves(leaves, order=[0, 1, 2], caps_bytes=[100])
    schedule = make_schedule(plan, Topology(host=2, local=2), algorithm="hierarchical")
    assert schedule.describe(position) == text


def test_a_bucket_that_is_not_there_in_words() -> None:
    assert example().describe_bucket(3) == "bucket 3, which is not in the plan"


def test_a_schedule_is_printed_as_a_table() -> None:
    schedule = make_schedule(
        plan_of(("a", "float32")), Topology(host=2, local=2), algorithm="hierarchical"
    )
    first, *lines = str(schedule).splitlines()
    assert first == (
        "Schedule(11 operations, 1 bucket, Topology(host=2, local=2), scaling='before', "
        "result='replicated_mean')"
    )
    assert first == repr(schedule)
    assert [line.split() for line in lines[:8]] == [
        ["op", "kind", "bucket", "along", "buffer", "elements", "shard", "when", "after"],
        ["0", "pack", "0", "-", "bucket", "0:4", "-", "always", "-"],
        ["1", "reduce_scatter", "0", "local", "bucket", "0:4", "-", "always", "0"],
        ["2", "control", "-", "host", "x", "local", "control", "-", "-", "always", "0"],
        ["3", "all_reduce", "0", "host", "bucket", "0:4", "local", "always", "1"],
        ["4", "all_gather", "0", "local", "bucket", "0:4", "local", "always", "3"],
        ["5", "pack", "0", "-", "repair", "0:4", "-", "late", "4,", "2"],
        ["6", "reduce_scatter", "0", "local", "repair", "0:4", "-", "late", "5"],
    ]
    assert len(lines) == 1 + len(schedule.ops)


def test_notebooks_show_the_ends_of_a_long_one() -> None:
    short = example()._repr_html_()
    assert short.startswith("<table><caption>Schedule(14 operations")
    assert short.count("<tr>") == 1 + len(example().ops)
    plan = plan_of(*((f"<{i}>", "float32") for i in range(50)))
    long = make_schedule(plan, WORLD)
    html = long._repr_html_()
    assert html.count("<tr>") == 1 + 60 + 1
    assert f"({len(long.ops) - 60} more operations)" in html


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=3), st.integers(0, 5))
def test_chunks(cuts: list[tuple[int, int]], start: int) -> None:
    """All chunks together are the whole, in order of their places."""
    cuts = [(places, place % places) for places, place in cuts]
    elements = [*range(start, start + 24**2 * 6)]
    for places, place in cuts:
        size = len(elements) // places
        elements = elements[place * size : (place + 1) * size]
    assert chunk(start, start + 24**2 * 6, cuts) == (elements[0], elements[-1] + 1)


def bad(**fields: Any) -> Callable[[], Schedule]:
    return lambda: dataclasses.replace(example(), **fields)


def bad_op(**fields: Any) -> Callable[[], Schedule]:
    op = example().ops[0]
    return lambda: dataclasses.replace(example(), ops=(op, op._replace(**fields)))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (bad(plan=None), r"^plan must be a BucketPlan, got NoneType$"),
        (bad(topology=4), r"^topology must be a Topology, got int$"),
        (bad(ops=[]), r"^ops must be a tuple, got list$"),
        (bad(ops=(1,)), r"^ops\[0\] must be an Op on a Region, got 1$"),
        (bad_op(region=None), r"^ops\[1\] must be an Op on a Region, got Op\("),
        (
            bad_op(kind="send"),
            r"^ops\[1\] has the kind 'send'; it must be one of pack, stage, all_reduce",
        ),
        (bad_op(when="never"), r"^ops\[1\] has the when 'never'; it must be one of always, late"),
        (
            bad_op(region=Region("swap", 0, 3)),  # type: ignore[arg-type]
            r"^ops\[1\] has the region\.buffer 'swap'; it must be one of bucket, repair, control$",
        ),
        (bad_op(bucket=0.0), r"^ops\[1\] has the bucket 0\.0; it must be a 64-bit int$"),
        (bad_op(bucket=True), r"^ops\[1\] has the bucket True; it must be a 64-bit int$"),
        (
            bad_op(region=Region("bucket", -2, 3)),
            r"^ops\[1\] has the start -2; it must be a 64-bit int$",
        ),
        (
            bad_op(region=Region("bucket", 0, 2**63)),
            r"^ops\[1\] has the stop 9223372036854775808; it must be a 64-bit int$",
        ),
        (
            bad_op(region=Region("bucket", 0, 3, (1,))),  # type: ignore[arg-type]
            r"^ops\[1\] has the region\.shard \(1,\); it must be a tuple of axis names$",
        ),
        (bad_op(deps=(True,)), r"^ops\[1\] has the deps \(True,\); they must be a tuple of ints$"),
        (
            bad(wire_dtypes=("float32",)),
            r"^wire_dtypes must be a tuple of 3 dtype names, one for each bucket, got "
            r"\('float32',\)$",
        ),
        (bad(scaling="twice"), r"^scaling must be one of before, after, average, got 'twice'$"),
        (
            bad(result="sum"),
            r"^result must be one of replicated_mean, sharded_mean, replicated, got",
        ),
    ],
)
def test_errors(make: Callable[[], Schedule], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


# JSON


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda d: [],
            r"^schedule JSON: the value is \[\], .* the fields format, plan, axes, ops",
        ),
        (
            lambda d: {**d, "more": 1},
            r"^schedule JSON: the value has the unexpected fields \['more'\], .* with the fields",
        ),
        (
            lambda d: {**d, "format": 2},
            r"^schedule JSON: \.format is 2, .* 'fddp\.Schedule/2'$",
        ),
        (
            lambda d: {**d, "axes": [["a", 1], ["a", 2]]},
            r"^schedule JSON: \.axes needs unique names, got \['a', 'a'\]$",
        ),
        (lambda d: {**d, "ops": [[]]}, r"^schedule JSON: \.ops\[0\] is \[\], .* a list of 6$"),
        (lambda d: {**d, "scaling": []}, r"^scaling must be one of"),
        (lambda d: {**d, "axes": [["a", 0]]}, r"^axis 'a' needs an int of at least 1"),
    ],
)
def test_errors_of_json(change: Callable[[dict[str, Any]], Any], text: str) -> None:
    document = change(json.loads(example().to_json()))
    with pytest.raises(ValueError, match=text):
        Schedule.from_json(json.dumps(document))


# The runtime carries them out


def expected_of(sync: fddp.GradSync, *, late: frozenset[int] = frozenset()) -> list[Issued]:
    """The collectives that the schedule lists, with its conditions decided, as this rank sees
    them; those with itself alone need no transport."""
    program, schedule, expected = sync._engine.program, sync.schedule, []
    for op in schedule.ops:
        happens = op.when == "always" or op.bucket in late
        ranks = schedule.topology.group(op.axes, sync.rank)
        if op.kind == "control" and op.bucket < 0:
            expected.append(Issued("all_reduce", "float64", program.control.size, ranks))
        elif op.axes and happens and len(ranks) > 1:
            joined = len(op.axes) if op.kind == "all_gather" else 0
            shard = op.region.shard[: len(op.region.shard) - joined]
            numel = (op.region.stop - op.region.start) // schedule.topology.size(shard)
            if op is schedule.ops[schedule.piggyback_op]:
                numel += program.control.size
            expected.append(Issued(op.kind, schedule.wire_dtypes[op.bucket], numel, ranks))
    return expected


CASES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "float16": {"dtype": torch.float16},
    "reduced in float32": {"dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "a plan": {"dtype": torch.float64, "given": True},
    "hierarchical": {
        "dtype": torch.float32,
        "mesh": Topology(host=2, local=2),
        "algorithm": "hierarchical",
    },
}


@pytest.mark.parametrize("case", CASES)
def test_the_runtime_issues_the_collectives_of_the_schedule(case: str) -> None:
    fddp.loopback(CASES[case].get("mesh", WORLD).world_size, issue, CASES[case])


def issue(group: Any, case: dict[str, Any]) -> None:
    params = mlp(dtype=case["dtype"])
    caps = {"bucket_cap_mb": 0.0003, "first_bucket_mb": 0.0001}
    options = {name: case[name] for name in ("reduce_dtype", "mesh", "algorithm") if name in case}
    source = fddp.plan_buckets(params, **caps) if case.get("given") else params
    options |= {} if case.get("given") else caps
    with fddp.GradSync(source, group=group, **options) as sync:
        issued = record_issued(sync)
        step = sync.value_and_grad(mlp_loss)

        def check(call: Callable[[], Any]) -> Any:
            expected, buckets = expected_of(sync), len(sync.plan.buckets)
            result = call()
            assert issued == expected
            assert len(expected) >= buckets > 1
            issued.clear()
            return result

        for number in range(3):
            x = batch(sync.rank, number).to(case["dtype"])
            _, grads = check(lambda x=x: step(params, x))
            check(lambda grads=grads: sync(grads))


@examples(10)
@given(right_chains())
def test_checked_schedules_run_and_give_the_mean(schedule: Schedule) -> None:
    check_schedule(schedule)
    (leaf,), ranks = schedule.plan.leaves, schedule.topology.world_size
    dtype = getattr(torch, leaf.dtype)
    grads = [torch.arange(leaf.numel, dtype=dtype) * (r + 1) * ranks for r in range(ranks)]
    mean = torch.stack(grads).double().mean(0)

    def run(group: Any) -> Any:
        with fddp.GradSync(schedule, group=group) as sync:
            issued = record_issued(sync)
            average = sync if schedule.result == "replicated_mean" else sync.reduce_scatter
            own = {"w": grads[group.rank]}
            parts = [average(own)["w"], average(own, weight=0.5)["w"]]
            return parts, issued == 2 * expected_of(sync)

    results = fddp.loopback(ranks, run)
    assert all(same for _, same in results)
    for steps in zip(*(parts for parts, _ in results), strict=True):
        if schedule.result == "replicated_mean":
            for got in steps:
                torch.testing.assert_close(got.double(), mean, rtol=2e-3, atol=0.0)
        else:
            got = torch.cat(steps).double().sort().values
            torch.testing.assert_close(got, mean, rtol=2e-3, atol=0.0)


@on_threads(2)
def test_wrong_schedules_are_refused_at_construction(group: Any) -> None:
    schedule = make_schedule(plan_of(("a", "float32")), WORLD)
    wrong = dataclasses.replace(schedule, result="sharded_mean")
    with pytest.raises(ScheduleError, match="its elements are not sharded"):
        fddp.GradSync(wrong, group=group)


@on_threads(2)
def test_repairs_are_issued_on_all_ranks_where_one_was_late(group: Any) -> None:
    params = {f"w{i}": torch.eye(4, dtype=torch.float64) for i in range(3)}
    plan = fddp.plan_buckets(params, bucket_cap_mb=1e-6, first_bucket_mb=1e-6)

    def loss_fn(p: dict[str, Tensor], twice: bool) -> Tensor:
        def layer(x: Tensor) -> Tensor:
            return torch.tanh(x @ p["w2"])

        x = torch.ones(4, 4, dtype=torch.float64, requires_grad=True)
        if twice:
            x = checkpoint(layer, x, use_reentrant=True)
        x = torch.tanh(torch.tanh(x @ p["w0"]) @ p["w1"])
        return checkpoint(layer, x, use_reentrant=True).sum()

    with fddp.GradSync(plan, group=group) as sync:
        issued = record_issued(sync)
        step = sync.value_and_grad(loss_fn, with_info=True)
        for twice, repaired in ((group.rank == 0, (0,)), (False, ())):
            _, _, info = step(params, twice)
            assert info.repaired == repaired
            assert issued == expected_of(sync, late=frozenset(repaired))
            issued.clear()


@on_threads(2)
def test_a_sparse_bucket_takes_three_gathers(group: Any) -> None:
    params = {"e": torch.zeros(4, 2), "w": torch.zeros(3)}
    with fddp.GradSync(params, group=group, sparse=("e",)) as sync:
        issued = record_issued(sync)
        sync({"e": torch.eye(4, 2).to_sparse(1), "w": torch.ones(3)})
        assert [operation.kind for operation in issued] == ["all_reduce"] + ["all_gather"] * 3


@pytest.mark.parametrize(
    ("failing", "rank"), [("loss", 0), ("weight", 1), ("tree", 2), ("none", 0)]
)
@on_threads(3)
def test_a_failing_rank_issues_the_same_collectives(group: Any, failing: str, rank: int) -> None:
    params = {"a": torch.zeros(3), "b": torch.zeros(4)}
    mine = group.rank == rank

    def loss_fn(p: dict[str, Tensor]) -> Tensor:
        if mine and failing == "loss":
            raise ValueError("no loss today")
        return p["a"].sum() + p["b"].sum()

    with fddp.GradSync(params, group=group, bucket_cap_mb=1e-5, first_bucket_mb=1e-5) as sync:
        issued, expected = record_issued(sync), expected_of(sync)
        weight = -1.0 if mine and failing == "weight" else 1.0
        step = sync.value_and_grad(loss_fn, weight_fn=lambda p: weight)
        tree = {"a": params["a"]} if mine and failing == "tree" else params
        try:
            step(tree)
        except Exception:
            assert failing != "none"
        assert issued[: len(expected)] == expected
        exchange = 0 if failing == "none" else 1
        assert len(issued) == len(expected) + exchange


@pytest.mark.slow
@on_threads(1)
def test_a_long_chain_of_skipped_operations(group: Any) -> None:
    """Skipped operations pass their dependencies on, each once, thousands deep."""
    plan = plan_leaves([LeafSpec("w", (2000,), "float32")], order=[0], caps_bytes=[1])
    split = make_schedule(plan, Topology(world=1), split_mb=4 / 2**20)
    late = [position for position, op in enumerate(split.ops) if op.when == "late"]
    ops = list(split.ops)
    for before, position in pairwise(late):
        deps = tuple(dict.fromkeys((*ops[position].deps, before)))
        ops[position] = ops[position]._replace(deps=deps)
    chained = dataclasses.replace(split, ops=tuple(ops))

    with fddp.GradSync(chained, group=group) as sync:
        assert torch.equal(sync({"w": torch.ones(2000)})["w"], torch.ones(2000))


def test_an_axis_may_have_any_name() -> None:
    topology = Topology(**{"self": 2, "local axis": 2})
    schedule = make_schedule(plan_of(("a", "float32")), topology)
    assert Schedule.from_json(schedule.to_json()) == schedule
