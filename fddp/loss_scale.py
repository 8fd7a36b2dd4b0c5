"""A dynamic loss scale as a value: from the scale of one step to that of the next.

Gradients of float16 lose what is below 6e-8, and losses are multiplied so that gradients keep clear
of it (P. Micikevicius et al., "Mixed precision training", ICLR 2018). The largest factor that does
not overflow is found by trying: halved in a step that overflows, doubled after many that do not.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class LossScale(NamedTuple):
    """The factor on the loss, and what decides about the next one.

    A tree of two numbers, to be saved with the optimizer's state.

    Attributes:
        factor: what losses are multiplied by, and gradients divided by.
        streak: steps without overflow since it changed.
    """

    factor: float = 65536.0
    streak: int = 0


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
    """The loss scale of the next step; it does not communicate.

    Ranks that decide by what they agree on stay alike: pass `info.all_finite` of the step's
    `SyncInfo`, which counts every rank's gradients and the result. Where each rank gets a shard of
    the result, only its owner sees that a sum overflowed: build the `GradSync` with
    `nonfinite="skip"`, under which all ranks learn of it, and `all_finite` is False on all.

    Args:
        scale: this step's.
        all_finite: whether the synchronised gradients are finite.
        growth: factor after `every` finite steps in a row; above 1.
        backoff: factor after a step that is not; above 0 and below 1. With powers of two, scaling
            changes no bits of gradients but by underflow and overflow.
        every: finite steps before the factor grows.
        least, most: bounds of the factor.

    Returns:
        The scale of the next step.

    Raises:
        ValueError: a factor or an option that makes no sense.

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
    if not (math.isfinite(scale.factor) and scale.factor > 0.0):
        raise ValueError(f"a loss scale is finite and above 0, got {scale.factor}")
    if not (growth > 1.0 > backoff > 0.0 and every >= 1 and 0.0 < least <= most < math.inf):
        raise ValueError(
            f"growth must be above 1, backoff between 0 and 1, every at least 1 and 0 < least <= "
            f"most, got growth={growth}, backoff={backoff}, every={every}, least={least}, "
            f"most={most}"
        )
    if not all_finite:
        return LossScale(max(scale.factor * backoff, least))
    if scale.streak + 1 < every:
        return LossScale(scale.factor, scale.streak + 1)
    return LossScale(min(scale.factor * growth, most))
