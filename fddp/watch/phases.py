"""Phases of a step: the time each takes, and the time spent waiting for other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fddp.extend import Interval, StepTimes

INPUT, FORWARD, BACKWARD = "input", "forward", "backward"
HOOK, GC, SYNC, WAIT = "hook", "gc", "sync", "wait"
OF_STEPS = (FORWARD, BACKWARD, HOOK, GC, SYNC, WAIT)
MONITOR = "monitor"
"""Time of a monitor between two steps, mostly that of its exporters."""

NOT_OWN = (WAIT, MONITOR)


class StepRecord(NamedTuple):
    """Measurements of one step on one rank.

    Attributes:
        step: number of the step.
        phases_s: seconds by phase. "input" is the time since the previous step, less any part that
            was measured under another name; "hook" is the time of a communication hook, if there is
            one, and "gc" that of the garbage collector, if it ran; "sync" is the rest after
            backward. Waiting for other ranks counts only as "wait", and work of the monitor and its
            exporters since the previous step only as "monitor". "input" and "monitor" are absent if
            the previous step was not observed.
        times: timestamps on this rank's clock; its waits and collections include those of "input".
    """

    step: int
    phases_s: Mapping[str, float]
    times: StepTimes

    @property
    def own_s(self) -> float:
        """Seconds in which the rank neither waited for others nor ran its monitor."""
        return sum(s for phase, s in self.phases_s.items() if phase not in NOT_OWN)


def overlap_s(intervals: Iterable[Interval], start_s: float, end_s: float) -> float:
    """Return the seconds of a span that lie within disjoint intervals.

    Example:
        >>> overlap_s([(1.0, 2.0), (3.0, 5.0)], 1.5, 4.0)
        1.5
    """
    overlaps = (min(end, end_s) - max(start, start_s) for start, end in intervals)
    return sum((max(0.0, each) for each in overlaps), 0.0)


def without(intervals: Iterable[Interval], holes: Sequence[Interval]) -> tuple[Interval, ...]:
    """Return intervals without the parts that lie within `holes`, which are in order.

    Example:
        >>> without([(1.0, 4.0), (5.0, 6.0)], [(2.0, 3.0), (5.0, 7.0)])
        ((1.0, 2.0), (3.0, 4.0))
    """
    left = []
    for start, end in intervals:
        for hole_start, hole_end in holes:
            if start < min(hole_start, end):
                left.append((start, min(hole_start, end)))
            start = max(start, hole_end)
        if start < end:
            left.append((start, end))
    return tuple(left)


def step_phases(times: StepTimes) -> dict[str, float]:
    """Return the seconds of a step by phase, from its call to the averaged gradients.

    Waiting for other ranks, in any phase, counts only as "wait". Otherwise work of the garbage
    collector counts only as "gc", and that of a communication hook only as "hook"; they are absent
    if it did not run, or without a hook. The phases add up to the step.

    Example:
        >>> from fddp.extend import StepTimes
        >>> times = StepTimes((), 1.0, 3.0, 6.0, begun_s=0.0, waits=((2.0, 2.5), (4.0, 5.5)))
        >>> step_phases(times)
        {'forward': 1.0, 'backward': 1.5, 'sync': 1.5, 'wait': 2.0}
    """
    collections = without(times.collections, times.waits)
    hooks = without(without(times.hooks, times.waits), collections)

    def own_s(start_s: float, end_s: float) -> float:
        apart = (times.waits, collections, hooks)
        return max(0.0, end_s - start_s - sum(overlap_s(each, start_s, end_s) for each in apart))

    phases_s = {
        FORWARD: own_s(times.begun_s, times.backward_start_s),
        BACKWARD: own_s(times.backward_start_s, times.backward_end_s),
        HOOK: overlap_s(hooks, times.begun_s, times.end_s),
        GC: overlap_s(collections, times.begun_s, times.end_s),
        SYNC: own_s(times.backward_end_s, times.end_s),
        WAIT: overlap_s(times.waits, times.begun_s, times.end_s),
    }
    if not times.hooks:
        del phases_s[HOOK]
    if not times.collections:
        del phases_s[GC]
    return phases_s
