"""Dynamic loss scaling as a pure function from the scale of one step to that of the next.

float16 gradients underflow below 6e-8, so the loss is multiplied by a factor (P. Micikevicius et
al., "Mixed precision training", ICLR 2018). The largest factor that does not overflow is found by
trial: it is halved after a step that overflows and doubled after many steps that do not.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fddp.core.entrance import entrance


class LossScale(NamedTuple):
    """State of loss scaling: a pytree of two numbers, to be saved with the optimizer's state.

    Attributes:
        factor: factor on the loss; gradients are divided by it.
        streak: finite steps since the factor changed.
    """

    factor: float = 65536.0
    streak: int = 0


@entrance
def next_loss_scale(
    scale: LossScale,
    all_finite: bool,
    *,
    growth: float = 2.0,
    backoff: float = 0.5,
    every: int = 2000,
    least: float = 2.0**-14,
    most: float = 2.0**24,
) -> LossScale:
    """Return the loss scale of the next step. Does not communicate.

    All ranks stay equal if they pass equal values: pass `info.all_finite` of the step's `SyncInfo`,
    which covers the gradients of every rank and the result. If each rank receives a shard of the
    result, only the shard's owner sees an overflow of the sum. In that case build the `GradSync`
    with `nonfinite="skip"`, which makes `all_finite` False on all ranks.

    Args:
        scale: scale of this step; its factor lies between `least` and `most`.
        all_finite: True if the synchronised gradients are finite.
        growth: factor after `every` finite steps in a row; above 1.
        backoff: factor after a non-finite step; above 0 and below 1. If both are powers of two,
            scaling changes bits of gradients only by underflow and overflow.
        every: finite steps before the factor grows, at least 1.
        least, most: bounds of the factor.

    Raises:
        TypeError: `all_finite` is not a bool.
        ValueError: an option is out of range, or the factor is outside of the bounds.

    Example:
        >>> scale = LossScale(factor=8.0)
        >>> for all_finite in (True, True, False, True):
        ...     scale = next_loss_scale(scale, all_finite, every=2)
        ...     print(scale)
        LossScale(factor=8.0, streak=1)
        LossScale(factor=16.0, streak=0)
        LossScale(factor=8.0, streak=0)
        LossScale(factor=8.0, streak=1)
    """
    if not isinstance(all_finite, bool):
        raise TypeError(f"all_finite must be a bool, got {all_finite!r}; pass info.all_finite")
    if not (math.isfinite(scale.factor) and scale.factor > 0.0):
        raise ValueError(f"the loss scale must be finite and above 0, got {scale.factor}")
    if not (growth > 1.0 > backoff > 0.0 and every >= 1 and 0.0 < least <= most < math.inf):
        raise ValueError(
            f"growth must be above 1, backoff between 0 and 1, every at least 1 and 0 < least <= "
            f"most, got growth={growth}, backoff={backoff}, every={every}, least={least}, "
            f"most={most}"
        )
    if not least <= scale.factor <= most:
        raise ValueError(
            f"the loss scale must lie between least={least} and most={most}, got {scale.factor}; "
            f"start within the bounds, or pass others"
        )
    if not all_finite:
        return LossScale(max(scale.factor * backoff, least))
    if scale.streak + 1 < every:
        return LossScale(scale.factor, scale.streak + 1)
    return LossScale(min(scale.factor * growth, most))
