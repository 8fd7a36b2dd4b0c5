"""The checker: what it accepts is right, what it rejects is told plainly, at any size."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fddp.check
from fddp.build import Algorithm, make_schedule
from fddp.check import check_schedule
from fddp.errors import FddpError, ScheduleError
from fddp.plan import BucketPlan, LeafSpec, plan_leaves
from fddp.ride import with_own_word, with_riding_word
from fddp.schedule import (
    CONTROL_REGION,
    Buffer,
    Kind,
    Op,
    Region,
    Result,
    Scaling,
    Schedule,
    Topology,
    When,
)
from oracle import find_fault

# Right schedules

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
    """What `make_schedule` makes, of all kinds."""
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


@settings(max_examples=40)
@given(built())
def test_the_word_is_set_down_and_rides_again(schedule: Schedule) -> None:
    own = with_own_word(schedule)
    assert own.carrier < 0
    assert with_riding_word(own) == schedule
    assert with_own_word(own) == own
    assert with_riding_word(schedule) == schedule
    check_schedule(own)


@settings(max_examples=80)
@given(built())
def test_what_is_built_is_right(schedule: Schedule) -> None:
    check_schedule(schedule)
    assert find_fault(schedule, tries=1) is None
    assert Schedule.from_json(schedule.to_json()) == schedule


# A collective: kind, axes and the shard before it; "end" stands for the shard in the end.
Step = tuple[Any, tuple[str, ...], tuple[str, ...]]


class Chain(NamedTuple):
    """What one bucket goes through, each collective after the one before."""

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


@settings(max_examples=60)
@given(right_chains())
def test_axes_may_be_taken_in_any_order(schedule: Schedule) -> None:
    check_schedule(schedule)
    assert find_fault(schedule, tries=0) is None


@settings(max_examples=300)
@given(chains())
def test_any_chain_is_judged_as_by_the_oracle(schedule: Schedule) -> None:
    fault, problem = find_fault(schedule, tries=0), problem_of(schedule)
    assert (problem is None) is (fault is None), f"{problem}, {fault}\n{schedule}"


def problem_of(schedule: Schedule) -> str | None:
    try:
        check_schedule(schedule)
    except ScheduleError as error:
        return str(error)
    return None


# Errors


W = LeafSpec("w", (8,), "float32")
GRID = Topology(host=4, local=8)
SMALL = Topology(host=2, local=2)


def flat(topology: Topology = SMALL, **options: Any) -> Schedule:
    return with_own_word(riding(topology, **options))


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
    """The schedule, with a copy of an operation right after it, changed as told; what depended on
    the first depends on the second."""
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
    return with_own_word(make_schedule(plan_of(*leaves, rows, cap_bytes=100), Topology(world=2)))


def shards() -> Schedule:
    return flat(algorithm="reduce_scatter")


def gather() -> Schedule:
    return flat(algorithm="all_gather")


replace = dataclasses.replace


def reduced_with_its_bucket(*, added_before: bool) -> Schedule:
    """What came late joins the bucket as it is, and the average of averages is taken of all."""
    *chain, pack, reduce, add, unpack = flat(scaling="average").ops
    whole = chain[1]._replace(when="late")
    ops = [*chain, pack, add._replace(deps=(3,))]
    if added_before:
        ops += [reduce._replace(deps=(4,)), add._replace(deps=(5,))]
    ops.append(whole._replace(deps=(len(ops) - 1,)))
    ops.append(unpack._replace(deps=(len(ops) - 1,)))
    return replace(flat(scaling="average"), ops=tuple(ops))


def packed_over_chunks() -> Schedule:
    plan = plan_of(LeafSpec("h", (7,), "float16"))
    return with_op(make_schedule(plan, Topology(world=2), algorithm="reduce_scatter"), 3, stop=7)


def reduced_while_added() -> Schedule:
    """The repair is reduced once more, at the end."""
    ops = flat().ops
    return replace(flat(), ops=(*ops, ops[4]))


def packed_after_control() -> Schedule:
    pack, reduce, control, *others = flat().ops
    first = control._replace(deps=())
    ops = (first, pack, reduce._replace(deps=(1,)), *others)
    return replace(flat(), ops=ops)


def packed_between() -> Schedule:
    """A bucket that is packed between the word and its carrier."""
    plan = plan_of(LeafSpec("v", (4,), "float32"), W)
    ops = make_schedule(plan, Topology(world=2)).ops
    first, last = ops[:2], ops[2:5]
    shifted = [op._replace(deps=tuple(d - 2 for d in op.deps)) for op in last]
    pack, word, carrier = shifted
    late = [op._replace(deps=tuple(d + 2 for d in op.deps)) for op in first]
    moved = (pack, word, late[0], late[1], carrier)
    deps = {0: 2, 1: 3, 2: 0, 3: 1, 4: 4}
    others = [op._replace(deps=tuple(deps.get(d, d) for d in op.deps)) for op in ops[5:]]
    return replace(make_schedule(plan, Topology(world=2)), ops=(*moved, *others))


def carried_by_the_first_piece() -> Schedule:
    schedule = riding(split_mb=2.0**-16)
    pack, first, word, last, *others = schedule.ops
    first, last = first._replace(deps=(0, 1)), last._replace(deps=(0,))
    ops = (pack, word._replace(deps=(0,)), first, last)
    deps = {1: 2, 2: 1, 3: 2}  # the word is in with the first piece
    moved = [
        op._replace(deps=tuple(dict.fromkeys(deps.get(d, d) for d in op.deps))) for op in others
    ]
    return replace(schedule, ops=(*ops, *moved))


def carried_in(dtype: str) -> Schedule:
    schedule = make_schedule(
        plan_of(LeafSpec("w", (8,), "bfloat16")), SMALL, reduce_dtype="float32"
    )
    return replace(schedule, wire_dtypes=(dtype,))


def riding_always(schedule: Schedule) -> Schedule:
    """The word where it can't ride, because there are too many ranks for it."""
    small = with_riding_word(replace(schedule, topology=SMALL))
    return replace(small, topology=schedule.topology)


