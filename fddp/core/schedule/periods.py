"""Steps at which something periodic is due, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

WORLD = "world"
"""Name of the single axis of a group without named axes."""


@dataclass(frozen=True, init=False)
class Periodic:
    """Averages at step `warmup_steps` (steps count from 0), and then once in every period.

    Attributes:
        periods: pairs of an axis and the number of steps between averages along it, outermost axis
            first.
        warmup_steps: number of steps before the first average.

    Args:
        period: period of all ranks, or one for each axis of a mesh. An average along an outer axis
            includes the inner axes: its period must be a multiple of theirs.
        warmup_steps: as above.

    Raises:
        ValueError: a period is below 1, the warm-up is below 0, or a period is no multiple of an
            inner one.

    Example:
        >>> when = Periodic(4, warmup_steps=2)
        >>> [step for step in range(12) if when.due(step)]
        [2, 6, 10]
        >>> when = Periodic({"host": 4, "local": 2})
        >>> [when.due(step) for step in range(5)]
        [('host', 'local'), (), ('local',), (), ('host', 'local')]
    """

    periods: tuple[tuple[str, int], ...]
    warmup_steps: int

    def __init__(self, period: int | Mapping[str, int], *, warmup_steps: int = 0) -> None:
        periods = tuple(period.items()) if isinstance(period, Mapping) else ((WORLD, period),)
        _check_periods(periods, warmup_steps)
        object.__setattr__(self, "periods", periods)
        object.__setattr__(self, "warmup_steps", warmup_steps)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes, outermost first."""
        return tuple(name for name, _ in self.periods)

    @property
    def shortest(self) -> int:
        """Number of steps between averages along any axes."""
        return self.periods[-1][1]

    @property
    def longest(self) -> int:
        """Number of steps after which averages repeat."""
        return self.periods[0][1]

    def due(self, step: int) -> tuple[str, ...]:
        """Return the axes to average along after a step, outermost first; () for no average.

        Args:
            step: number of the last step, from 0.
        """
        since = step - self.warmup_steps
        return tuple(name for name, n in self.periods if since >= 0 and since % n == 0)


def _check_periods(periods: tuple[tuple[str, int], ...], warmup_steps: int) -> None:
    if type(warmup_steps) is not int or warmup_steps < 0:
        raise ValueError(f"warmup_steps must be an int of at least 0, got {warmup_steps!r}")
    if not periods:
        raise ValueError("there must be a period for one axis at least")
    for name, period in periods:
        if type(period) is not int or period < 1:
            raise ValueError(f"the period of {name!r} must be an int of at least 1, got {period!r}")
    for (outer, long), (inner, short) in pairwise(periods):
        if long % short:
            raise ValueError(
                f"the period of {outer!r}, {long}, is no multiple of that of {inner!r}, {short}, "
                f"along which ranks are averaged at the same time; axes go from the outermost on"
            )
