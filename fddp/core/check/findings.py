"""How findings are told: the operation, its bucket, leaves and ranks, and the way out."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NoReturn

from fddp.core.schedule.schedule import Schedule
from fddp.errors import ScheduleError


def fail(
    schedule: Schedule,
    position: int,
    problem: str,
    *,
    paths: tuple[str, ...] | None = None,
    ranks: tuple[int, ...] = (),
) -> NoReturn:
    """Raises what is wrong with an operation; without `ranks`, on all of them alike."""
    bucket = schedule.ops[position].bucket
    where = "" if ranks else everywhere(schedule)
    raise ScheduleError(
        f"{schedule.describe(position)}: {problem}{where}",
        op=position,
        bucket=bucket,
        paths=paths_of(schedule, bucket) if paths is None else paths,
        ranks=ranks,
    )


def fail_bucket(schedule: Schedule, bucket: int, problem: str) -> NoReturn:
    """Raises what a bucket lacks."""
    text = f"{schedule.describe_bucket(bucket)}: {problem}{everywhere(schedule)}"
    raise ScheduleError(text, bucket=bucket, paths=paths_of(schedule, bucket))


def everywhere(schedule: Schedule) -> str:
    """That ranks do not differ, in words."""
    return f" (on all {schedule.topology.world_size} ranks)"


def paths_of(schedule: Schedule, bucket: int) -> tuple[str, ...]:
    """The paths of a bucket's leaves; none for the control word."""
    if not 0 <= bucket < len(schedule.plan.buckets):
        return ()
    return tuple(schedule.plan.paths[leaf] for leaf in schedule.plan.buckets[bucket].leaves)


def paths_in(schedule: Schedule, bucket: int, start: int, stop: int) -> tuple[str, ...]:
    """The paths of the leaves that have elements in a part of a bucket."""
    spec = schedule.plan.buckets[bucket]
    first = bisect_right(spec.offsets, start) - 1
    last = bisect_left(spec.offsets, stop)
    return tuple(schedule.plan.paths[leaf] for leaf in spec.leaves[first:last])


def wide(schedule: Schedule, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of more than one place: along the others nothing is summed or divided."""
    return tuple(axis for axis in axes if schedule.topology.size((axis,)) > 1)


def in_words(names: tuple[str, ...]) -> str:
    """Names of axes or ranks in a sentence."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