def added_as_they_are() -> Schedule:
    """What came late is added to the bucket twice, before and after it is reduced."""
    *chain, pack, reduce, add, unpack = flat().ops
    early, reduce = add._replace(deps=(3,)), reduce._replace(deps=(4,))
    ops = (*chain, pack, early, reduce, add._replace(deps=(5,)), unpack._replace(deps=(6,)))
    return replace(flat(), ops=ops)


# What is done to a right schedule, and what is said of the result.
ERRORS: dict[str, Callable[[], Schedule]] = {
    # Sums
    "summed along one axis only": lambda: with_op_of(flat(GRID), "all_reduce", axes=("local",)),
    "not summed": lambda: without(flat(GRID), 1, 4),
    "late ones summed otherwise": lambda: with_op(flat(), 4, axes=("host",)),
    "late ones lost": lambda: without(flat(), 3, 4, 5),
    "late ones not reduced": lambda: without(flat(), 4),
    "late ones added twice": lambda: after(flat(), 5),
    "late ones added in two ways": lambda: added_as_they_are(),
    "late ones added and reduced twice": lambda: reduced_with_its_bucket(added_before=True),
    "an average of some": lambda: with_op(flat(scaling="average"), 1, axes=("host",)),
    "summed twice": lambda: after(flat(), 1),
    "an unfit unit": lambda: without(half(), 3, 4),
    "kept, and not packed again": lambda: without(replace(half(), scaling="average"), 3),
    "shards summed": lambda: replace(without(flat(), 3, 4, 5), result="replicated"),
    "shards not gathered": lambda: replace(without(flat(), 1, 3, 4, 5), result="replicated"),
    "copies of one rank's": lambda: replace(gather(), result="replicated_mean"),
    "copies of one rank's summed": lambda: replace(
        after(gather(), 3, kind="all_reduce", axes=SMALL.names, shard=()), result="replicated_mean"
    ),
    "a leaf of several": lambda: without(two(), 1, 4),
    # Where
    "mean where shards are wanted": lambda: replace(flat(), result="sharded_mean"),
    "shards where the mean is wanted": lambda: replace(shards(), result="replicated_mean"),
    "divided along axes in force": lambda: with_op(hierarchical(), 3, axes=("local",)),
    "joined along another axis": lambda: with_op(hierarchical(), 4, axes=("host",)),
    "joined in another order": lambda: with_op(without(gather(), 3), 1, axes=("host", "local")),
    "chunks of two kinds": lambda: with_op(
        after(hierarchical(), 0, kind="all_reduce", axes=("local",)), 1, stop=4
    ),
    "packed over part of chunks": lambda: packed_over_chunks(),
    "a piece that was never packed": lambda: without(
        flat(algorithm="all_gather", split_mb=2**-16), 0, 1, 5
    ),
    "not divided as stated": lambda: with_op(hierarchical(), 3, shard=()),
    "cut elsewhere": lambda: with_op(hierarchical(), 3, stop=4),
    "unequal chunks": lambda: with_op(hierarchical(), 1, stop=7),
    "nothing packed": lambda: with_op(flat(), 1, stop=12),
    "never unpacked": lambda: without(flat(), 6),
    "partly unpacked": lambda: without(flat(algorithm="reduce_scatter", split_mb=2**-16), 14),
    "unpacked twice": lambda: after(flat(), 6),
    "unpacked shards twice": lambda: after(shards(), 8),
    "packed in parts": lambda: with_op(flat(), 0, stop=4),
    "packed twice": lambda: after(flat(), 0),
    "shards packed twice": lambda: after(gather(), 0),
    # Order
    "a cycle": lambda: with_op(flat(), 1, deps=(0, 4)),
    "waits for itself": lambda: with_op(flat(), 1, deps=(1,)),
    "waits for nothing there is": lambda: with_op(flat(), 1, deps=(9,)),
    "waits for a later one that does not wait for it": lambda: with_op(two(), 1, deps=(0, 2)),
    "a race": lambda: with_op(flat(), 1, deps=()),
    "a race with a repair": lambda: with_op(flat(), 3, deps=(2,)),
    "a race with an addition": lambda: reduced_while_added(),
    "a conditional collective": lambda: with_op(with_op(flat(), 3, deps=(1,)), 4, deps=(3,)),
    "unpacks too early": lambda: with_op(gather(), 4, deps=(3,)),
    # The control word
    "no control word": lambda: without(flat(), 2),
    "two control words": lambda: after(flat(), 2),
    "a control word for some": lambda: with_op(flat(), 2, axes=("host",)),
    "a control word of a bucket": lambda: with_op(flat(), 2, bucket=0),
    "a control word too early": lambda: packed_after_control(),
    # The control word in a tail
    "a riding word that nothing carries": lambda: with_op(riding(), 2, deps=(0,)),
    "a riding word of no bucket": lambda: with_op(riding(), 1, bucket=1),
    "a riding word with elements": lambda: with_op(riding(), 1, stop=8),
    "a riding word too early": lambda: packed_between(),
    "a riding word waited for": lambda: with_op(riding(), 3, deps=(1, 2)),
    "a riding word read too early": lambda: with_op(riding(), 6, deps=(0,)),
    "a carrier for some": lambda: with_op(riding(GRID), 2, axes=("local",)),
    "a carrier of the first piece": lambda: carried_by_the_first_piece(),
    "a carrier of chunks": lambda: with_op(riding(), 2, shard=("local",)),
    "a carrier that averages": lambda: replace(riding(), scaling="average"),
    "a carrier of a format that does not hold it": lambda: carried_in("bfloat16"),
    "a carrier for too many": lambda: riding_always(flat(Topology(host=2**10, local=2**7))),
    # Form
    "an unknown axis": lambda: with_op(flat(), 1, axes=("hosts",)),
    "an unknown axis of a shard": lambda: with_op(flat(), 1, shard=("hosts",)),
    "axes twice": lambda: with_op(flat(), 1, axes=("host", "host")),
    "axes in another order": lambda: with_op(flat(), 1, axes=("local", "host")),
    "no axes": lambda: with_op(flat(), 1, axes=()),
    "axes of a pack": lambda: with_op(flat(), 0, axes=("host",)),
    "an unknown bucket": lambda: with_op(flat(), 1, bucket=1),
    "no elements": lambda: with_op(flat(), 1, start=-1),
    "elements backwards": lambda: with_op(flat(), 1, start=9),
    "a repair that always runs": lambda: with_op(flat(), 4, when="always"),
    "late shards": lambda: with_op(gather(), 1, when="late"),
    "both ways of mending": lambda: with_op(half(), 4, when="late"),
    "a sparse bucket is reduced": lambda: with_op(two(), 6, kind="all_reduce"),
    "a dense bucket is gathered": lambda: with_op(two(), 1, kind="gather"),
    "a sparse bucket in shards": lambda: replace(two(), result="sharded_mean"),
    "a sparse bucket divided": lambda: with_op(two(), 6, shard=("world",)),
    "a wire that does not hold": lambda: replace(flat(), wire_dtypes=("bfloat16",)),
    "an unknown wire": lambda: replace(flat(), wire_dtypes=("int8",)),
}

