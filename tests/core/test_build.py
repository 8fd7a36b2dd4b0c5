"""Schedules as they are made: which operations, in which order, after which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fddp.core.check import check_schedule
from fddp.core.plan.plan import BucketPlan, LeafSpec, plan_leaves
from fddp.core.schedule.builder import make_all_gather_schedule, make_schedule
from fddp.core.schedule.op import COLLECTIVES, CONTROL_REGION, Op, Region, is_collective
from fddp.core.schedule.piggyback import control_layout, with_separate_word
from fddp.core.schedule.schedule import Schedule
from fddp.core.schedule.topology import Topology
from tests.support.schedules import built

WORLD = Topology(world=2)
GRID = Topology(host=2, local=3)


def plan_of(*leaves: tuple[str, str], sparse: tuple[str, ...] = (), numel: int = 3) -> BucketPlan:
    """A bucket for each leaf, given as path and dtype."""
    specs = [LeafSpec(path, (numel,), dtype, sparse=path in sparse) for path, dtype in leaves]
    order = [i for i, spec in enumerate(specs) if spec.reducible]
    return plan_leaves(specs, order=order, caps_bytes=[1])


ONE = plan_of(("a", "float32"))


def whole(stop: int = 3, shard: tuple[str, ...] = ()) -> Region:
    return Region("bucket", 0, stop, shard)


def repair(stop: int = 3, shard: tuple[str, ...] = ()) -> Region:
    return Region("repair", 0, stop, shard)


def test_flat() -> None:
    world = ("world",)
    assert make_schedule(plan_of(("a", "float32"), ("b", "bfloat16")), WORLD).ops == (
        Op("pack", 0, (), whole(), ()),
        Op("all_reduce", 0, world, whole(), (0,)),
        Op("pack", 1, (), whole(), ()),
        Op("all_reduce", 1, world, whole(), (2,)),
        Op("control", -1, world, CONTROL_REGION, (2,)),
        Op("pack", 0, (), repair(), (1, 4), "late"),
        Op("all_reduce", 0, world, repair(), (5,), "late"),
        Op("add", 0, (), whole(), (6,), "late"),
        Op("pack", 1, (), repair(), (3, 4), "late"),
        Op("all_reduce", 1, world, repair(), (8,), "late"),
        Op("add", 1, (), whole(), (9,), "late"),
        Op("unpack", 0, (), whole(), (7, 4)),
        Op("unpack", 1, (), whole(), (10, 4)),
    )


def test_the_control_word_is_piggybacked_on_the_last_bucket() -> None:
    world = ("world",)
    schedule = make_schedule(plan_of(("a", "bfloat16"), ("b", "float32")), WORLD)
    assert schedule.ops == (
        Op("pack", 0, (), whole(), ()),
        Op("all_reduce", 0, world, whole(), (0,)),
        Op("pack", 1, (), whole(), ()),
        Op("control", 1, (), CONTROL_REGION, (2,)),
        Op("all_reduce", 1, world, whole(), (2, 3)),
        Op("pack", 0, (), repair(), (1, 4), "late"),
        Op("all_reduce", 0, world, repair(), (5,), "late"),
        Op("add", 0, (), whole(), (6,), "late"),
        Op("pack", 1, (), repair(), (4,), "late"),
        Op("all_reduce", 1, world, repair(), (8,), "late"),
        Op("add", 1, (), whole(), (9,), "late"),
        Op("unpack", 0, (), whole(), (7, 4)),
        Op("unpack", 1, (), whole(), (10, 4)),
    )
    assert (schedule.control, schedule.piggyback_op) == (3, 4)
    assert schedule.groups == (world,)


@pytest.mark.parametrize(
    ("dtype", "options", "format_"),
    [
        ("float32", {}, "float32"),
        ("float64", {}, "float64"),
        ("bfloat16", {"reduce_dtype": "float32"}, "float32"),
        ("float16", {"reduce_dtype": "float64"}, "float64"),
        ("float32", {"scaling": "after"}, "float32"),
        ("float32", {"split_mb": 2.0**-18}, "float32"),
        ("bfloat16", {}, None),
        ("float16", {}, None),
        ("complex64", {}, None),
        ("float32", {"scaling": "average"}, None),
        ("float32", {"algorithm": "hierarchical"}, None),
        ("float32", {"algorithm": "reduce_scatter"}, None),
        ("float32", {"algorithm": "all_gather"}, None),
    ],
)
def test_placement_of_the_piggybacked_control_word(
    dtype: str, options: dict[str, Any], format_: str | None
) -> None:
    schedule = make_schedule(plan_of(("a", dtype)), GRID, **options)
    check_schedule(schedule)
    layout = control_layout(schedule, with_order=False)
    assert (schedule.piggyback_op >= 0) is (format_ is not None)
    assert layout.format == (format_ or "float64")
    assert (layout.limb_bits > 0) is (layout.format == "float32")
    assert sum(map(is_collective, schedule.ops)) == sum(
        map(is_collective, with_separate_word(schedule).ops)
    ) - (format_ is not None)


def test_piggybacking_may_be_disabled() -> None:
    riding = make_schedule(ONE, WORLD)
    assert make_schedule(ONE, WORLD, piggyback=False) == with_separate_word(riding) != riding


def test_with_too_many_ranks_the_word_is_sent_apart() -> None:
    assert make_schedule(ONE, Topology(host=2**8, local=2**8)).piggyback_op >= 0
    assert make_schedule(ONE, Topology(host=2**9, local=2**8)).piggyback_op < 0
    wide = make_schedule(plan_of(("a", "float64")), Topology(host=2**9, local=2**8))
    assert wide.piggyback_op >= 0


def test_hierarchical() -> None:
    """Buckets are padded to what is divided, and a stage of one overlaps with the next's."""
    inner, outer, every = ("local",), ("host",), ("host", "local")
    plan = plan_of(("a", "float32"), ("b", "float32"), numel=4)
    schedule = make_schedule(plan, GRID, algorithm="hierarchical")
    assert schedule.ops[:9] == (
        Op("pack", 0, (), whole(6), ()),
        Op("reduce_scatter", 0, inner, whole(6), (0,)),
        Op("pack", 1, (), whole(6), ()),
        Op("reduce_scatter", 1, inner, whole(6), (2,)),
        Op("control", -1, every, CONTROL_REGION, (2,)),
        Op("all_reduce", 0, outer, whole(6, inner), (1,)),
        Op("all_reduce", 1, outer, whole(6, inner), (3,)),
        Op("all_gather", 0, inner, whole(6, inner), (5,)),
        Op("all_gather", 1, inner, whole(6, inner), (6,)),
    )
    assert schedule.ops[9:14] == (
        Op("pack", 0, (), repair(6), (7, 4), "late"),
        Op("reduce_scatter", 0, inner, repair(6), (9,), "late"),
        Op("all_reduce", 0, outer, repair(6, inner), (10,), "late"),
        Op("all_gather", 0, inner, repair(6, inner), (11,), "late"),
        Op("add", 0, (), whole(6), (12,), "late"),
    )
    assert schedule.buffer_numels == (6, 6)
    assert schedule.groups == (inner, every, outer)


