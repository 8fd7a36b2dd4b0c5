"""Errors of `check_schedule`: the fault, the operation, the leaves, and the way out.

A case for each text. That all wrong schedules are refused is shown by mutants and random chains
(`test_check_mutants.py`, `test_check.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fddp.core.plan.plan import LeafSpec
from fddp.core.schedule.builder import make_schedule
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
    hierarchical,
    plan_of,
    riding,
    shards,
    two,
    with_op,
    with_op_of,
    without,
)


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


def riding_always(schedule: Schedule) -> Schedule:
    """The word where it can't ride, because there are too many ranks for it."""
    small = make_schedule(schedule.plan, SMALL)
    return replace(small, topology=schedule.topology)


def added_as_they_are() -> Schedule:
    """Late gradients are added to the bucket twice, before and after it is reduced."""
    *chain, pack, reduce, add, unpack = flat().ops
    early, reduce = add._replace(deps=(3,)), reduce._replace(deps=(4,))
    ops = (*chain, pack, early, reduce, add._replace(deps=(5,)), unpack._replace(deps=(6,)))
    return replace(flat(), ops=ops)


# What is done to a right schedule, and the error of the result.
ERRORS: dict[str, tuple[Callable[[], Schedule], str]] = {
    # Order
    "a cycle": (
        lambda: with_op(flat(), 1, deps=(0, 4)),
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): it depends on op 4 "
        "(all_reduce of bucket 0, leaf 'w' (repair), along host and local), which is launched "
        "later: 1 -> 4 -> 3 -> 1 is a cycle, a deadlock on all ranks; launch op 4 first",
    ),
    "waits for itself": (
        lambda: with_op(flat(), 1, deps=(1,)),
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): it depends on itself; "
        "remove that dependency",
    ),
    "waits for nothing there is": (
        lambda: with_op(flat(), 1, deps=(9,)),
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): it depends on op 9, "
        "but there are ops 0 to 6; remove that dependency",
    ),
    "waits for a later one that does not wait for it": (
        lambda: with_op(two(), 1, deps=(0, 2)),
        "op 1 (all_reduce of bucket 1, leaves 'a' to 'b', along world): it depends on op 2 "
        "(the control word, along world), which is launched later: 1 -> 2 -> 1 is a cycle, a "
        "deadlock on all ranks; launch op 2 first",
    ),
    "a race": (
        lambda: with_op(flat(), 1, deps=()),
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): op 0 (pack of bucket "
        "0, leaf 'w') may still be using the elements 0:8; make it depend on op 0, directly or "
        "indirectly",
    ),
    "a conditional collective": (
        lambda: with_op(with_op(flat(), 3, deps=(1,)), 4, deps=(3,)),
        "op 3 (pack of bucket 0, leaf 'w' (repair)): it runs only 'late', as the control word "
        "decides, but does not depend on the word: ranks would take different branches and "
        "deadlock; make it depend on op 2, directly or indirectly",
    ),
    # The control word
    "no control word": (
        lambda: without(flat(), 2),
        "no operation reduces the control word, which reports late gradients and failed ranks; "
        "insert one after the last pack",
    ),
    "two control words": (
        lambda: after(flat(), 2),
        "op 3 (the control word, along host and local): op 2 already reduces it; remove one of "
        "the two",
    ),
    "a control word for some": (
        lambda: with_op(flat(), 2, axes=("host",)),
        "op 2 (the control word, along host): all ranks must take part, but those along local "
        "do not; run it along host and local",
    ),
    # The control word in a tail
    "a riding word that nothing carries": (
        lambda: with_op(riding(), 2, deps=(0,)),
        "op 1 (the control word, in the tail of bucket 0, leaf 'w'): no all-reduce of its "
        "bucket depends on it, so it would not be reduced; make the last all-reduce depend on "
        "it, or set bucket -1 and axes",
    ),
    "a riding word of no bucket": (
        lambda: with_op(riding(), 1, bucket=1),
        "op 1 (the control word, in the tail of bucket 1, which is not in the plan): bucket "
        "must be an index of the 1 bucket",
    ),
    "a riding word with elements": (
        lambda: with_op(riding(), 1, stop=8),
        "op 1 (the control word, in the tail of bucket 0, leaf 'w'): its region must be "
        "Region(buffer='control', start=0, stop=0, shard=()) and its condition 'always', got "
        "Region(buffer='control', start=0, stop=8, shard=()) and 'always'",
    ),
    "a riding word too early": (
        packed_between,
        "op 2 (pack of bucket 0, leaf 'v'): it is launched after op 1 (the control word, in "
        "the tail of bucket 1, leaf 'w'), which describes all packed gradients; launch it "
        "earlier",
    ),
    "a riding word waited for": (
        lambda: with_op(riding(), 3, deps=(1, 2)),
        "op 3 (pack of bucket 0, leaf 'w' (repair)): it depends on the control word, op 1, "
        "which is not reduced yet; only the all-reduce that carries the word may depend on it, "
        "and others on that all-reduce",
    ),
    "a riding word read too early": (
        lambda: with_op(riding(), 6, deps=(0,)),
        "op 6 (unpack of bucket 0, leaf 'w'): it reads the control word but does not depend on "
        "it; make it depend on op 2, directly or indirectly",
    ),
    "a carrier for some": (
        lambda: with_op(riding(GRID), 2, axes=("local",)),
        "op 2 (all_reduce of bucket 0, leaf 'w', along local): it carries the control word, "
        "which all ranks must reduce; run it along host and local",
    ),
    "a carrier of the first piece": (
        lambda: carried_by_the_first_piece(),
        "op 2 (all_reduce of bucket 0, leaf 'w', along host and local): it carries the control "
        "word, which lies behind element 8 of the bucket's buffer, but its own elements are "
        "0:4; make the last piece carry it, not sharded",
    ),
    "a carrier that averages": (
        lambda: replace(riding(), scaling="average"),
        "op 1 (the control word, in the tail of bucket 0, leaf 'w'): an averaging collective "
        "would divide it; set scaling to 'before' or 'after'; or set bucket -1 and axes",
    ),
    "a carrier of a format that does not hold it": (
        lambda: replace(
            make_schedule(plan_of(LeafSpec("w", (8,), "bfloat16")), SMALL, reduce_dtype="float32"),
            wire_dtypes=("bfloat16",),
        ),
        "op 1 (the control word, in the tail of bucket 0, leaf 'w'): its bucket is reduced in "
        "bfloat16, which can't hold it; float32 and float64 can; or set bucket -1 and axes",
    ),
    "a carrier for too many": (
        lambda: riding_always(flat(Topology(host=2**10, local=2**7))),
        "op 1 (the control word, in the tail of bucket 0, leaf 'w'): float32 holds the control "
        "word of at most 65536 ranks and 16777216 leaves, got 131072 ranks and 1 leaf; or "
        "set bucket -1 and axes",
    ),
    # Form
    "an unknown axis": (
        lambda: with_op(flat(), 1, axes=("hosts",)),
        "op 1 (all_reduce of bucket 0, leaf 'w', along hosts): it runs along 'hosts'; the axes "
        "are host and local",
    ),
    "an unknown axis of a shard": (
        lambda: with_op(flat(), 1, shard=("hosts",)),
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): it is sharded along "
        "'hosts'; the axes are host and local",
    ),
    "axes twice": (
        lambda: with_op(flat(), 1, axes=("host", "host")),
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and host): it runs along host and "
        "host; name each axis once",
    ),
    "axes in another order": (
        lambda: with_op(flat(), 1, axes=("local", "host")),
        "op 1 (all_reduce of bucket 0, leaf 'w', along local and host): its axes must be in "
        "topology order: host and local",
    ),
    "no axes": (
        lambda: with_op(flat(), 1, axes=()),
        "op 1 (all_reduce of bucket 0, leaf 'w'): a collective needs axes, of host and local",
    ),
    "axes of a pack": (
        lambda: with_op(flat(), 0, axes=("host",)),
        "op 0 (pack of bucket 0, leaf 'w', along host): a local operation must have no axes; "
        "remove them",
    ),
    "an unknown bucket": (
        lambda: with_op(flat(), 1, bucket=1),
        "op 1 (all_reduce of bucket 1, which is not in the plan, along host and local): bucket "
        "must be an index of the 1 bucket",
    ),
    "no elements": (
        lambda: with_op(flat(), 1, start=-1),
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): its elements -1:8 must "
        "satisfy 0 <= start <= stop",
    ),
    "a repair that always runs": (
        lambda: with_op(flat(), 4, when="always"),
        "op 4 (all_reduce of bucket 0, leaf 'w' (repair), along host and local): its buffer "
        "and condition are ('repair', 'always'); all_reduce requires ('bucket', 'always') or "
        "('bucket', 'late') or ('bucket', 'again') or ('repair', 'late')",
    ),
    "late shards": (
        lambda: with_op(gather(), 1, when="late"),
        "op 1 (all_gather of bucket 0, leaf 'w', along host): a schedule with the result "
        "'replicated' gathers shards, which are never late; remove the 'late' operation",
    ),
    "both ways of mending": (
        lambda: with_op(half(), 4, when="late"),
        "op 4 (all_reduce of bucket 0, leaf 'h', along host and local): its bucket is also "
        "reduced 'again' as a whole, including late gradients; remove one of the two",
    ),
    "a sparse bucket is reduced": (
        lambda: with_op(two(), 6, kind="all_reduce"),
        "op 6 (all_reduce of bucket 0, leaf 'rows', along world): its bucket is sparse; only "
        "gather and unpack it",
    ),
    "a dense bucket is gathered": (
        lambda: with_op(two(), 1, kind="gather"),
        "op 1 (gather of bucket 1, leaves 'a' to 'b', along world): its bucket is dense; pack "
        "and reduce it instead",
    ),
    "a sparse bucket in shards": (
        lambda: replace(two(), result="sharded_mean"),
        "op 6 (gather of bucket 0, leaf 'rows', along world): a sparse bucket is always a "
        "whole mean on each rank, but the stated result is 'sharded_mean'; plan its leaf as "
        "dense, or exclude it",
    ),
    "a sparse bucket divided": (
        lambda: with_op(two(), 6, shard=("world",)),
        "op 6 (gather of bucket 0, leaf 'rows', along world): it gathers the whole bucket on "
        "every rank, but its region is sharded along world; set shard=()",
    ),
    "a wire that does not hold": (
        lambda: replace(flat(), wire_dtypes=("bfloat16",)),
        "bucket 0, leaf 'w': the wire dtype bfloat16 can't hold its float32 elements; use "
        "float32 or float64",
    ),
    # Sums
    "summed along one axis only": (
        lambda: with_op_of(flat(GRID), "all_reduce", axes=("local",)),
        "op 6 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8), summed along local only: the gradients of ranks 8, 16, 24, ... are missing; "
        "reduce it along host too",
    ),
    "late ones lost": (
        lambda: without(flat(), 3, 4, 5),
        "op 3 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8) if gradients are late, without the late gradients; pack them into the repair "
        "buffer, reduce it like the bucket, and add it, all with when='late'",
    ),
    "late ones not reduced": (
        lambda: without(flat(), 4),
        "op 5 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8) if gradients are late, not summed over ranks: the late gradients of ranks 1, 2, "
        "3 are missing; reduce it along host and local too",
    ),
    "late ones added twice": (
        lambda: after(flat(), 5),
        "op 7 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8) if gradients are late, with each late gradient counted 2 times: it holds 1/2 of "
        "the sum over ranks instead of 1/4; sum along each axis once, and add a repair once",
    ),
    "late ones added in two ways": (
        lambda: added_as_they_are(),
        "op 7 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8) if gradients are late, holding 1/4 of the local gradient plus 1/4 of the sum "
        "along host and local instead of 1/4 of the sum along host and local",
    ),
    "summed twice": (
        lambda: after(flat(), 1),
        "op 7 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8), with each gradient counted 4 times: it holds 1 of the sum over ranks instead of "
        "1/4; sum along each axis once, and add a repair once",
    ),
    "shards summed": (
        lambda: replace(without(flat(), 3, 4, 5), result="replicated"),
        "op 3 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8), summed along host and local; gather shards, do not reduce them",
    ),
    "shards not gathered": (
        lambda: replace(without(flat(), 1, 3, 4, 5), result="replicated"),
        "op 2 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8), not gathered along host and local: the shards of ranks 1, 2, 3 are missing; "
        "pack shards and gather them",
    ),
    "copies of one rank's": (
        lambda: replace(gather(), result="replicated_mean"),
        "op 4 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8), not summed over ranks, and each element copied from one rank along host and "
        "local: the gradients of ranks 1, 2, 3 are missing; reduce it along host and local "
        "before gathering chunks",
    ),
    # Where
    "mean where shards are wanted": (
        lambda: replace(flat(), result="sharded_mean"),
        "op 6 (unpack of bucket 0, leaf 'w'): its elements are not sharded, but the result "
        "'sharded_mean' requires them to be sharded along host and local; change the result, "
        "or reduce-scatter or all-gather first",
    ),
    "divided along axes in force": (
        lambda: with_op(hierarchical(), 3, axes=("local",)),
        "op 3 (all_reduce of bucket 0, leaf 'w', along local): its elements are sharded along "
        "local: ranks along local hold different elements, which would be summed; all-gather "
        "them first, or omit the axis 'local'",
    ),
    "joined along another axis": (
        lambda: with_op(hierarchical(), 4, axes=("host",)),
        "op 4 (all_gather of bucket 0, leaf 'w', along host): it gathers chunks along host, "
        "but its elements are sharded along local; gather along the last of these axes first",
    ),
    "chunks of two kinds": (
        lambda: with_op(after(hierarchical(), 0, kind="all_reduce", axes=("local",)), 1, stop=4),
        "op 2 (reduce_scatter of bucket 0, leaf 'w', along local): parts of its elements 0:8 "
        "are results of different reductions, and a chunk may hold elements of several; "
        "reduce-scatter each part separately",
    ),
    "packed over part of chunks": (
        lambda: with_op(
            make_schedule(
                plan_of(LeafSpec("h", (7,), "float16")),
                Topology(world=2),
                algorithm="reduce_scatter",
            ),
            3,
            stop=7,
        ),
        "op 3 (pack of bucket 0, leaf 'h'): it expects the elements 0:7 not sharded, but op 1 "
        "(reduce_scatter of bucket 0, leaf 'h', along world) left 0:8 sharded along world; use "
        "the same elements and shard axes",
    ),
    "not divided as stated": (
        lambda: with_op(hierarchical(), 3, shard=()),
        "op 3 (all_reduce of bucket 0, leaf 'w', along host): it expects the elements 0:8 not "
        "sharded, but op 1 (reduce_scatter of bucket 0, leaf 'w', along local) left 0:8 "
        "sharded along local; use the same elements and shard axes",
    ),
    "unequal chunks": (
        lambda: with_op(hierarchical(), 1, stop=7),
        "op 1 (reduce_scatter of bucket 0, leaf 'w', along local): its 7 elements can't be cut "
        "into 2 equal chunks along local; pad the bucket to a multiple of 2",
    ),
    "nothing packed": (
        lambda: with_op(flat(), 1, stop=12),
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): the elements 8:12 of "
        "the bucket buffer are not packed before it; pack them first",
    ),
    "never unpacked": (
        lambda: without(flat(), 6),
        "bucket 0, leaf 'w': no operation unpacks it; append one",
    ),
    "partly unpacked": (
        lambda: without(flat(algorithm="reduce_scatter", split_mb=2**-16), 14),
        "bucket 0, leaf 'w': no operation unpacks its elements from 4, leaf 'w'; unpack every "
        "element",
    ),
    "unpacked twice": (
        lambda: after(flat(), 6),
        "op 7 (unpack of bucket 0, leaf 'w'): op 6 has already unpacked the whole bucket; "
        "remove one of the two",
    ),
    "unpacked shards twice": (
        lambda: after(shards(), 8),
        "op 9 (unpack of bucket 0, leaf 'w'): op 8 has already unpacked the elements 0:8, and "
        "results are immutable; place it before op 8",
    ),
    "packed in parts": (
        lambda: with_op(flat(), 0, stop=4),
        "op 0 (pack of bucket 0, leaf 'w'): its elements are 0:4 of 8; a bucket that is not "
        "sharded must be packed as a whole",
    ),
    "packed twice": (
        lambda: after(flat(), 0),
        "op 1 (pack of bucket 0, leaf 'w'): op 0 has already packed the whole bucket; remove "
        "one of the two",
    ),
    "shards packed twice": (
        lambda: after(gather(), 0),
        "op 1 (pack of bucket 0, leaf 'w'): op 0 already uses the elements 0:8; pack the "
        "shards of each element once",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    make, text = ERRORS[case]
    assert_refused(make(), text)
