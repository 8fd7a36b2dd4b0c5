"""Simulation of periodic schedules: the time that steps wait for averages.

A step computes for `step_s`. After it, its events run in order. A start hands the collective of a
fragment to the link, which carries one after the other. An application waits for it.
"""

from __future__ import annotations

from typing import NamedTuple

from fddp import CostModel
from fddp.extend import entrance, preset_or_model
from fddp.periodic.schedule import PeriodicSchedule

_MOST_STEPS = 1_000_000
_MOST_BITS = 64
_MOST_S = 1e9


class PeriodicTimeline(NamedTuple):
    """Simulated steps of a periodic schedule.

    Attributes:
        steps: number of steps.
        total_s: seconds of all steps, with waiting.
        waited_s: seconds that ranks waited for averages.
        sent_bytes: bytes that a rank sent.
        utilisation: share of the compute in the total time.
    """

    steps: int
    total_s: float
    waited_s: float
    sent_bytes: float
    utilisation: float


@entrance
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
        >>> import torch
        >>> from fddp.periodic import local_sgd
        >>> schedule = local_sgd({"w": torch.empty(1000, device="meta")}, 10)
        >>> link = CostModel(0.0, 1e-4)  # 0.4 s for each of the all-reduces
        >>> found = simulate_periodic(schedule, link, ranks=2, step_s=0.1, steps=100)
        >>> f"{found.total_s:.1f} {found.utilisation:.2f} {found.sent_bytes:.0f}"
        '14.0 0.71 40000'
    """
    link = preset_or_model(cost)
    wire = CostModel(0.0, 1.0, link.algorithm)  # a second for each byte that a rank sends
    if not 0.0 <= step_s <= _MOST_S:
        raise ValueError(f"step_s must be a number from 0 to {_MOST_S:.0e}, got {step_s!r}")
    if not 0.0 < bits <= _MOST_BITS:
        raise ValueError(f"bits must be above 0 and at most {_MOST_BITS}, got {bits!r}")
    if steps is None:
        steps = schedule.warmup_steps + 10 * schedule.cycle
    if not 1 <= steps <= _MOST_STEPS:
        raise ValueError(f"steps must be from 1 to {_MOST_STEPS}, got {steps}")
    now_s = free_s = sent_bytes = 0.0
    ends_s: dict[int, float] = {}
    for step in range(steps):
        now_s += step_s
        for kind, number in schedule.due(step):
            if kind == "start":
                nbytes = schedule.fragments[number].nbytes * bits / 32.0
                free_s = max(now_s, free_s) + link.time_s("all_reduce", nbytes, ranks)
                sent_bytes += wire.time_s("all_reduce", nbytes, ranks)
                ends_s[number] = free_s
            else:
                now_s = max(now_s, ends_s[number])
    compute_s = steps * step_s
    share = compute_s / now_s if now_s else 1.0
    return PeriodicTimeline(steps, now_s, now_s - compute_s, sent_bytes, share)
