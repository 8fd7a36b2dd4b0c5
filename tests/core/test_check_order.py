"""`check_schedule` on schedules in the wrong order or form, or with the control word elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fddp.core.plan.plan import LeafSpec
from fddp.core.schedule.builder import make_schedule
from fddp.core.schedule.piggyback import with_piggybacked_word
from fddp.core.schedule.schedule import Schedule, Topology
from tests.support.schedules import (
    GRID,
    SMALL,
    W,
    after,
    assert_refused,
    flat,
    gather,
    half,
    plan_of,
    riding,
    two,
    with_op,
    without,
)


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
    small = with_piggybacked_word(replace(schedule, topology=SMALL))
    return replace(small, topology=schedule.topology)


# What is done to a right schedule, and what is said of the result.
ERRORS: dict[str, Callable[[], Schedule]] = {
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
    assert_refused(ERRORS[case](), TEXTS[case])
