"""Schedules for tests: what is built, any chain of collectives, and right ones changed by hand."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, get_args

import pytest
from hypothesis import strategies as st

from fddp.core.check import check_schedule
from fddp.core.plan.plan import BucketPlan, LeafSpec, plan_leaves
from fddp.core.schedule.builder import Algorithm, make_schedule
from fddp.core.schedule.op import CONTROL_REGION, Buffer, Kind, Op, Region, When
from fddp.core.schedule.piggyback import with_separate_word
from fddp.core.schedule.schedule import Result, Scaling, Schedule, Topology
from fddp.errors import ScheduleError

TOPOLOGIES = (
    Topology(world=1),
    Topology(world=3),
    Topology(host=2, local=2),
    Topology(host=1, local=3),
    Topology(host=2, local=3),
    Topology(host=3, local=1),
    Topology(pod=2, host=2, local=2),
    Topology(pod=2, host=1, local=3),
    Topology(pod=1, host=1, local=1),
)


def plan_of(*leaves: LeafSpec, cap_bytes: int = 1) -> BucketPlan:
    order = [i for i, leaf in enumerate(leaves) if leaf.reducible]
    return plan_leaves(leaves, order=order, caps_bytes=[cap_bytes])


@st.composite
def built(draw: st.DrawFn) -> Schedule:
    """Schedules of `make_schedule`, of all kinds."""
    algorithm = draw(st.sampled_from(get_args(Algorithm)))
    topology = draw(st.sampled_from(TOPOLOGIES))
    if algorithm == "hierarchical" and len(topology.axes) == 1:
        algorithm = "all_reduce"
    may_be_sparse = algorithm in ("all_reduce", "hierarchical")
    leaves = [
        LeafSpec(
            f"p{i}",
            (draw(st.integers(0, 9)),),
            draw(st.sampled_from(["float16", "bfloat16", "float32", "complex64"])),
            sparse=may_be_sparse and draw(st.integers(0, 3)) == 0,
        )
        for i in range(draw(st.integers(1, 4)))
    ]
    scaling = draw(st.sampled_from(get_args(Scaling)))
    may_be_ordered = algorithm != "all_gather" and scaling != "average"
    return make_schedule(
        plan_of(*leaves, cap_bytes=draw(st.integers(1, 40))),
        topology,
        algorithm=algorithm,
        scaling=scaling,
        deterministic=may_be_ordered and draw(st.booleans()),
        reduce_dtype=draw(st.sampled_from([None, "float32", "float64"])),
        split_mb=draw(st.sampled_from([None, 2.0**-18, 2.0**-16])),
    )


# Chains


# A collective: kind, axes and the shard before it; "end" stands for the shard in the end.
Step = tuple[Any, tuple[str, ...], tuple[str, ...]]


class Chain(NamedTuple):
    """The collectives of one bucket, in order."""

    topology: Topology
    leaf: LeafSpec
    scaling: Scaling
    first: tuple[str, ...]  # axes that divide what is packed
    steps: list[Step]
    shards: bool = False  # whether these are to be gathered

    def schedule(self) -> Schedule:
        """The chain and the repair that goes with it."""
        plan = plan_of(self.leaf)
        stop = -(-plan.buckets[0].numel // self.topology.world_size) * self.topology.world_size
        (*steps, (_, _, last)), ops = self.steps, []

        def append(kind: Kind, buffer: Buffer, when: When, shard: tuple[str, ...]) -> None:
            deps = (len(ops) - 1,) if ops else ()
            ops.append(Op(kind, 0, (), Region(buffer, 0, stop, shard), deps, when))

        def append_chain(buffer: Buffer, when: When) -> None:
            append("pack", buffer, when, self.first)
            for kind, axes, shard in steps:
                append(kind, buffer, when, shard)
                ops[-1] = ops[-1]._replace(axes=axes)

        append_chain("bucket", "always")
        deps = (len(ops) - 1,)
        ops.append(Op("control", -1, self.topology.names, CONTROL_REGION, deps))
        result: Result = "sharded_mean" if last else "replicated_mean"
        if self.shards:
            result = "replicated"
        elif self.leaf.dtype == "float16":
            append_chain("bucket", "again")
        else:
            append_chain("repair", "late")
            append("add", "bucket", "late", last)
        append("unpack", "bucket", "always", last)
        wire_dtypes = (self.leaf.dtype,)
        return Schedule(plan, self.topology, tuple(ops), wire_dtypes, self.scaling, result)


several = st.sampled_from([t for t in TOPOLOGIES if t.world_size > 1])
scalings = st.sampled_from(get_args(Scaling))
leaves = st.tuples(st.integers(1, 9), st.sampled_from(["float16", "float32"])).map(
    lambda leaf: LeafSpec("w", leaf[:1], leaf[1])
)


@st.composite
def chains(draw: st.DrawFn) -> Schedule:
    """Any collectives, right or not."""
    topology = draw(several)
    first = tuple(draw(st.permutations(topology.names))) if draw(st.integers(0, 3)) == 0 else ()
    shards = draw(st.booleans()) if first else False
    numbers = draw(st.lists(st.tuples(st.integers(0, 4), axes_of(topology)), max_size=5))
    steps = chain_of(numbers, first)
    return Chain(topology, draw(leaves), draw(scalings), first, steps, shards).schedule()


@st.composite
def right_chains(draw: st.DrawFn) -> Schedule:
    """Collectives along each axis once, in any order, some of which divide; with or without
    joining again what was divided."""
    topology = draw(several)
    order = draw(st.permutations(topology.names))
    divided = draw(st.sets(st.sampled_from(order)))
    shard: tuple[str, ...] = ()
    steps: list[Step] = []
    for axis in order:
        steps.append(("reduce_scatter" if axis in divided else "all_reduce", (axis,), shard))
        shard = (*shard, axis) if axis in divided else shard
    if divided != {*order} or draw(st.booleans()):
        while shard:
            steps.append(("all_gather", shard[-1:], shard))
            shard = shard[:-1]
    chain = Chain(topology, draw(leaves), draw(scalings), (), [*steps, ("end", (), shard)])
    return chain.schedule()


def axes_of(topology: Topology) -> st.SearchStrategy[tuple[str, ...]]:
    some = st.sets(st.sampled_from(topology.names), min_size=1)
    return some.map(lambda axes: tuple(axis for axis in topology.names if axis in axes))


def chain_of(steps: list[tuple[int, tuple[str, ...]]], shard: tuple[str, ...]) -> list[Step]:
    """Collectives whose stated shard is the one in force, and the shard in the end."""
    chain: list[Step] = []
    for number, axes in steps:
        free = tuple(axis for axis in axes if axis not in shard)
        if number < 2 and shard:
            chain.append(("all_gather", shard[-1:], shard))
            shard = shard[:-1]
        elif number < 4 and free:
            chain.append(("reduce_scatter", free, shard))
            shard = (*shard, *free)
        else:
            chain.append(("all_reduce", free or axes, shard))
    return [*chain, ("end", (), shard)]


# By hand


W = LeafSpec("w", (8,), "float32")
GRID = Topology(host=4, local=8)
SMALL = Topology(host=2, local=2)


def flat(topology: Topology = SMALL, **options: Any) -> Schedule:
    return with_separate_word(riding(topology, **options))


def riding(topology: Topology = SMALL, **options: Any) -> Schedule:
    return make_schedule(plan_of(W), topology, **options)


def hierarchical(topology: Topology = SMALL, **options: Any) -> Schedule:
    return flat(topology, algorithm="hierarchical", **options)


def with_op(schedule: Schedule, position: int, **fields: Any) -> Schedule:
    """The schedule, with fields of an operation or of its region replaced."""
    op = schedule.ops[position]
    region = {name: fields.pop(name) for name in [*fields] if name in Region._fields}
    op = op._replace(region=op.region._replace(**region), **fields)
    ops = (*schedule.ops[:position], op, *schedule.ops[position + 1 :])
    return dataclasses.replace(schedule, ops=ops)


def with_op_of(schedule: Schedule, kind: str, **fields: Any) -> Schedule:
    """The same for all operations of a kind."""
    for position, op in enumerate(schedule.ops):
        if op.kind == kind:
            schedule = with_op(schedule, position, **fields)
    return schedule


def without(schedule: Schedule, *positions: int) -> Schedule:
    """The schedule without some operations, which hand on what they depend on."""
    ops = list(schedule.ops)
    for position in sorted(positions, reverse=True):
        deps = ops.pop(position).deps
        for i, op in enumerate(ops):
            found = [e for d in op.deps for e in (deps if d == position else (d,))]
            ops[i] = op._replace(deps=tuple(d - (d > position) for d in found))
    return dataclasses.replace(schedule, ops=tuple(ops))


def after(schedule: Schedule, position: int, **fields: Any) -> Schedule:
    """Return the schedule with a changed copy of an operation right after it. Operations that
    depended on the first depend on the copy."""
    ops = schedule.ops
    shifted = (
        op._replace(deps=tuple(d + (d >= position) for d in op.deps)) for op in ops[position + 1 :]
    )
    more = ops[position]._replace(deps=(position,))
    new = dataclasses.replace(schedule, ops=(*ops[: position + 1], more, *shifted))
    return with_op(new, position + 1, **fields)


def half() -> Schedule:
    return make_schedule(plan_of(LeafSpec("h", (8,), "float16")), SMALL)


def two() -> Schedule:
    """Two leaves in a bucket, and a sparse one."""
    leaves = (LeafSpec("a", (3,), "float32"), LeafSpec("b", (4,), "float32"))
    rows = LeafSpec("rows", (3, 2), "float32", sparse=True)
    return with_separate_word(
        make_schedule(plan_of(*leaves, rows, cap_bytes=100), Topology(world=2))
    )


def shards() -> Schedule:
    return flat(algorithm="reduce_scatter")


def gather() -> Schedule:
    return flat(algorithm="all_gather")


def problem_of(schedule: Schedule) -> str | None:
    """Return the error of `check_schedule`; None if it accepts the schedule."""
    try:
        check_schedule(schedule)
    except ScheduleError as error:
        return str(error)
    return None


def assert_refused(schedule: Schedule, text: str) -> None:
    """Assert the error of `check_schedule`, which names the ranks."""
    with pytest.raises(ScheduleError) as caught:
        check_schedule(schedule)
    if not caught.value.ranks:
        text += f" (on all {schedule.topology.world_size} ranks)"
    assert str(caught.value) == text
