"""Verification of schedules: a proof of the stated result for any number of ranks.

All ranks run the same operations in the same order. One list of operations is therefore executed
symbolically for all ranks (`symbolic.py`), at a cost that depends only on the number of operations.
Each bucket is executed for every decision of the control word (`dataflow.py`). Only dependencies
order operations (`ordering.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby

from fddp.core.check.dataflow import Flow
from fddp.core.check.ordering import Order, check_order, check_reads_of_control
from fddp.core.check.stages import check_stages
from fddp.core.check.symbolic import Algebra, branches
from fddp.core.check.virtual import check_virtual
from fddp.core.check.well_formed import check_form
from fddp.core.entrance import entrance
from fddp.core.schedule.schedule import Schedule

# Number of operations whose order is computed at a time. Each needs one bit per operation of the
# schedule, so that all at once would need quadratic memory.
_BATCH = 4096


@entrance
def check_schedule(schedule: Schedule) -> None:
    """Prove that a schedule is correct, or raise an error.

    It is correct if, for each bucket and each decision of the control word:

    - each element is unpacked once, on the ranks required by `schedule.result`;
    - it holds the gradient of each rank exactly once, late gradients included, divided by the
      number of ranks ("replicated": it holds the shard of its owner);
    - all ranks issue the same collectives;
    - the control word reaches all ranks, separately or piggybacked on a bucket that can hold it;
    - no operation depends on one that is launched later, which would deadlock;
    - no operation uses memory of an unfinished one, see [Note: required dependencies];
    - the stages of a communication hook come one after the other, as many in each bucket;
    - with virtual ranks, each is summed once, in the order of the tree, see [Note: virtual ranks].

    The cost does not depend on the number of ranks.

    Raises:
        ScheduleError: the schedule is wrong; the text names the operation, bucket, leaf and ranks.

    Example:
        >>> import dataclasses
        >>> from fddp.core.schedule.builder import make_schedule
        >>> from fddp.core.plan.plan import LeafSpec, plan_leaves
        >>> from fddp.core.schedule.topology import Topology
        >>> plan = plan_leaves([LeafSpec("w", (8,), "bfloat16")], order=[0], caps_bytes=[1])
        >>> schedule = make_schedule(plan, Topology(host=8, local=4))
        >>> check_schedule(schedule)
        >>> ops = tuple(op._replace(axes=("local",)) if op.kind == "all_reduce" else op
        ...             for op in schedule.ops)
        >>> check_schedule(dataclasses.replace(schedule, ops=ops))
        Traceback (most recent call last):
        ...
        fddp.errors.ScheduleError: op 6 (unpack of bucket 0, leaf 'w'): rank 0 ends with bucket 0,
        leaf 'w' (elements 0:8), summed along local only: the gradients of ranks 4, 8, 12, ...
        are missing; reduce it along host too
    """
    by_bucket = check_form(schedule)
    control = check_order(schedule)
    algebra = Algebra(schedule)
    for batch in _batches(by_bucket):
        order = Order(schedule.ops, [control, *(i for b in batch for i in by_bucket[b])])
        for bucket in batch:
            positions = by_bucket[bucket]
            check_reads_of_control(schedule, control, positions, order)
            for branch in branches(schedule, bucket):
                Flow(schedule, bucket, branch, algebra, order).follow(positions)
    check_stages(schedule, by_bucket)
    check_virtual(schedule)


def _batches(by_bucket: Mapping[int, Sequence[int]]) -> Iterator[list[int]]:
    before = accumulate(map(len, by_bucket.values()), initial=0)
    number = {bucket: count // _BATCH for bucket, count in zip(by_bucket, before, strict=False)}
    for _, batch in groupby(by_bucket, key=number.__getitem__):
        yield list(batch)
