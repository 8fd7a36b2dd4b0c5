"""Errors of `check_schedule`, with the operation, bucket, leaves and ranks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple, NoReturn

from fddp.core.schedule.schedule import Schedule
from fddp.errors import ScheduleError


class Location(NamedTuple):
    """Position of an operation in a schedule."""

    schedule: Schedule
    position: int

    def fail(
        self, problem: str, *, paths: tuple[str, ...] | None = None, ranks: tuple[int, ...] = ()
    ) -> NoReturn:
        """Raise an error about the operation. Without `ranks`, it affects all ranks alike."""
        schedule, bucket = self.schedule, self.schedule.ops[self.position].bucket
        where = "" if ranks else everywhere(schedule)
        raise ScheduleError(
            f"{schedule.describe(self.position)}: {problem}{where}",
            op=self.position,
            bucket=bucket,
            paths=paths_of(schedule, bucket) if paths is None else paths,
            ranks=ranks,
        )


def fail_bucket(schedule: Schedule, bucket: int, problem: str) -> NoReturn:
    """Raise an error about a bucket."""
    text = f"{schedule.describe_bucket(bucket)}: {problem}{everywhere(schedule)}"
    raise ScheduleError(text, bucket=bucket, paths=paths_of(schedule, bucket))


def everywhere(schedule: Schedule) -> str:
    """Return the suffix of errors that affect all ranks alike."""
    return f" (on all {schedule.topology.world_size} ranks)"


def paths_of(schedule: Schedule, bucket: int) -> tuple[str, ...]:
    """Return the paths of a bucket's leaves; () for the control word."""
    if not 0 <= bucket < len(schedule.plan.buckets):
        return ()
    return tuple(schedule.plan.paths[leaf] for leaf in schedule.plan.buckets[bucket].leaves)


def paths_in(schedule: Schedule, bucket: int, start: int, stop: int) -> tuple[str, ...]:
    """Return the paths of the leaves with elements in [start, stop) of a bucket."""
    spec = schedule.plan.buckets[bucket]
    first = bisect_right(spec.offsets, start) - 1
    last = bisect_left(spec.offsets, stop)
    return tuple(schedule.plan.paths[leaf] for leaf in spec.leaves[first:last])


def nontrivial(schedule: Schedule, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes of size above 1. Collectives along the others have no effect."""
    return tuple(axis for axis in axes if schedule.topology.size((axis,)) > 1)


def join_names(names: tuple[str, ...]) -> str:
    """Join names with commas and "and"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