TEXTS = {
    "summed along one axis only": (
        "op 6 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8), summed along local only: the contributions of ranks 8, 16, 24, ... are "
        "missing; reduce it along host too"
    ),
    "not summed": (
        "op 4 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8), not summed over ranks: the contributions of ranks 1, 2, 3, ... are missing; "
        "reduce it along host and local too"
    ),
    "late ones summed otherwise": (
        "op 6 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8) where gradients came late, summed along host only: the late contributions of "
        "ranks 1, ... are missing; reduce it along local too"
    ),
    "late ones lost": (
        "op 3 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8) where gradients came late, without what came late, which would be lost; pack it"
        " into the repair, reduce that as the bucket was, and add it, all of it 'late'"
    ),
    "late ones not reduced": (
        "op 5 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8) where gradients came late, not summed over ranks: the late contributions of "
        "ranks 1, 2, 3 are missing; reduce it along host and local too"
    ),
    "late ones added twice": (
        "op 7 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8) where gradients came late, with each late contribution counted 2 times: it "
        "holds 1/2 of the sum over ranks where 1/4 is due; sum along each axis once, and add "
        "a repair once"
    ),
    "late ones added in two ways": (
        "op 7 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8) where gradients came late, holding 1/4 of the own contribution plus 1/4 of the "
        "sum along host and local; 1/4 of the sum along host and local is due"
    ),
    "late ones added and reduced twice": (
        "op 8 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8) where gradients came late, with each late contribution counted 2 times: it "
        "holds 1/2 of the sum over ranks where 1/4 is due; sum along each axis once, and add "
        "a repair once"
    ),
    "an average of some": (
        "op 6 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8), summed along host only: the contributions of ranks 1, ... are missing; reduce "
        "it along local too"
    ),
    "summed twice": (
        "op 7 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8), with each contribution counted 4 times: it holds 1 of the sum over ranks where"
        " 1/4 is due; sum along each axis once, and add a repair once"
    ),
    "an unfit unit": (
        "op 3 (unpack of bucket 0, leaf 'h'): rank 0 ends with bucket 0, leaf 'h' (elements "
        "0:8) where weights do not fit the agreed unit, holding a sum in the unit that does "
        "not fit, which can't be corrected afterwards; reduce the bucket anew, by a pack and "
        "its collectives that run 'again'"
    ),
    "kept, and not packed again": (
        "op 4 (unpack of bucket 0, leaf 'h'): rank 0 ends with bucket 0, leaf 'h' (elements "
        "0:8) where weights do not fit the agreed unit, holding a sum in the unit that does "
        "not fit, which can't be corrected afterwards; reduce the bucket anew, by a pack and "
        "its collectives that run 'again'"
    ),
    "shards summed": (
        "op 3 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8), summed along host and local: shards are gathered, and never reduced"
    ),
    "shards not gathered": (
        "op 2 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8), not gathered along host and local: the shards of ranks 1, 2, 3 are missing; "
        "pack shards, and gather these"
    ),
    "copies of one rank's": (
        "op 4 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8), not summed over ranks, and each element copied from one rank along host and "
        "local: the contributions of ranks 1, 2, 3 are missing; reduce it along host and "
        "local before chunks are joined"
    ),
    "copies of one rank's summed": (
        "op 5 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8), not summed over ranks, and each element copied from one rank along host and "
        "local: the contributions of ranks 1, 2, 3 are missing; reduce it along host and "
        "local before chunks are joined"
    ),
    "a leaf of several": (
        "op 6 (unpack of bucket 1, leaves 'a' to 'b'): rank 0 ends with bucket 1, leaves 'a' "
        "to 'b' (elements 0:7), not summed over ranks: the contributions of rank 1 are "
        "missing; reduce it along world too"
    ),
    "mean where shards are wanted": (
        "op 6 (unpack of bucket 0, leaf 'w'): its elements are not divided, and the result "
        "'sharded_mean' wants them divided along host and local; state another result, or "
        "divide or join them before"
    ),
    "shards where the mean is wanted": (
        "op 8 (unpack of bucket 0, leaf 'w'): its elements are divided along local and host, "
        "and the result 'replicated_mean' wants them not divided; state another result, or "
        "divide or join them before"
    ),
    "divided along axes in force": (
        "op 3 (all_reduce of bucket 0, leaf 'w', along local): its elements are divided along"
        " local: ranks along local hold different ones, which would be added up; join them "
        "first, or leave 'local' out"
    ),
    "joined along another axis": (
        "op 4 (all_gather of bucket 0, leaf 'w', along host): it joins chunks along host "
        "where its elements are divided along local; join along the last of these axes first"
    ),
    "joined in another order": (
        "op 1 (all_gather of bucket 0, leaf 'w', along host and local): it joins chunks along"
        " host and local where its elements are divided along local and host; join along the "
        "last of these axes first"
    ),
    "chunks of two kinds": (
        "op 2 (reduce_scatter of bucket 0, leaf 'w', along local): parts of its elements 0:8 "
        "went through different reductions, and a chunk may hold some of each; divide the "
        "parts by themselves"
    ),
    "packed over part of chunks": (
        "op 3 (pack of bucket 0, leaf 'h'): it takes the elements 0:7 as not divided, and op "
        "1 (reduce_scatter of bucket 0, leaf 'h', along world) left 0:8 divided along world; "
        "give it the same elements, divided alike"
    ),
    "a piece that was never packed": (
        "op 4 (unpack of bucket 0, leaf 'w'): nothing has been packed into the elements 0:4 "
        "of the bucket buffer before it; pack them first"
    ),
    "not divided as stated": (
        "op 3 (all_reduce of bucket 0, leaf 'w', along host): it takes the elements 0:8 as "
        "not divided, and op 1 (reduce_scatter of bucket 0, leaf 'w', along local) left 0:8 "
        "divided along local; give it the same elements, divided alike"
    ),
    "cut elsewhere": (
        "op 3 (all_reduce of bucket 0, leaf 'w', along host): it takes the elements 0:4 as "
        "divided along local, and op 1 (reduce_scatter of bucket 0, leaf 'w', along local) "
        "left 0:8 divided along local; give it the same elements, divided alike"
    ),
    "unequal chunks": (
        "op 1 (reduce_scatter of bucket 0, leaf 'w', along local): its 7 elements can't be "
        "cut into 2 equal chunks along local; pad the bucket to a multiple"
    ),
    "nothing packed": (
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): nothing has been "
        "packed into the elements 8:12 of the bucket buffer before it; pack them first"
    ),
    "never unpacked": "bucket 0, leaf 'w': no operation unpacks it; append one",
    "partly unpacked": (
        "bucket 0, leaf 'w': no operation unpacks its elements from 4 on, of leaf 'w'; unpack"
        " every element"
    ),
    "unpacked twice": (
        "op 7 (unpack of bucket 0, leaf 'w'): op 6 has unpacked all of its bucket already; "
        "keep one of the two"
    ),
    "unpacked shards twice": (
        "op 9 (unpack of bucket 0, leaf 'w'): op 8 has handed out the elements 0:8, and "
        "results never change; do this before"
    ),
    "packed in parts": (
        "op 0 (pack of bucket 0, leaf 'w'): it has the elements 0:4 of 8; what is not divided"
        " is packed at once, as a whole"
    ),
    "packed twice": (
        "op 1 (pack of bucket 0, leaf 'w'): op 0 has packed all of its bucket already; keep "
        "one of the two"
    ),
    "shards packed twice": (
        "op 1 (pack of bucket 0, leaf 'w'): op 0 and others before it work on the elements "
        "0:8 already; pack the shards of each element once"
    ),
    "a cycle": (
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): it waits for op 4 "
        "(all_reduce of bucket 0, leaf 'w' (repair), along host and local), and ranks launch "
        "that later, when this one has started: 1 -> 4 -> 3 -> 1 is a cycle, in which all of "
        "them wait for ever; launch op 4 first"
    ),
    "waits for itself": (
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): it waits for itself; "
        "leave that dependency out"
    ),
    "waits for nothing there is": (
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): it waits for op 9, "
        "and there are ops 0 to 6; leave it out"
    ),
    "waits for a later one that does not wait for it": (
        "op 1 (all_reduce of bucket 1, leaves 'a' to 'b', along world): it waits for op 2 "
        "(the control word, along world), and ranks launch that later, when this one has "
        "started: 1 -> 2 -> 1 is a cycle, in which all of them wait for ever; launch op 2 "
        "first"
    ),
    "a race": (
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): op 0 (pack of bucket "
        "0, leaf 'w') may still be working on the elements 0:8; let it depend on op 0, also "
        "through others"
    ),
    "a race with a repair": (
        "op 6 (unpack of bucket 0, leaf 'w'): op 1 (all_reduce of bucket 0, leaf 'w', along "
        "host and local) may still be working on the elements 0:8; let it depend on op 1, "
        "also through others"
    ),
    "a race with an addition": (
        "op 7 (all_reduce of bucket 0, leaf 'w' (repair), along host and local): op 5 (add of"
        " bucket 0, leaf 'w') may still be working on the elements 0:8; let it depend on op "
        "5, also through others"
    ),
    "a conditional collective": (
        "op 3 (pack of bucket 0, leaf 'w' (repair)): it runs only 'late', as the control word"
        " says, and does not wait for that word: some ranks would take this branch and others"
        " not, and wait for ever; let it depend on op 2, also through others"
    ),
    "unpacks too early": (
        "op 4 (unpack of bucket 0, leaf 'w'): it needs what the control word says, and does "
        "not wait for it; let it depend on op 2, also through others"
    ),
    "no control word": (
        "no operation reduces the control word, from which ranks learn what came late and who"
        " failed; put one after the last pack"
    ),
    "two control words": (
        "op 3 (the control word, along host and local): op 2 reduces it already; keep one of "
        "the two"
    ),
    "a control word for some": (
        "op 2 (the control word, along host): all ranks must meet in it, and those along "
        "local do not; let it run along host and local"
    ),
    "a control word of a bucket": (
        "op 2 (the control word, in the tail of bucket 0, leaf 'w', along host and local): each "
        "rank does this by itself; leave its axes empty"
    ),
    "a riding word that nothing carries": (
        "op 1 (the control word, in the tail of bucket 0, leaf 'w'): no all-reduce of its bucket "
        "depends on it, so that nothing would sum it; let the last one depend on it, or name "
        "bucket -1 and axes"
    ),
    "a riding word of no bucket": (
        "op 1 (the control word, in the tail of bucket 1, which the plan does not have): name one "
        "of the plan's 1 buckets"
    ),
    "a riding word with elements": (
        "op 1 (the control word, in the tail of bucket 0, leaf 'w'): it has no elements that a "
        "schedule knows, and always runs: Region(buffer='control', start=0, stop=0, shard=()) and "
        "'always' are due, got Region(buffer='control', start=0, stop=8, shard=()) and 'always'"
    ),
    "a riding word too early": (
        "op 2 (pack of bucket 0, leaf 'v'): it is launched after op 1 (the control word, in the "
        "tail of bucket 1, leaf 'w'), which tells what all packing found; launch it before"
    ),
    "a riding word waited for": (
        "op 3 (pack of bucket 0, leaf 'w' (repair)): it waits for the control word, op 1, which "
        "each rank writes by itself; only the all-reduce in whose tail it rides depends on it, and "
        "others on that"
    ),
    "a riding word read too early": (
        "op 6 (unpack of bucket 0, leaf 'w'): it needs what the control word says, and does not "
        "wait for it; let it depend on op 2, also through others"
    ),
    "a carrier for some": (
        "op 2 (all_reduce of bucket 0, leaf 'w', along local): it carries the control word, for "
        "which all ranks must meet; let it run along host and local"
    ),
    "a carrier of the first piece": (
        "op 2 (all_reduce of bucket 0, leaf 'w', along host and local): it carries the control "
        "word, which lies behind element 8 of the bucket's buffer, where the elements 0:4 that it "
        "works on do not end; let the last undivided piece carry it"
    ),
    "a carrier of chunks": (
        "op 2 (all_reduce of bucket 0, leaf 'w', along host and local): it carries the control "
        "word, which lies behind element 8 of the bucket's buffer, where the elements 0:8 that it "
        "works on do not end; let the last undivided piece carry it"
    ),
    "a carrier that averages": (
        "op 1 (the control word, in the tail of bucket 0, leaf 'w'): the collective averages, and "
        "would divide it; scale 'before' or 'after'; or name bucket -1 and axes"
    ),
    "a carrier of a format that does not hold it": (
        "op 1 (the control word, in the tail of bucket 0, leaf 'w'): its bucket travels as "
        "bfloat16, which does not hold it; float32 and float64 do; or name bucket -1 and axes"
    ),
    "a carrier for too many": (
        "op 1 (the control word, in the tail of bucket 0, leaf 'w'): float32 holds the word of "
        "65536 ranks and 16777216 leaves at most, and there are 131072 and 1; or name bucket -1 "
        "and axes"
    ),
    "a control word too early": (
        "op 1 (pack of bucket 0, leaf 'w'): it is launched after op 0 (the control word, "
        "along host and local), which tells what all packing found; launch it before"
    ),
    "an unknown axis": (
        "op 1 (all_reduce of bucket 0, leaf 'w', along hosts): it runs along 'hosts'; the "
        "axes are host and local"
    ),
    "an unknown axis of a shard": (
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): it is divided along "
        "'hosts'; the axes are host and local"
    ),
    "axes twice": (
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and host): it runs along host and"
        " host; name each axis once"
    ),
    "axes in another order": (
        "op 1 (all_reduce of bucket 0, leaf 'w', along local and host): name its axes in the "
        "topology's order, host and local"
    ),
    "no axes": (
        "op 1 (all_reduce of bucket 0, leaf 'w'): it needs axes to run along, of host and local"
    ),
    "axes of a pack": (
        "op 0 (pack of bucket 0, leaf 'w', along host): each rank does this by itself; leave "
        "its axes empty"
    ),
    "an unknown bucket": (
        "op 1 (all_reduce of bucket 1, which the plan does not have, along host and local): "
        "name one of the plan's 1 buckets"
    ),
    "no elements": (
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): its elements -1:8 "
        "must start at 0 or above, and not stop before"
    ),
    "elements backwards": (
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): its elements 9:8 must"
        " start at 0 or above, and not stop before"
    ),
    "a repair that always runs": (
        "op 4 (all_reduce of bucket 0, leaf 'w' (repair), along host and local): it has "
        "('repair', 'always') for buffer and condition; all_reduce goes with ('bucket', "
        "'always') or ('bucket', 'late') or ('bucket', 'again') or ('repair', 'late')"
    ),
    "late shards": (
        "op 1 (all_gather of bucket 0, leaf 'w', along host): shards are all there from the "
        "start, so that nothing is 'late' where the result is 'replicated'; leave it out"
    ),
    "both ways of mending": (
        "op 4 (all_reduce of bucket 0, leaf 'h', along host and local): its bucket is also "
        "reduced 'again' as a whole, what came late included; keep one of the two"
    ),
    "a sparse bucket is reduced": (
        "op 6 (all_reduce of bucket 0, leaf 'rows', along world): its bucket is sparse: "
        "gather and unpack it, nothing else"
    ),
    "a dense bucket is gathered": (
        "op 1 (gather of bucket 1, leaves 'a' to 'b', along world): its bucket is dense: pack"
        " and reduce it instead"
    ),
    "a sparse bucket in shards": (
        "op 6 (gather of bucket 0, leaf 'rows', along world): a sparse bucket ends as the "
        "whole mean on each rank, and 'sharded_mean' is stated; plan its leaf as a dense one,"
        " or leave it out"
    ),
    "a sparse bucket divided": (
        "op 6 (gather of bucket 0, leaf 'rows', along world): it leaves everything on every "
        "rank, and its elements are divided along world; leave the shard empty"
    ),
    "a wire that does not hold": (
        "bucket 0, leaf 'w': bfloat16 on the wire does not hold its float32; choose float32 "
        "or float64"
    ),
    "an unknown wire": (
        "bucket 0, leaf 'w': int8 on the wire does not hold its float32; choose float32 or float64"
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    schedule = ERRORS[case]()
    with pytest.raises(ScheduleError) as caught:
        check_schedule(schedule)
    text = TEXTS[case]
    if not caught.value.ranks:
        text += f" (on all {schedule.topology.world_size} ranks)"
    assert str(caught.value) == text


def test_an_error_says_where() -> None:
    schedule = with_op_of(flat(GRID), "all_reduce", axes=("local",))
    with pytest.raises(ScheduleError) as caught:
        check_schedule(schedule)
    error = caught.value
    assert isinstance(error, FddpError)
    assert isinstance(error, ValueError)
    assert (error.op, error.bucket, error.paths) == (6, 0, ("w",))
    assert error.ranks == (0, 8, 16, 24)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.op, again.ranks) == (error.op, error.ranks)


