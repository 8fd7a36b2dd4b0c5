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
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    assert_refused(ERRORS[case](), TEXTS[case])
