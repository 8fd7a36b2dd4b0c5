"""How weighted sums are kept in range: scale before the collective, correct once after it.

A rank contributes `weight * gradient / reference` and the reduced sum is multiplied by
`reference / total_weight`. The reference must be known on every rank before the total is, so it is
agreed one step ahead, from the control word of the step before.

The reference is the number of ranks times a power of two, so that no bits are lost by it and a
result does not depend on earlier steps: a run that goes on from a checkpoint, where the unit begins
at 1 again, has the bits of one that was not interrupted. While all ranks weigh the same power of
two, 1 for instance, what is multiplied in before is `1 / world_size`, nothing is multiplied in
after, and the arithmetic is that of DistributedDataParallel.

A schedule may also leave the division by the number of ranks to the collective ("average"), or to
the correction after it ("after").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

# By how much the mean weight may fall below the agreed unit before a float16 sum loses range.
_LOWEST_RATIO = 1.0 / 64.0
# By how much it may differ from the unit, either way, before wider formats do.
_WIDEST_RATIO = 2.0**40
# Weights whose squares overflow are refused before they come near it.
_LARGEST_UNIT = 2.0**960


@dataclass(frozen=True)
class WeightScale:
    """The agreed unit of weight.

    Attributes:
        world_size: number of ranks in the group.
        unit: weight that counts as one rank's share (the caller's unit: samples, tokens, 1).
        scaling: where the division by the number of ranks happens, as in `Schedule.scaling`.

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
        """The total weight at which nothing remains to be corrected."""
        return self.world_size * self.unit

    @cached_property
    def unit_factor(self) -> float:
        """`before(1.0)`."""
        return self.before(1.0)

    def before(self, weight: float) -> float:
        """Factor on a rank's gradients before the reduction."""
        return weight / (self.reference if self.scaling == "before" else self.unit)

    def after(self, total_weight: float) -> float:
        """Factor on what the collective gave; exactly 1.0 where the total is as agreed, but for
        the division that "after" leaves to it."""
        return (self.unit if self.scaling == "after" else self.reference) / total_weight

    def keeps_range(self, total_weight: float, active: int) -> bool:
        """Whether a float16 sum scaled by this unit could neither overflow nor lose range."""
        ratio = total_weight / active / self.unit
        return _LOWEST_RATIO <= ratio <= 1.0

    def bears(self, total_weight: float, active: int) -> bool:
        """Whether sums in float32 and wider, scaled by this unit, can be corrected afterwards."""
        ratio = total_weight / active / self.unit
        return 1.0 / _WIDEST_RATIO <= ratio <= _WIDEST_RATIO

    def fitting(self, total_weight: float, active: int) -> WeightScale:
        """The scale of the smallest unit at which a float16 sum of these weights can't overflow."""
        return replace(self, unit=_power_of_two(total_weight / active))

    def next(self, total_weight: float, total_squared: float, active: int) -> WeightScale:
        """The scale to use in the following step, from this step's totals over ranks.

        Args:
            total_weight: sum of the weights.
            total_squared: sum of their squares; tells whether they were all equal.
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
        # One bit of headroom: weights vary from step to step, and a mean above the unit means
        # that float16 buckets are reduced twice.
        return replace(fitting, unit=2.0 * fitting.unit)


def _power_of_two(least: float) -> float:
    """The smallest that is not below `least`; bounded, since it is multiplied by ranks."""
    mantissa, exponent = math.frexp(min(least, _LARGEST_UNIT))
    return math.ldexp(1.0, exponent - (mantissa == 0.5))
