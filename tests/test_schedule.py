"""Schedules as values, and that the runtime carries out these and nothing else."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fddp
from fddp.plan import BucketPlan, LeafSpec, plan_leaves
from fddp.schedule import Op, Schedule, Topology, make_schedule
from models import batch, mlp, mlp_loss
from ranks import Launch

WORLD = Topology(world=2)


def plan_of(*leaves: tuple[str, str], sparse: tuple[str, ...] = ()) -> BucketPlan:
    """A bucket for each leaf, given as path and dtype."""
    specs = [LeafSpec(path, (3,), dtype, sparse=path in sparse) for path, dtype in leaves]
    order = [i for i, spec in enumerate(specs) if spec.reducible]
    return plan_leaves(specs, order=order, caps_bytes=[1])


# The values


def test_dense_buckets() -> None:
    assert make_schedule(plan_of(("a", "float32"), ("b", "bfloat16")), WORLD).ops == (
        Op("pack", 0, "", "bucket", ()),
        Op("all_reduce", 0, "world", "bucket", (0,)),
        Op("pack", 1, "", "bucket", ()),
        Op("all_reduce", 1, "world", "bucket", (2,)),
        Op("control", -1, "world", "control", (2,)),
        Op("pack", 0, "", "repair", (1, 4), "late"),
        Op("all_reduce", 0, "world", "repair", (5,), "late"),
        Op("add", 0, "", "bucket", (6,), "late"),
        Op("pack", 1, "", "repair", (3, 4), "late"),
        Op("all_reduce", 1, "world", "repair", (8,), "late"),
        Op("add", 1, "", "bucket", (9,), "late"),
        Op("unpack", 0, "", "bucket", (7,)),
        Op("unpack", 1, "", "bucket", (10,)),
    )


def test_a_float16_bucket_is_retained_and_reduced_again_as_a_whole() -> None:
    schedule = make_schedule(plan_of(("a", "float16")), WORLD)
    assert schedule.ops == (
        Op("pack", 0, "", "bucket", ()),
        Op("all_reduce", 0, "world", "bucket", (0,)),
        Op("control", -1, "world", "control", (0,)),
        Op("pack", 0, "", "bucket", (1, 2), "again"),
        Op("all_reduce", 0, "world", "bucket", (3,), "again"),
        Op("unpack", 0, "", "bucket", (4,)),
    )
    assert schedule.retained == {0}
    assert schedule.wire_dtypes == ("float16",)


def test_a_sparse_bucket_is_gathered_once_the_control_word_is_in() -> None:
    plan = plan_of(("a", "float32"), ("e", "float32"), sparse=("e",))
    schedule = make_schedule(plan, WORLD)
    assert [op for op in schedule.ops if op.bucket == 1] == [
        Op("gather", 1, "world", "bucket", (2,)),
        Op("unpack", 1, "", "bucket", (6,)),
    ]
    assert schedule.ops[2].kind == "control"
    assert schedule.sequence == (0,)


def test_sparse_buckets_only() -> None:
    schedule = make_schedule(plan_of(("e", "float32"), sparse=("e",)), WORLD)
    assert schedule.ops == (
        Op("control", -1, "world", "control", ()),
        Op("gather", 0, "world", "bucket", (0,)),
        Op("unpack", 0, "", "bucket", (1,)),
    )
    assert schedule.sequence == ()


@pytest.mark.parametrize("reduce_dtype", [None, "float32", "float64"])
def test_reduce_dtype_is_that_of_16_bit_buckets(reduce_dtype: str | None) -> None:
    dtypes = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
    plan = plan_of(*((f"p{i}", dtype) for i, dtype in enumerate(dtypes)))
    schedule = make_schedule(plan, WORLD, reduce_dtype=reduce_dtype)
    wide = reduce_dtype or "float16", reduce_dtype or "bfloat16"
    assert schedule.wire_dtypes == (*wide, *dtypes[2:])
    assert schedule.retained == (frozenset() if reduce_dtype else {0})


LEAF = st.tuples(
    st.sampled_from(["float16", "bfloat16", "float32", "complex64"]),
    st.booleans(),
    st.integers(0, 9),
)


@given(
    st.lists(LEAF, min_size=1, max_size=12), st.integers(1, 64), st.integers(1, 5), st.booleans()
)
def test_what_holds_of_every_schedule(
    leaves: list[tuple[str, bool, int]], cap_bytes: int, world_size: int, wide: bool
) -> None:
    specs = [
        LeafSpec(f"p{i}", (size,), dtype, sparse=sparse)
        for i, (dtype, sparse, size) in enumerate(leaves)
    ]
    plan = plan_leaves(specs, order=range(len(specs))[::-1], caps_bytes=[cap_bytes])
    reduce_dtype = "float32" if wide else None
    schedule = make_schedule(plan, Topology(world=world_size), reduce_dtype=reduce_dtype)
    ops = schedule.ops
    dense = [b for b, bucket in enumerate(plan.buckets) if not bucket.sparse]
    for position, op in enumerate(ops):
        assert all(0 <= dep < position for dep in op.deps), "dependencies point backwards"
        assert (op.axis == "world") is (op.kind in ("all_reduce", "gather", "control"))
        assert (op.bucket == -1) is (op.kind == "control")
    # Each bucket is launched once, in plan order, before the one control word.
    launches = [op.bucket for op in ops if op.kind == "all_reduce" and op.when == "always"]
    assert launches == dense == list(schedule.sequence)
    (control,) = (position for position, op in enumerate(ops) if op.kind == "control")
    assert all(op.when == "always" for op in ops[:control])
    assert sum(op.kind == "all_reduce" for op in ops[:control]) == len(dense)
    # Whatever depends on a condition hangs on the control word, and unpacking on all of its bucket.
    for position, op in enumerate(ops):
        if op.when != "always" or op.kind == "gather":
            assert control in ancestors(ops, position)
    for b, bucket in enumerate(plan.buckets):
        (unpack,) = (p for p, op in enumerate(ops) if op.kind == "unpack" and op.bucket == b)
        own = {p for p, op in enumerate(ops) if op.bucket == b and p != unpack}
        assert own <= ancestors(ops, unpack)
        kinds = [op.kind for op in ops if op.bucket == b]
        if bucket.sparse:
            assert kinds == ["gather", "unpack"]
        else:
            again = schedule.wire_dtypes[b] == "float16"
            assert (b in schedule.retained) is again
            assert kinds.count("all_reduce") == 2


def ancestors(ops: tuple[Op, ...], position: int) -> set[int]:
    found: set[int] = set()
    stack = [position]
    while stack:
        for dep in ops[stack.pop()].deps:
            if dep not in found:
                found.add(dep)
                stack.append(dep)
    return found


def example() -> Schedule:
    plan = plan_of(("a", "float32"), ("e", "float32"), ("h", "float16"), sparse=("e",))
    return make_schedule(plan, Topology(host=4))


def test_the_digest_is_stable() -> None:
    # Ranks may run different builds: a digest that changes is a change of what they agree on.
    assert example().digest == "51fb2d1b61230355fa2b18e38b04fb1a11799cad80d8435a01454f3b68a9de67"


def test_equality_and_hash() -> None:
    assert example() == example()
    assert hash(example()) == hash(example())
    assert pickle.loads(pickle.dumps(example())) == example()
    plan = plan_of(("a", "float32"))
    others = [
        make_schedule(plan, WORLD),
        make_schedule(plan, Topology(world=3)),
        make_schedule(plan, Topology(host=2)),
        make_schedule(plan_of(("b", "float32")), WORLD),
        make_schedule(plan_of(("a", "bfloat16")), WORLD),
        make_schedule(plan_of(("a", "bfloat16")), WORLD, reduce_dtype="float32"),
    ]
    assert len(set(others)) == len({schedule.digest for schedule in others}) == len(others)


def test_a_schedule_is_printed_as_a_table() -> None:
    lines = str(make_schedule(plan_of(("a", "float32")), WORLD)).splitlines()
    assert [line.split() for line in lines] == [
        ["op", "kind", "bucket", "axis", "when", "after"],
        ["0", "pack", "0", "-", "always", "-"],
        ["1", "all_reduce", "0", "world", "always", "0"],
        ["2", "control", "-", "world", "always", "0"],
        ["3", "pack", "0", "-", "late", "1,", "2"],
        ["4", "all_reduce", "0", "world", "late", "3"],
        ["5", "add", "0", "-", "late", "4"],
        ["6", "unpack", "0", "-", "always", "5"],
    ]


def test_a_topology_is_a_value() -> None:
    grid = Topology(host=4, local=8)
    assert grid.world_size == 32
    assert grid.axes == (("host", 4), ("local", 8))
    assert repr(grid) == "Topology(host=4, local=8)"
    assert grid == Topology(host=4, local=8) != Topology(local=8, host=4)
    assert hash(grid) == hash(Topology(host=4, local=8))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Topology(), "at least one axis"),
        (lambda: Topology(world=0), "'world' needs a size of at least 1, got 0"),
        (lambda: Topology(world=-3), "at least 1, got -3"),
        (
            lambda: make_schedule(plan_of(("a", "float32")), Topology(host=2, local=2)),
            r"one axis, got Topology\(host=2, local=2\)",
        ),
        (
            lambda: make_schedule(plan_of(("a", "float32")), WORLD, algorithm="ring"),  # type: ignore[arg-type]
            "must be 'all_reduce', got 'ring'",
        ),
        (
            lambda: make_schedule(plan_of(("a", "float32")), WORLD, reduce_dtype="float16"),
            "must be float32 or float64, got 'float16'",
        ),
    ],
)
def test_errors(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


# The runtime carries them out


class Issued(NamedTuple):
    kind: str
    dtype: str
    numel: int


def record(sync: fddp.GradSync) -> list[Issued]:
    """Notes what the transport is asked for from now on."""
    issued: list[Issued] = []
    start = sync._transport._start

    def noting(operation: Any) -> Any:
        tensor = operation.tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        issued.append(Issued(operation.kind, dtype, tensor.numel()))
        return start(operation)

    sync._transport._start = noting  # type: ignore[method-assign]
    return issued


def expected_of(sync: fddp.GradSync, *, late: set[int] = frozenset(), again: bool = False) -> Any:  # type: ignore[assignment]
    """The collectives that the schedule lists, with its conditions decided."""
    program, expected = sync._program, []
    for op in program.schedule.ops:
        happens = {"always": True, "late": op.bucket in late, "again": again}[op.when]
        if op.kind == "control":
            expected.append(Issued("all_reduce", "float64", program.control.size))
        elif op.kind == "all_reduce" and happens:
            numel = program.plan.buckets[op.bucket].numel
            expected.append(Issued("all_reduce", program.schedule.wire_dtypes[op.bucket], numel))
    return expected


CASES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "float16": {"dtype": torch.float16},
    "reduced in float32": {"dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "a plan": {"dtype": torch.float64, "given": True},
}


@pytest.mark.parametrize("case", CASES)
def test_the_runtime_issues_what_the_schedule_lists(launch: Launch, case: str) -> None:
    runs = launch(2, issue, CASES[case])
    assert runs[0] == runs[1], "the same on all ranks"
    for issued, expected, buckets in runs[0]:
        assert issued == expected
        assert len(expected) == buckets + 1
        assert buckets > 1


def issue(group: Any, case: dict[str, Any]) -> Any:
    params = mlp(dtype=case["dtype"])
    caps = {"bucket_cap_mb": 0.0003, "first_bucket_mb": 0.0001}
    options = {"reduce_dtype": case.get("reduce_dtype")}
    source = fddp.plan_buckets(params, **caps) if case.get("given") else params
    with fddp.GradSync(
        source, group=group, **options, **({} if case.get("given") else caps)
    ) as sync:
        issued = record(sync)
        step = sync.value_and_grad(mlp_loss)
        results = []
        for number in range(3):
            expected, buckets = expected_of(sync), len(sync.plan.buckets)
            _, grads = step(params, batch(sync.rank, number).to(case["dtype"]))
            results.append((list(issued), expected, buckets))
            issued.clear()
            expected = expected_of(sync)
            sync(grads)
            results.append((list(issued), expected, len(sync.plan.buckets)))
            issued.clear()
        return results


def test_a_retained_bucket_is_reduced_again_on_all_ranks_or_on_none() -> None:
    def run(group: Any) -> Any:
        with fddp.GradSync({"w": torch.zeros(3, dtype=torch.float16)}, group=group) as sync:
            issued = record(sync)
            grads = {"w": torch.ones(3, dtype=torch.float16)}
            results = []
            for weight, again in ((1.0, False), (1e6, True), (1e6, False), (1.0, True)):
                sync(grads, weight=weight)
                results.append(list(issued) == expected_of(sync, again=again))
                issued.clear()
            return results

    assert fddp.loopback(2, run) == [[True] * 4] * 2


def test_repairs_are_issued_on_all_ranks_where_one_was_late() -> None:
    def run(group: Any) -> Any:
        params = {f"w{i}": torch.eye(4, dtype=torch.float64) for i in range(3)}

        def loss_fn(p: dict[str, Tensor], twice: bool) -> Tensor:
            def layer(x: Tensor) -> Tensor:
                return torch.tanh(x @ p["w2"])

            x = torch.ones(4, 4, dtype=torch.float64, requires_grad=True)
            if twice:
                x = checkpoint(layer, x, use_reentrant=True)
            x = torch.tanh(torch.tanh(x @ p["w0"]) @ p["w1"])
            return checkpoint(layer, x, use_reentrant=True).sum()

        with fddp.GradSync(
            fddp.plan_buckets(params, bucket_cap_mb=1e-6, first_bucket_mb=1e-6), group=group
        ) as sync:
            issued = record(sync)
            step = sync.value_and_grad(loss_fn, with_info=True)
            results = []
            for twice in (group.rank == 0, False):
                _, _, info = step(params, twice)
                results.append(
                    (info.repaired, issued == expected_of(sync, late=set(info.repaired)))
                )
                issued.clear()
            return results

    first, second = fddp.loopback(2, run)
    assert first == second == [((0,), True), ((), True)]


def test_a_sparse_bucket_takes_three_gathers() -> None:
    def run(group: Any) -> list[str]:
        params = {"e": torch.zeros(4, 2), "w": torch.zeros(3)}
        with fddp.GradSync(params, group=group, sparse=("e",)) as sync:
            issued = record(sync)
            sync({"e": torch.eye(4, 2).to_sparse(1), "w": torch.ones(3)})
            return [operation.kind for operation in issued]

    assert fddp.loopback(2, run) == [["all_reduce"] * 2 + ["all_gather"] * 3] * 2


@settings(max_examples=20, deadline=None)
@given(failing=st.sampled_from(["loss", "weight", "tree", "none"]), rank=st.integers(0, 2))
def test_a_failing_rank_issues_what_the_others_issue(failing: str, rank: int) -> None:
    def run(group: Any) -> Any:
        params = {"a": torch.zeros(3), "b": torch.zeros(4)}
        mine = group.rank == rank

        def loss_fn(p: dict[str, Tensor]) -> Tensor:
            if mine and failing == "loss":
                raise ValueError("no loss today")
            return p["a"].sum() + p["b"].sum()

        with fddp.GradSync(params, group=group, bucket_cap_mb=1e-5, first_bucket_mb=1e-5) as sync:
            issued, expected = record(sync), expected_of(sync)
            weight = -1.0 if mine and failing == "weight" else 1.0
            step = sync.value_and_grad(loss_fn, weight_fn=lambda p: weight)
            tree = {"a": params["a"]} if mine and failing == "tree" else params
            try:
                step(tree)
            except Exception:
                assert failing != "none"
            return issued[: len(expected)] == expected, len(issued) - len(expected)

    exchange = 0 if failing == "none" else 2
    assert fddp.loopback(3, run) == [(True, exchange)] * 3
