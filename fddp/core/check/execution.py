"""Proof of a schedule by symbolic execution of each of its buckets. Words all errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby

from fddp.core.check.dataflow import Flow
from fddp.core.check.ordering import Order, check_order, check_reads_of_control
from fddp.core.check.symbolic import Algebra, branches
from fddp.core.check.well_formed import check_form
from fddp.core.schedule.schedule import Schedule

# Number of operations whose order is computed at a time. Each needs one bit per operation of the
# schedule, so that all at once would need quadratic memory.
_BATCH = 4096


def check_by_execution(schedule: Schedule) -> None:
    """Prove a schedule, as `check_schedule` does, by execution of each bucket.

    Raises:
        ScheduleError: as `check_schedule`.
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
    before = accumulate(map(len, by_bucket.values()), initial=0)
    number = {bucket: count // _BATCH for bucket, count in zip(by_bucket, before, strict=False)}
    for _, batch in groupby(by_bucket, key=number.__getitem__):
        yield list(batch)
