"""Phases of a step: the time each takes, and the time spent waiting for other ranks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fddp.core.timeline import Interval, StepTimes

INPUT, FORWARD, BACKWARD = "input", "forward", "backward"
HOOK, SYNC, WAIT = "hook", "sync", "wait"
OF_STEPS = (FORWARD, BACKWARD, HOOK, SYNC, WAIT)
MONITOR = "monitor"
"""Time of a monitor between two steps, mostly that of its exporters."""


class IntervalIndex:
    """Index of disjoint intervals that measures their overlap with a span of time.

    Args:
        intervals: disjoint intervals, in order.

    Example:
        >>> covered = IntervalIndex([(1.0, 2.0), (3.0, 5.0)])
        >>> covered.within(0.0, 9.0), covered.within(1.5, 4.0), covered.within(2.0, 3.0)
        (3.0, 1.5, 0.0)
    """

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self._starts = [start_s for start_s, _ in intervals]
        self._ends = [end_s for _, end_s in intervals]
        lengths = (end_s - start_s for start_s, end_s in intervals)
        self._before = [0.0, *accumulate(lengths)]  # total length of the intervals before each

    def within(self, start_s: float, end_s: float) -> float:
        """Return the seconds of a span that lie within an interval."""
        first, last = bisect_right(self._ends, start_s), bisect_left(self._starts, end_s)
        if first >= last:
            return 0.0
        before_s = max(0.0, start_s - self._starts[first])
        after_s = max(0.0, self._ends[last - 1] - end_s)
        return self._before[last] - self._before[first] - before_s - after_s


def step_phases(times: StepTimes) -> dict[str, float]:
    """Return the seconds of a step by phase, from its call to the averaged gradients.

    Waiting for other ranks, in any phase, counts only as "wait". Work of a communication hook
    counts only as "hook", which is absent without a hook. The phases add up to the step.

    Example:
        >>> from fddp.core.timeline import StepTimes
        >>> times = StepTimes((), 1.0, 3.0, 6.0, begun_s=0.0, waits=((2.0, 2.5), (4.0, 5.5)))
        >>> step_phases(times)
        {'forward': 1.0, 'backward': 1.5, 'sync': 1.5, 'wait': 2.0}
    """
    waits, hooks = IntervalIndex(times.waits), IntervalIndex(times.hooks)
    hook_waits = IntervalIndex([wait for wait in times.waits if hooks.within(*wait) > 0.0])

    def hook_s(start_s: float, end_s: float) -> float:
        return max(0.0, hooks.within(start_s, end_s) - hook_waits.within(start_s, end_s))

    def own_s(start_s: float, end_s: float) -> float:
        left_s = end_s - start_s - waits.within(start_s, end_s) - hook_s(start_s, end_s)
        return max(0.0, left_s)

    phases_s = {
        FORWARD: own_s(times.begun_s, times.backward_start_s),
        BACKWARD: own_s(times.backward_start_s, times.backward_end_s),
        HOOK: hook_s(times.begun_s, times.end_s),
        SYNC: own_s(times.backward_end_s, times.end_s),
        WAIT: waits.within(times.begun_s, times.end_s),
    }
    if not times.hooks:
        del phases_s[HOOK]
    return phases_s
