"""Simulation of periodic schedules: the time that steps wait for averages.

A step computes for `step_s`. After it, its events run in order. A start hands the collective of a
fragment to the link, which carries one after the other. An application waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fddp.core.schedule.periodic import PeriodicSchedule
from fddp.core.sim.cost import MOST_S, CostModel, factors, preset_or_model

_MOST_STEPS = 1_000_000
_MOST_BITS = 64


@dataclass(frozen=True)
class PeriodicSpan:
    """A collective of one fragment.

    Attributes:
        fragment: index of the fragment.
        step: step after which it was started.
        start_s, end_s: when the link carried it, in seconds since the start of the first step.
        needed_s: when its average was to be applied.
    """

    fragment: int
    step: int
    start_s: float
    end_s: float
    needed_s: float


@dataclass(frozen=True)
class PeriodicTimeline:
    """Simulated steps of a periodic schedule.

    Attributes:
        steps: number of steps.
        step_s: seconds of compute of a step.
        total_s: seconds of all steps, with waiting.
        sent_bytes: bytes that a rank sent.
        spans: the collectives that were applied, in the order of their applications.
    """

    steps: int
    step_s: float
    total_s: float
    sent_bytes: float
    spans: tuple[PeriodicSpan, ...]

    @property
    def waited_s(self) -> float:
        """Seconds that ranks waited for averages."""
        return self.total_s - self.steps * self.step_s

    @property
    def utilisation(self) -> float:
        """Share of the compute in the total time."""
        return self.steps * self.step_s / self.total_s if self.total_s else 1.0


def simulate_periodic(
    schedule: PeriodicSchedule,
    cost: CostModel | str,
    *,
    ranks: int,
    step_s: float,
    steps: int | None = None,
    bits: float = 32.0,
) -> PeriodicTimeline:
    """Simulate steps of a periodic schedule on a cost model of the links.

    Each mean is an all-reduce over all ranks. Local work takes no time besides `step_s`.

    Args:
        schedule: the schedule.
        cost: cost model of the link, or the name of a preset.
        ranks: number of ranks.
        step_s: seconds of compute of an inner step.
        steps: number of steps, at most a million; by default ten cycles and the steps before the
            first starts.
        bits: bits on the wire of a value of float32; other dtypes are in proportion.

    Raises:
        ValueError: an argument is invalid.

    Example:
        >>> from fddp.core.plan.leaf import LeafSpec
        >>> from fddp.core.schedule.periodic import Fragment, make_periodic_schedule
        >>> from fddp.core.schedule.periods import Periodic
        >>> whole = Fragment((0,), Periodic(10, warmup_steps=9))
        >>> schedule = make_periodic_schedule([LeafSpec("w", (1000,), "float32")], [whole])
        >>> link = CostModel(0.0, 1e-4)  # 0.4 s for each of the all-reduces
        >>> found = simulate_periodic(schedule, link, ranks=2, step_s=0.1, steps=100)
        >>> f"{found.total_s:.1f} {found.utilisation:.2f} {found.sent_bytes:.0f}"
        '14.0 0.71 40000'
    """
    link = preset_or_model(cost)
    if not 0.0 <= step_s <= MOST_S:
        raise ValueError(f"step_s must be a number from 0 to {MOST_S:.0e}, got {step_s!r}")
    if not 0.0 < bits <= _MOST_BITS:
        raise ValueError(f"bits must be above 0 and at most {_MOST_BITS}, got {bits!r}")
    if steps is None:
        first = max(fragment.when.warmup_steps for fragment in schedule.fragments)
        steps = first + 10 * schedule.cycle
    if not 1 <= steps <= _MOST_STEPS:
        raise ValueError(f"steps must be from 1 to {_MOST_STEPS}, got {steps}")
    now_s = free_s = sent_bytes = 0.0
    in_flight: dict[int, tuple[int, float, float]] = {}
    spans = []
    for step in range(steps):
        now_s += step_s
        for event in schedule.due(step):
            number = event.fragment
            if event.kind == "start":
                nbytes = schedule.nbytes(number) * bits / 32.0
                start_s = max(now_s, free_s)
                free_s = start_s + link.time_s("all_reduce", nbytes, ranks)
                sent_bytes += factors("all_reduce", ranks, link.algorithm).share * nbytes
                in_flight[number] = step, start_s, free_s
            else:
                started, start_s, end_s = in_flight.pop(number)
                spans.append(PeriodicSpan(number, started, start_s, end_s, now_s))
                now_s = max(now_s, end_s)
    return PeriodicTimeline(steps, step_s, now_s, sent_bytes, tuple(spans))