def test_the_leaves_are_those_of_the_elements() -> None:
    leaves = [LeafSpec(name, (4,), "float32") for name in "abcd"]
    plan = plan_of(*leaves, cap_bytes=1000)
    # Two leaves in a piece.
    schedule = with_own_word(make_schedule(plan, Topology(world=2), split_mb=2.0**-15))
    position = next(i for i, op in enumerate(schedule.ops) if op.region.start == 8)
    with pytest.raises(ScheduleError, match="leaves 'c' to 'd'") as caught:
        check_schedule(without(schedule, position))
    assert caught.value.paths == ("c", "d")


# Size


def calls_of(schedule: Schedule) -> int:
    """How many functions Python enters."""
    check_schedule(schedule)  # properties of the schedule and plan are worked out once
    count = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        check_schedule(schedule)
    finally:
        sys.setprofile(before)
    return count


def wide_plan(buckets: int) -> BucketPlan:
    return plan_of(*(LeafSpec(f"p{i:04}", (1000,), "float32") for i in range(buckets)))


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
def test_the_number_of_ranks_costs_nothing(algorithm: Algorithm) -> None:
    plan = wide_plan(20)
    small, large = (
        with_own_word(make_schedule(plan, topology, algorithm=algorithm))
        for topology in (Topology(host=2, local=4), Topology(host=12500, local=8))
    )
    # Which terms of a set are compared depends on hashes, which differ from process to process.
    assert calls_of(large) == pytest.approx(calls_of(small), rel=0.01)


