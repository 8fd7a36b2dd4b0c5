"""Phases of a step: the time each takes, and the time spent waiting for other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fddp.extend import Interval, StepTimes

INPUT, FORWARD, BACKWARD = "input", "forward", "backward"
HOOK, SYNC, WAIT = "hook", "sync", "wait"
OF_STEPS = (FORWARD, BACKWARD, HOOK, SYNC, WAIT)
MONITOR = "monitor"
"""Time of a monitor between two steps, mostly that of its exporters."""

NOT_OWN = (WAIT, MONITOR)


class StepRecord(NamedTuple):
    """Measurements of one step on one rank.

    Attributes:
        step: number of the step.
        phases_s: seconds by phase. "input" is the time since the previous step, less any part that
            was measured under a name of its own; "hook" is the time of a communication hook, if
            there is one; "sync" is the rest after backward. Waiting for other ranks counts only as
            "wait", and work of the monitor and its exporters since the previous step only as
            "monitor". "input" and "monitor" are absent if the previous step was not observed.
        times: timestamps on this rank's clock; its waits include those of "input".
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


def step_phases(times: StepTimes) -> dict[str, float]:
    """Return the seconds of a step by phase, from its call to the averaged gradients.

    Waiting for other ranks, in any phase, counts only as "wait". Work of a communication hook
    counts only as "hook", which is absent without a hook. The phases add up to the step.

    Example:
        >>> from fddp.extend import StepTimes
        >>> times = StepTimes((), 1.0, 3.0, 6.0, begun_s=0.0, waits=((2.0, 2.5), (4.0, 5.5)))
        >>> step_phases(times)
        {'forward': 1.0, 'backward': 1.5, 'sync': 1.5, 'wait': 2.0}
    """
    hook_waits = [wait for wait in times.waits if overlap_s(times.hooks, *wait) > 0.0]

    def hook_s(start_s: float, end_s: float) -> float:
        waited_s = overlap_s(hook_waits, start_s, end_s)
        return max(0.0, overlap_s(times.hooks, start_s, end_s) - waited_s)

    def own_s(start_s: float, end_s: float) -> float:
        waited_s = overlap_s(times.waits, start_s, end_s)
        return max(0.0, end_s - start_s - waited_s - hook_s(start_s, end_s))

    phases_s = {
        FORWARD: own_s(times.begun_s, times.backward_start_s),
        BACKWARD: own_s(times.backward_start_s, times.backward_end_s),
        HOOK: hook_s(times.begun_s, times.end_s),
        SYNC: own_s(times.backward_end_s, times.end_s),
        WAIT: overlap_s(times.waits, times.begun_s, times.end_s),
    }
    if not times.hooks:
        del phases_s[HOOK]
    return phases_s
