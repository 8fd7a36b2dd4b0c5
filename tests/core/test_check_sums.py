"""`check_schedule` on schedules that sum what they should not, or leave it elsewhere."""

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
    after,
    assert_refused,
    flat,
    gather,
    half,
    hierarchical,
    plan_of,
    reduced_with_its_bucket,
    shards,
    two,
    with_op,
    with_op_of,
    without,
)


def packed_over_chunks() -> Schedule:
    plan = plan_of(LeafSpec("h", (7,), "float16"))
    return with_op(make_schedule(plan, Topology(world=2), algorithm="reduce_scatter"), 3, stop=7)


def added_as_they_are() -> Schedule:
    """Late gradients are added to the bucket twice, before and after it is reduced."""
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
}

TEXTS = {
    "summed along one axis only": (
        "op 6 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8), summed along local only: the gradients of ranks 8, 16, 24, ... are missing; "
        "reduce it along host too"
    ),
    "not summed": (
        "op 4 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8), not summed over ranks: the gradients of ranks 1, 2, 3, ... are missing; reduce "
        "it along host and local too"
    ),
    "late ones summed otherwise": (
        "op 6 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8) if gradients are late, summed along host only: the late gradients of ranks 1, "
        "... are missing; reduce it along local too"
    ),
    "late ones lost": (
        "op 3 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8) if gradients are late, without the late gradients; pack them into the repair "
        "buffer, reduce it like the bucket, and add it, all with when='late'"
    ),
    "late ones not reduced": (
        "op 5 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8) if gradients are late, not summed over ranks: the late gradients of ranks 1, 2, "
        "3 are missing; reduce it along host and local too"
    ),
    "late ones added twice": (
        "op 7 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8) if gradients are late, with each late gradient counted 2 times: it holds 1/2 of "
        "the sum over ranks instead of 1/4; sum along each axis once, and add a repair once"
    ),
    "late ones added in two ways": (
        "op 7 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8) if gradients are late, holding 1/4 of the local gradient plus 1/4 of the sum "
        "along host and local instead of 1/4 of the sum along host and local"
    ),
    "late ones added and reduced twice": (
        "op 8 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8) if gradients are late, with each late gradient counted 2 times: it holds 1/2 of "
        "the sum over ranks instead of 1/4; sum along each axis once, and add a repair once"
    ),
    "an average of some": (
        "op 6 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8), summed along host only: the gradients of ranks 1, ... are missing; reduce it "
        "along local too"
    ),
    "summed twice": (
        "op 7 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8), with each gradient counted 4 times: it holds 1 of the sum over ranks instead of "
        "1/4; sum along each axis once, and add a repair once"
    ),
    "an unfit unit": (
        "op 3 (unpack of bucket 0, leaf 'h'): rank 0 ends with bucket 0, leaf 'h' (elements "
        "0:8) if weights do not fit the agreed unit, holding a sum in an unsuitable weight "
        "unit, which can't be corrected afterwards; reduce the bucket again, by a pack and "
        "collectives with when='again'"
    ),
    "kept, and not packed again": (
        "op 4 (unpack of bucket 0, leaf 'h'): rank 0 ends with bucket 0, leaf 'h' (elements "
        "0:8) if weights do not fit the agreed unit, holding a sum in an unsuitable weight "
        "unit, which can't be corrected afterwards; reduce the bucket again, by a pack and "
        "collectives with when='again'"
    ),
    "shards summed": (
        "op 3 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8), summed along host and local; gather shards, do not reduce them"
    ),
    "shards not gathered": (
        "op 2 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8), not gathered along host and local: the shards of ranks 1, 2, 3 are missing; "
        "pack shards and gather them"
    ),
    "copies of one rank's": (
        "op 4 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8), not summed over ranks, and each element copied from one rank along host and "
        "local: the gradients of ranks 1, 2, 3 are missing; reduce it along host and local "
        "before gathering chunks"
    ),
    "copies of one rank's summed": (
        "op 5 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0, leaf 'w' (elements "
        "0:8), not summed over ranks, and each element copied from one rank along host and "
        "local: the gradients of ranks 1, 2, 3 are missing; reduce it along host and local "
        "before gathering chunks"
    ),
    "a leaf of several": (
        "op 6 (unpack of bucket 1, leaves 'a' to 'b'): rank 0 ends with bucket 1, leaves 'a' "
        "to 'b' (elements 0:7), not summed over ranks: the gradients of rank 1 are missing; "
        "reduce it along world too"
    ),
    "mean where shards are wanted": (
        "op 6 (unpack of bucket 0, leaf 'w'): its elements are not sharded, but the result "
        "'sharded_mean' requires them to be sharded along host and local; change the result, "
        "or reduce-scatter or all-gather first"
    ),
    "shards where the mean is wanted": (
        "op 8 (unpack of bucket 0, leaf 'w'): its elements are sharded along local and host, "
        "but the result 'replicated_mean' requires them to be not sharded; change the result, "
        "or reduce-scatter or all-gather first"
    ),
    "divided along axes in force": (
        "op 3 (all_reduce of bucket 0, leaf 'w', along local): its elements are sharded along "
        "local: ranks along local hold different elements, which would be summed; all-gather "
        "them first, or omit the axis 'local'"
    ),
    "joined along another axis": (
        "op 4 (all_gather of bucket 0, leaf 'w', along host): it gathers chunks along host, "
        "but its elements are sharded along local; gather along the last of these axes first"
    ),
    "joined in another order": (
        "op 1 (all_gather of bucket 0, leaf 'w', along host and local): it gathers chunks "
        "along host and local, but its elements are sharded along local and host; gather along "
        "the last of these axes first"
    ),
    "chunks of two kinds": (
        "op 2 (reduce_scatter of bucket 0, leaf 'w', along local): parts of its elements 0:8 "
        "are results of different reductions, and a chunk may hold elements of several; "
        "reduce-scatter each part separately"
    ),
    "packed over part of chunks": (
        "op 3 (pack of bucket 0, leaf 'h'): it expects the elements 0:7 not sharded, but op 1 "
        "(reduce_scatter of bucket 0, leaf 'h', along world) left 0:8 sharded along world; use "
        "the same elements and shard axes"
    ),
    "a piece that was never packed": (
        "op 4 (unpack of bucket 0, leaf 'w'): the elements 0:4 of the bucket buffer are not "
        "packed before it; pack them first"
    ),
    "not divided as stated": (
        "op 3 (all_reduce of bucket 0, leaf 'w', along host): it expects the elements 0:8 not "
        "sharded, but op 1 (reduce_scatter of bucket 0, leaf 'w', along local) left 0:8 "
        "sharded along local; use the same elements and shard axes"
    ),
    "cut elsewhere": (
        "op 3 (all_reduce of bucket 0, leaf 'w', along host): it expects the elements 0:4 "
        "sharded along local, but op 1 (reduce_scatter of bucket 0, leaf 'w', along local) "
        "left 0:8 sharded along local; use the same elements and shard axes"
    ),
    "unequal chunks": (
        "op 1 (reduce_scatter of bucket 0, leaf 'w', along local): its 7 elements can't be cut "
        "into 2 equal chunks along local; pad the bucket to a multiple of 2"
    ),
    "nothing packed": (
        "op 1 (all_reduce of bucket 0, leaf 'w', along host and local): the elements 8:12 of "
        "the bucket buffer are not packed before it; pack them first"
    ),
    "never unpacked": "bucket 0, leaf 'w': no operation unpacks it; append one",
    "partly unpacked": (
        "bucket 0, leaf 'w': no operation unpacks its elements from 4, leaf 'w'; unpack every "
        "element"
    ),
    "unpacked twice": (
        "op 7 (unpack of bucket 0, leaf 'w'): op 6 has already unpacked the whole bucket; "
        "remove one of the two"
    ),
    "unpacked shards twice": (
        "op 9 (unpack of bucket 0, leaf 'w'): op 8 has already unpacked the elements 0:8, and "
        "results are immutable; place it before op 8"
    ),
    "packed in parts": (
        "op 0 (pack of bucket 0, leaf 'w'): its elements are 0:4 of 8; a bucket that is not "
        "sharded must be packed as a whole"
    ),
    "packed twice": (
        "op 1 (pack of bucket 0, leaf 'w'): op 0 has already packed the whole bucket; remove "
        "one of the two"
    ),
    "shards packed twice": (
        "op 1 (pack of bucket 0, leaf 'w'): op 0 already uses the elements 0:8; pack the "
        "shards of each element once"
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    assert_refused(ERRORS[case](), TEXTS[case])
