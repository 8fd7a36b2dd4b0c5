"""Scaling of weighted sums: a factor before the collective, and one correction after it.

A rank contributes `weight * gradient / reference`, and the reduced sum is multiplied by
`reference / total_weight`. Every rank must know the reference before the total is known, so it is
derived from the control word of the previous step.

The reference is the number of ranks times a power of two (the unit). It therefore changes no bits,
and results do not depend on earlier steps: a run that resumes from a checkpoint, with the unit
reset to 1, has the same bits as an uninterrupted one. While all ranks have the same power of two as
weight, such as 1, the factor before is `1 / world_size`, the factor after is 1, and the arithmetic
is that of DistributedDataParallel.

A schedule may also leave the division by the number of ranks to the collective ("average") or to
the correction after it ("after").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

# Range of mean weight / unit outside of which float16 sums lose precision or overflow.
_LOWEST_RATIO = 1.0 / 64.0
# Largest deviation of mean weight / unit from 1, either way, for wider formats.
_WIDEST_RATIO = 2.0**40
# Weights whose squares overflow are rejected long before this unit.
_LARGEST_UNIT = 2.0**960


@dataclass(frozen=True)
class WeightScale:
    """Unit of weight that all ranks use in a step.

    Attributes:
        world_size: number of ranks in the group.
        unit: weight that counts as one rank's share, in the caller's unit (samples, tokens, 1).
        scaling: place of the division by the number of ranks, as in `Schedule.scaling`.

    Example:
        >>> scale = WeightScale(world_size=2, unit=1.0)
        >>> scale.before(1.0), scale.after(2.0)
        (0.5, 1.0)
    """

    world_size: int
    unit: float = 1.0
    scaling: Literal["before", "after", "average"] = "before"

    @cached_property
    def reference(self) -> float:
        """Total weight that needs no correction."""
        return self.world_size * self.unit

    @cached_property
    def unit_factor(self) -> float:
        """`before(1.0)`."""
        return self.before(1.0)

    def before(self, weight: float) -> float:
        """Factor on a rank's gradients before the reduction."""
        return weight / (self.reference if self.scaling == "before" else self.unit)

    def after(self, total_weight: float) -> float:
        """Factor on the reduced result. Exactly 1.0 if the total equals the reference, unless
        `scaling` is "after"."""
        return (self.unit if self.scaling == "after" else self.reference) / total_weight

    def keeps_range(self, total_weight: float, active: int) -> bool:
        """Return True if a float16 sum scaled by this unit cannot overflow or lose range."""
        ratio = total_weight / active / self.unit
        return _LOWEST_RATIO <= ratio <= 1.0

    def bears(self, total_weight: float, active: int) -> bool:
        """Return True if sums in float32 and wider can be corrected after the reduction."""
        ratio = total_weight / active / self.unit
        return 1.0 / _WIDEST_RATIO <= ratio <= _WIDEST_RATIO

    def fitting(self, total_weight: float, active: int) -> WeightScale:
        """Return the scale of the smallest unit at which a float16 sum cannot overflow."""
        return replace(self, unit=_power_of_two(total_weight / active))

    def next(self, total_weight: float, total_squared: float, active: int) -> WeightScale:
        """Return the scale of the next step, from this step's totals over ranks.

        Args:
            total_weight: sum of the weights.
            total_squared: sum of their squares, from which equal weights are recognised.
            active: number of ranks with a weight above zero.

        Example:
            >>> WeightScale(3).next(total_weight=96.0, total_squared=3072.0, active=3).unit
            32.0
            >>> WeightScale(2).next(total_weight=90.0, total_squared=4500.0, active=2).unit
            128.0
        """
        fitting = self.fitting(total_weight, active)
        if total_squared * active == total_weight * total_weight:
            return fitting
        # One bit of headroom: weights vary from step to step, and a mean above the unit forces a
        # second reduction of float16 buckets.
        return replace(fitting, unit=2.0 * fitting.unit)


def _power_of_two(least: float) -> float:
    """Return the smallest power of two not below `least`, bounded so that `reference` is finite."""
    mantissa, exponent = math.frexp(min(least, _LARGEST_UNIT))
    return math.ldexp(1.0, exponent - (mantissa == 0.5))