def test_errors_cost_nothing_either() -> None:
    topology = Topology(host=2**20, local=2**10)
    schedule = with_op_of(flat(topology), "all_reduce", axes=("host",))
    with pytest.raises(ScheduleError, match=r"ranks 1, 2, 3, \.\.\. are missing"):
        check_schedule(schedule)


def test_cost_grows_with_the_number_of_buckets() -> None:
    few, many = (
        calls_of(make_schedule(wide_plan(n), SMALL, algorithm="hierarchical")) for n in (50, 200)
    )
    assert many < 4.2 * few


@pytest.mark.parametrize("batch", [1, 7, 10**6])
def test_buckets_may_be_judged_in_batches(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fddp.check, "_BATCH", batch)
    schedule = make_schedule(wide_plan(5), SMALL, algorithm="hierarchical")
    check_schedule(schedule)
    last = max(i for i, op in enumerate(schedule.ops) if op.kind == "add")
    with pytest.raises(ScheduleError, match=r"^op \d+ \(unpack of bucket 4, leaf 'p0004'\)"):
        check_schedule(without(schedule, last))


# By hand


def test_a_path_through_other_buckets_will_do() -> None:
    schedule = with_own_word(make_schedule(plan_of(W, LeafSpec("x", (4,), "float32")), SMALL))
    assert [op.kind for op in schedule.ops[:4]] == ["pack", "all_reduce"] * 2
    chained = replace(
        schedule,
        ops=tuple(op._replace(deps=(i - 1,) if i else ()) for i, op in enumerate(schedule.ops)),
    )
    check_schedule(chained)
    assert find_fault(chained) is None


