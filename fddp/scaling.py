"""How weighted sums are kept in range: scale before the collective, correct once after it.

A rank contributes `weight * gradient / reference` and the reduced sum is multiplied by
`reference / total_weight`. The reference must be known on every rank before the total is, so it is
agreed one step ahead, from the control word of the step before.

While all ranks weigh the same, the reference is exactly `world_size * weight`: what is multiplied
in before is then `1 / world_size`, nothing is multiplied in after, and the arithmetic is that of
DistributedDataParallel. Otherwise it is a power of two, so that no bits are lost by it and a result
does not depend on earlier steps.

A schedule may also leave the division by the number of ranks to the collective ("average"), or to
the correction after it ("after").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

# By how much the mean weight may fall below the agreed unit before a float16 sum loses range.
_LOWEST_RATIO = 1.0 / 64.0
# By how much it may differ from the unit, either way, before wider formats do.
_WIDEST_RATIO = 2.0**40


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

    @property
    def reference(self) -> float:
        """The total weight at which nothing remains to be corrected."""
        return self.world_size * self.unit

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

    def exact(self, total_weight: float) -> WeightScale:
        """The scale that needs no correction for this total."""
        return replace(self, unit=total_weight / self.world_size)

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
        mean = total_weight / active
        if total_squared * active == total_weight * total_weight:
            return replace(self, unit=mean)
        # One bit of headroom: weights vary from step to step, and a mean above the unit means
        # that float16 buckets are reduced twice.
        return replace(self, unit=2.0 ** (math.ceil(math.log2(mean)) + 1))