def test_hierarchical_along_three_axes() -> None:
    topology = Topology(pod=2, host=2, local=2)
    schedule = make_schedule(ONE, topology, algorithm="hierarchical")
    chain = [op for op in schedule.ops if op.when == "always" and op.kind in COLLECTIVES]
    assert [(op.kind, op.axes, op.region.shard) for op in chain if op.kind != "control"] == [
        ("reduce_scatter", ("local",), ()),
        ("reduce_scatter", ("host",), ("local",)),
        ("all_reduce", ("pod",), ("local", "host")),
        ("all_gather", ("host",), ("local", "host")),
        ("all_gather", ("local",), ("local",)),
    ]


def test_axes_of_one_place_are_passed_over() -> None:
    topology = Topology(pod=1, host=2, local=1, core=2)
    schedule = make_schedule(ONE, topology, algorithm="hierarchical")
    assert schedule.groups == (("core",), topology.names, ("host",))
    alone = make_schedule(ONE, Topology(host=1, local=1), algorithm="hierarchical")
    assert [op.kind for op in alone.ops[:3]] == ["pack", "control", "all_reduce"]


def test_reduce_scatter() -> None:
    every, shard = ("host", "local"), ("local", "host")
    assert make_schedule(ONE, GRID, algorithm="reduce_scatter").ops == (
        Op("pack", 0, (), whole(6), ()),
        Op("reduce_scatter", 0, ("local",), whole(6), (0,)),
        Op("control", -1, every, CONTROL_REGION, (0,)),
        Op("reduce_scatter", 0, ("host",), whole(6, ("local",)), (1,)),
        Op("pack", 0, (), repair(6), (3, 2), "late"),
        Op("reduce_scatter", 0, ("local",), repair(6), (4,), "late"),
        Op("reduce_scatter", 0, ("host",), repair(6, ("local",)), (5,), "late"),
        Op("add", 0, (), whole(6, shard), (6,), "late"),
        Op("unpack", 0, (), whole(6, shard), (7, 2)),
    )


