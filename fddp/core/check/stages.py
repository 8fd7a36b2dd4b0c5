"""Stages of communication hooks, see [Note: stages in one order].

A stage of a hook changes what the hook keeps, not the bucket; the reduction that follows has the
effect of all. So stages are checked by their place: each is followed by the next one or by the
reduction, on the same elements along the same axes, and each bucket has as many. As they use the
same elements, each depends on the one before, see [Note: required dependencies].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fddp.core.check.findings import Location
from fddp.core.schedule.op import Op
from fddp.core.schedule.schedule import Schedule
from fddp.core.text import counted


def check_stages(schedule: Schedule, by_bucket: Mapping[int, Sequence[int]]) -> None:
    """Check the stages of all buckets.

    Args:
        schedule: the schedule.
        by_bucket: positions of the operations of each bucket.

    Raises:
        ScheduleError: a stage is missing, doubled, misplaced or on another bucket.
    """
    counts: dict[int, list[int]] = {}
    for bucket, positions in by_bucket.items():
        own = [i for i in positions if schedule.ops[i].when == "always"]
        stages = [i for i in own if schedule.ops[i].kind == "stage"]
        for stage in stages:
            _check_successor(schedule, own, stage)
        if not schedule.plan.buckets[bucket].sparse:
            counts[bucket] = stages
    most = max(counts, key=lambda bucket: len(counts[bucket]), default=-1)
    for bucket, stages in counts.items():
        if len(stages) != len(counts[most]):
            Location(schedule, counts[most][-1]).fail(
                f"it is one of {counted(len(counts[most]), 'stage')} of its bucket, and "
                f"{schedule.describe_bucket(bucket)}, has {len(stages)}; a hook has as many in "
                f"each bucket"
            )


def _check_successor(schedule: Schedule, own: Sequence[int], stage: int) -> None:
    """Check that the next operation on a stage's elements is the next stage, or the reduction."""
    ops, at = schedule.ops, Location(schedule, stage)
    region = ops[stage].region
    after = (
        i for i in own if i > stage and _overlap(ops[i].region[1:3], (region.start, region.stop))
    )
    following = next(after, -1)
    if following < 0 or ops[following].kind not in ("stage", "all_reduce", "reduce_scatter"):
        at.fail("no reduction of its elements follows it, so its result would be lost; append one")
    if _work(ops[following]) != _work(ops[stage]):
        at.fail(
            f"{schedule.describe(following)} continues it on other elements or along other axes; "
            f"use the same in all stages and the reduction of a bucket"
        )


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one == other or (one[0] < other[1] and other[0] < one[1])


def _work(op: Op) -> tuple[object, ...]:
    return op.axes, op.region
