"""Proves that a schedule gives the result that it states, for any number of ranks.

All ranks run the same operations in the same order. One list of operations is therefore followed,
with symbolic values for what all ranks hold (`symbolic.py`); the cost depends on the number of
operations alone. Each bucket is followed for every decision of the control word (`dataflow.py`).
The order of operations follows from their dependencies only (`ordering.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fddp.core.check.dataflow import Flow
from fddp.core.check.ordering import Order, check_order, check_reads_of_control
from fddp.core.check.symbolic import Algebra, branches
from fddp.core.check.well_formed import check_form
from fddp.core.schedule.schedule import Schedule

# Operations whose order is worked out at a time: for each operation of the schedule a bit for each
# of these. All at once would need memory quadratic in their number.
_BATCH = 4096


def check_schedule(schedule: Schedule) -> None:
    """Proves the schedule's postcondition, or raises what stands against it.

    Proved is, for every way that the control word may decide for a bucket: each element of the
    bucket is unpacked once, where `schedule.result` wants it, and holds the contribution of each
    rank exactly once, divided by the number of ranks, what came late included ("replicated": it
    holds its owner's shard); all ranks issue the same collectives; the control word reaches all of
    them, by itself or in a tail that holds it; no operation waits for one that
    is launched after it, so that none waits for ever; and no memory is touched that another
    operation may still be working on, see [Note: required dependencies].

    It takes as long for 100,000 ranks as for 8.

    Args:
        schedule: any schedule, whatever made it.

    Raises:
        ScheduleError: it is not right; the text names the operation, bucket, leaf and ranks.

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
        leaf 'w' (elements 0:8), summed along local only: the contributions of ranks 4, 8, 12, ...
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


def _batches(by_bucket: Mapping[int, Sequence[int]]) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for bucket, positions in by_bucket.items():
        batch.append(bucket)
        size += len(positions)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