def test_all_gather() -> None:
    """Nothing of it is late, and the control word is read nevertheless."""
    every, shard = ("host", "local"), ("local", "host")
    schedule = make_schedule(ONE, GRID, algorithm="all_gather")
    assert schedule.result == "replicated"
    assert schedule.ops == (
        Op("pack", 0, (), whole(6, shard), ()),
        Op("all_gather", 0, ("host",), whole(6, shard), (0,)),
        Op("control", -1, every, CONTROL_REGION, (0,)),
        Op("all_gather", 0, ("local",), whole(6, ("local",)), (1,)),
        Op("unpack", 0, (), whole(6), (3, 2)),
    )


@pytest.mark.parametrize("topology", [WORLD, GRID, Topology(world=1), Topology(a=2, b=1, c=2)])
@pytest.mark.parametrize("split_mb", [None, 2.0**-17])
def test_the_counterpart_of_shards(topology: Topology, split_mb: float | None) -> None:
    plan = plan_of(("a", "float16"), ("b", "float32"), numel=20)
    scattered = make_schedule(
        plan, topology, algorithm="reduce_scatter", reduce_dtype="float32", split_mb=split_mb
    )
    gathered = make_all_gather_schedule(scattered)
    check_schedule(gathered)
    given = {op.region for op in scattered.ops if op.kind == "unpack"}
    assert given == {op.region for op in gathered.ops if op.kind == "pack"}
    assert gathered.wire_dtypes == ("float16", "float32"), "shards travel as they are"


def test_a_float16_bucket_is_retained_and_reduced_again_as_a_whole() -> None:
    schedule = make_schedule(plan_of(("a", "float16")), WORLD)
    world = ("world",)
    assert schedule.ops == (
        Op("pack", 0, (), whole(), ()),
        Op("all_reduce", 0, world, whole(), (0,)),
        Op("control", -1, world, CONTROL_REGION, (0,)),
        Op("pack", 0, (), whole(), (1, 2), "again"),
        Op("all_reduce", 0, world, whole(), (3,), "again"),
        Op("unpack", 0, (), whole(), (4, 2)),
    )
    assert schedule.retained == {0}
    assert schedule.wire_dtypes == ("float16",)


def test_a_sparse_bucket_is_gathered_once_the_control_word_is_in() -> None:
    plan = plan_of(("a", "float32"), ("e", "float32"), sparse=("e",))
    schedule = make_schedule(plan, GRID, algorithm="hierarchical")
    gather, unpack = (op for op in schedule.ops if op.bucket == 1)
    control = next(i for i, op in enumerate(schedule.ops) if op.kind == "control")
    assert gather == Op("gather", 1, ("host", "local"), whole(), (control,))
    assert unpack == Op("unpack", 1, (), whole(), (schedule.ops.index(gather), control))
    assert schedule.sequence == (0,)


def test_sparse_buckets_only() -> None:
    world = ("world",)
    schedule = make_schedule(plan_of(("e", "float32"), sparse=("e",)), WORLD)
    assert schedule.ops == (
        Op("control", -1, world, CONTROL_REGION, ()),
        Op("gather", 0, world, whole(), (0,)),
        Op("unpack", 0, (), whole(), (1, 0)),
    )
    assert schedule.sequence == ()