def test_the_average_of_averages() -> None:
    schedule = reduced_with_its_bucket(added_before=False)
    check_schedule(schedule)
    assert find_fault(schedule) is None
    assert find_fault(reduced_with_its_bucket(added_before=True))
    with pytest.raises(ScheduleError, match="with each contribution counted 4 times"):
        check_schedule(replace(schedule, scaling="before"))


def test_parts_may_go_in_any_order() -> None:
    schedule = flat(split_mb=2.0**-16)
    ops = schedule.ops
    assert [op.region.start for op in ops[1:3]] == [0, 4]
    other = replace(schedule, ops=(ops[0], ops[2], ops[1], *ops[3:]))
    check_schedule(other)
    assert find_fault(other) is None


def test_nothing_to_reduce() -> None:
    plan = plan_of(LeafSpec("steps", (2,), "int64"))
    schedule = make_schedule(plan, SMALL)
    assert [op.kind for op in schedule.ops] == ["control"]
    check_schedule(schedule)


def test_leaves_without_elements() -> None:
    schedule = make_schedule(plan_of(LeafSpec("w", (0,), "float32")), SMALL)
    check_schedule(schedule)
    with pytest.raises(ScheduleError, match="no operation unpacks it"):
        check_schedule(without(schedule, len(schedule.ops) - 1))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_hosts_first(dtype: str) -> None:
    """Two all-reduces in the other order, and a result that each rank keeps a part of."""
    plan = plan_of(LeafSpec("w", (8,), dtype))
    ops = make_schedule(plan, SMALL, algorithm="hierarchical").ops
    swapped = {("local",): ("host",), ("host",): ("local",), (): (), SMALL.names: SMALL.names}
    other = tuple(
        op._replace(
            axes=swapped[op.axes], region=op.region._replace(shard=swapped[op.region.shard])
        )
        for op in ops
    )
    schedule = replace(make_schedule(plan, SMALL), ops=other)
    check_schedule(schedule)
    assert find_fault(schedule) is None


def test_padding_is_in_proportion() -> None:
    schedule = flat()
    with pytest.raises(ScheduleError, match="0:1099511627776 reach far past the 8 of its bucket"):
        check_schedule(with_op(schedule, 0, stop=2**40))
    with pytest.raises(ScheduleError, match="reach far past"):
        check_schedule(with_op(schedule, 1, start=2**40, stop=2**40))


def test_an_empty_bucket_is_packed_too() -> None:
    schedule = make_schedule(plan_of(LeafSpec("none", (0,), "float32")), SMALL)
    check_schedule(schedule)
    with pytest.raises(ScheduleError, match=r"leaf 'none'.*no operation packs it"):
        check_schedule(without(schedule, 0))
