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
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): it depends on op 4 "
        "(all_reduce of bucket 0, leaf 'w' (repair), along host and local), which is launched "
        "later: 1 -> 4 -> 3 -> 1 is a cycle, a deadlock on all ranks; launch op 4 first"
    ),
    "waits for itself": (
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): it depends on itself; "
        "remove that dependency"
    ),
    "waits for nothing there is": (
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): it depends on op 9, "
        "but there are ops 0 to 6; remove that dependency"
    ),
    "waits for a later one that does not wait for it": (
        "op 1 (all_reduce of bucket 1, leaves 'a' to 'b', along world): it depends on op 2 "
        "(the control word, along world), which is launched later: 1 -> 2 -> 1 is a cycle, a "
        "deadlock on all ranks; launch op 2 first"
    ),
    "a race": (
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): op 0 (pack of bucket "
        "0, leaf 'w') may still be using the elements 0:8; make it depend on op 0, directly or "
        "indirectly"
    ),
    "a race with a repair": (
        "op 6 (unpack of bucket 0, leaf 'w'): op 1 (all_reduce of bucket 0, leaf 'w', along "
        "host and local) may still be using the elements 0:8; make it depend on op 1, directly "
        "or indirectly"
    ),
    "a race with an addition": (
        "op 7 (all_reduce of bucket 0, leaf 'w' (repair), along host and local): op 5 (add of "
        "bucket 0, leaf 'w') may still be using the elements 0:8; make it depend on op 5, "
        "directly or indirectly"
    ),
    "a conditional collective": (
        "op 3 (pack of bucket 0, leaf 'w' (repair)): it runs only 'late', as the control word "
        "decides, but does not depend on the word: ranks would take different branches and "
        "deadlock; make it depend on op 2, directly or indirectly"
    ),
    "unpacks too early": (
        "op 4 (unpack of bucket 0, leaf 'w'): it reads the control word but does not depend on "
        "it; make it depend on op 2, directly or indirectly"
    ),
    "no control word": (
        "no operation reduces the control word, which reports late gradients and failed ranks; "
        "insert one after the last pack"
    ),
    "two control words": (
        "op 3 (the control word, along host and local): op 2 already reduces it; remove one of "
        "the two"
    ),
    "a control word for some": (
        "op 2 (the control word, along host): all ranks must take part, but those along local "
        "do not; run it along host and local"
    ),
    "a control word of a bucket": (
        "op 2 (the control word, in the tail of bucket 0, leaf 'w', along host and local): a "
        "local operation must have no axes; remove them"
    ),
    "a riding word that nothing carries": (
        "op 1 (the control word, in the tail of bucket 0, leaf 'w'): no all-reduce of its "
        "bucket depends on it, so it would not be reduced; make the last all-reduce depend on "
        "it, or set bucket -1 and axes"
    ),
    "a riding word of no bucket": (
        "op 1 (the control word, in the tail of bucket 1, which is not in the plan): bucket "
        "must be an index of the 1 bucket"
    ),
    "a riding word with elements": (
        "op 1 (the control word, in the tail of bucket 0, leaf 'w'): its region must be "
        "Region(buffer='control', start=0, stop=0, shard=()) and its condition 'always', got "
        "Region(buffer='control', start=0, stop=8, shard=()) and 'always'"
    ),
    "a riding word too early": (
        "op 2 (pack of bucket 0, leaf 'v'): it is launched after op 1 (the control word, in "
        "the tail of bucket 1, leaf 'w'), which describes all packed gradients; launch it "
        "earlier"
    ),
    "a riding word waited for": (
        "op 3 (pack of bucket 0, leaf 'w' (repair)): it depends on the control word, op 1, "
        "which is not reduced yet; only the all-reduce that carries the word may depend on it, "
        "and others on that all-reduce"
    ),
    "a riding word read too early": (
        "op 6 (unpack of bucket 0, leaf 'w'): it reads the control word but does not depend on "
        "it; make it depend on op 2, directly or indirectly"
    ),
    "a carrier for some": (
        "op 2 (all_reduce of bucket 0, leaf 'w', along local): it carries the control word, "
        "which all ranks must reduce; run it along host and local"
    ),
    "a carrier of the first piece": (
        "op 2 (all_reduce of bucket 0, leaf 'w', along host and local): it carries the control "
        "word, which lies behind element 8 of the bucket's buffer, but its own elements are "
        "0:4; make the last piece carry it, not sharded"
    ),
    "a carrier of chunks": (
        "op 2 (all_reduce of bucket 0, leaf 'w', along host and local): it carries the control "
        "word, which lies behind element 8 of the bucket's buffer, but its own elements are "
        "0:8; make the last piece carry it, not sharded"
    ),
    "a carrier that averages": (
        "op 1 (the control word, in the tail of bucket 0, leaf 'w'): an averaging collective "
        "would divide it; set scaling to 'before' or 'after'; or set bucket -1 and axes"
    ),
    "a carrier of a format that does not hold it": (
        "op 1 (the control word, in the tail of bucket 0, leaf 'w'): its bucket is reduced in "
        "bfloat16, which can't hold it; float32 and float64 can; or set bucket -1 and axes"
    ),
    "a carrier for too many": (
        "op 1 (the control word, in the tail of bucket 0, leaf 'w'): float32 holds the control "
        "word of at most 65536 ranks and 16777216 leaves, got 131072 ranks and 1 leaf; or "
        "set bucket -1 and axes"
    ),
    "a control word too early": (
        "op 1 (pack of bucket 0, leaf 'w'): it is launched after op 0 (the control word, along "
        "host and local), which describes all packed gradients; launch it earlier"
    ),
    "an unknown axis": (
        "op 1 (all_reduce of bucket 0, leaf 'w', along hosts): it runs along 'hosts'; the axes "
        "are host and local"
    ),
    "an unknown axis of a shard": (
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): it is sharded along "
        "'hosts'; the axes are host and local"
    ),
    "axes twice": (
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and host): it runs along host and "
        "host; name each axis once"
    ),
    "axes in another order": (
        "op 1 (all_reduce of bucket 0, leaf 'w', along local and host): its axes must be in "
        "topology order: host and local"
    ),
    "no axes": (
        "op 1 (all_reduce of bucket 0, leaf 'w'): a collective needs axes, of host and local"
    ),
    "axes of a pack": (
        "op 0 (pack of bucket 0, leaf 'w', along host): a local operation must have no axes; "
        "remove them"
    ),
    "an unknown bucket": (
        "op 1 (all_reduce of bucket 1, which is not in the plan, along host and local): bucket "
        "must be an index of the 1 bucket"
    ),
    "no elements": (
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): its elements -1:8 must "
        "satisfy 0 <= start <= stop"
    ),
    "elements backwards": (
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): its elements 9:8 must "
        "satisfy 0 <= start <= stop"
    ),
    "a repair that always runs": (
        "op 4 (all_reduce of bucket 0, leaf 'w' (repair), along host and local): its buffer "
        "and condition are ('repair', 'always'); all_reduce requires ('bucket', 'always') or "
        "('bucket', 'late') or ('bucket', 'again') or ('repair', 'late')"
    ),
    "late shards": (
        "op 1 (all_gather of bucket 0, leaf 'w', along host): a schedule with the result "
        "'replicated' gathers shards, which are never late; remove the 'late' operation"
    ),
    "both ways of mending": (
        "op 4 (all_reduce of bucket 0, leaf 'h', along host and local): its bucket is also "
        "reduced 'again' as a whole, including late gradients; remove one of the two"
    ),
    "a sparse bucket is reduced": (
        "op 6 (all_reduce of bucket 0, leaf 'rows', along world): its bucket is sparse; only "
        "gather and unpack it"
    ),
    "a dense bucket is gathered": (
        "op 1 (gather of bucket 1, leaves 'a' to 'b', along world): its bucket is dense; pack "
        "and reduce it instead"
    ),
    "a sparse bucket in shards": (
        "op 6 (gather of bucket 0, leaf 'rows', along world): a sparse bucket is always a "
        "whole mean on each rank, but the stated result is 'sharded_mean'; plan its leaf as "
        "dense, or exclude it"
    ),
    "a sparse bucket divided": (
        "op 6 (gather of bucket 0, leaf 'rows', along world): it gathers the whole bucket on "
        "every rank, but its region is sharded along world; set shard=()"
    ),
    "a wire that does not hold": (
        "bucket 0, leaf 'w': the wire dtype bfloat16 can't hold its float32 elements; use "
        "float32 or float64"
    ),
    "an unknown wire": (
        "bucket 0, leaf 'w': the wire dtype int8 can't hold its float32 elements; use float32 "
        "or float64"
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    assert_refused(ERRORS[case](), TEXTS[case])