@given(st.integers(0, 50), st.integers(1, 200), st.integers(2, 6))
def test_pieces_are_as_small_as_they_may_be(numel: int, split_bytes: int, ranks: int) -> None:
    plan = plan_of(("a", "float32"), numel=numel)
    schedule = make_schedule(
        plan,
        Topology(world=ranks),
        algorithm="reduce_scatter",
        split_mb=split_bytes / 2**20,
    )
    pieces = [op.region for op in schedule.ops if op.kind == "unpack"]
    edges = [0, *(piece.stop for piece in pieces)]
    assert [piece.start for piece in pieces] == edges[:-1], "without gaps"
    assert numel <= edges[-1] < numel + ranks
    sizes = [piece.stop - piece.start for piece in pieces]
    assert all(size % ranks == 0 for size in sizes)
    assert max(sizes) * 4 <= max(split_bytes, ranks * 4)
    assert max(sizes) - min(sizes) <= ranks


@pytest.mark.parametrize("reduce_dtype", [None, "float32", "float64"])
def test_reduce_dtype_is_that_of_16_bit_buckets(reduce_dtype: str | None) -> None:
    dtypes = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
    plan = plan_of(*((f"p{i}", dtype) for i, dtype in enumerate(dtypes)))
    schedule = make_schedule(plan, WORLD, reduce_dtype=reduce_dtype)
    wide = reduce_dtype or "float16", reduce_dtype or "bfloat16"
    assert schedule.wire_dtypes == (*wide, *dtypes[2:])
    assert schedule.retained == (frozenset() if reduce_dtype else {0})


@given(built())
def test_buckets_are_launched_in_plan_order_before_the_word_is_known(schedule: Schedule) -> None:
    dense = [b for b, bucket in enumerate(schedule.plan.buckets) if not bucket.sparse]
    assert list(schedule.sequence) == dense
    known = max(schedule.control, schedule.piggyback_op)
    assert all(op.when == "always" for op in schedule.ops[:known])
    collectives = Counter(op.bucket for op in schedule.ops[: known + 1] if op.axes)
    assert set(collectives) >= set(dense) or known == schedule.control
    for b in dense:
        narrow = schedule.wire_dtypes[b] == "float16" or schedule.deterministic
        assert (b in schedule.retained) is (narrow and schedule.result != "replicated")


SPARSE = plan_of(("e", "float32"), sparse=("e",))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: make_schedule(ONE, WORLD, algorithm="ring"),  # type: ignore[arg-type]
            r"^algorithm must be one of all_reduce, hierarchical, reduce_scatter, all_gather, "
            r"got 'ring'$",
        ),
        (
            lambda: make_schedule(ONE, WORLD, scaling="half"),  # type: ignore[arg-type]
            r"^scaling must be one of before, after, average, got 'half'$",
        ),
        (
            lambda: make_schedule(ONE, WORLD, reduce_dtype="float16"),
            r"^reduce_dtype must be float32 or float64, got 'float16'$",
        ),
        (
            lambda: make_schedule(ONE, WORLD, split_mb=0.0),
            r"^split_mb must be a number of MiB above 0, got 0\.0$",
        ),
        (
            lambda: make_schedule(ONE, WORLD, split_mb=float("nan")),
            r"^split_mb must be a number of MiB above 0, got nan$",
        ),
        (
            lambda: make_schedule(ONE, WORLD, algorithm="hierarchical"),
            r"^'hierarchical' needs a topology with at least two axes, such as "
            r"Topology\(host=4, local=8\), got Topology\(world=2\)$",
        ),
        (
            lambda: make_schedule(SPARSE, WORLD, algorithm="reduce_scatter"),
            r"^'reduce_scatter' can't shard the sparse leaf 'e'; plan it as dense, or exclude "
            r"it with select=$",
        ),
        (
            lambda: make_all_gather_schedule(make_schedule(ONE, WORLD)),
            r"^schedule must have the result 'sharded_mean' .* got the result "
            r"'replicated_mean'",
        ),
    ],
)
def test_errors(make: Callable[[], Schedule], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize(("device", "rides"), [("cpu", True), ("meta", True), ("cuda#0", False)])
def test_the_host_does_not_fetch_the_word_from_a_device(device: str, rides: bool) -> None:
    leaf = LeafSpec("a", (3,), "float32", device=device)
    schedule = make_schedule(plan_leaves([leaf], order=[0], caps_bytes=[1]), WORLD)
    assert (schedule.piggyback_op >= 0) is rides
