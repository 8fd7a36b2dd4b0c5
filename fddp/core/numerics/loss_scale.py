"""A dynamic loss scale as a value: from the scale of one step to that of the next.

Gradients of float16 lose what is below 6e-8, and losses are multiplied so that gradients keep clear
of it (P. Micikevicius et al., "Mixed precision training", ICLR 2018). The largest factor that does
not overflow is found by trying: halved in a step that overflows, doubled after many that do not.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fddp.core.numerics.arguments import check_counts, check_real


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
        scale: this step's; its factor is from `least` to `most`.
        all_finite: whether the synchronised gradients are finite; True or False.
        growth: factor after `every` finite steps in a row; above 1.
        backoff: factor after a step that is not; above 0 and below 1. With powers of two, scaling
            changes no bits of gradients but by underflow and overflow.
        every: finite steps before the factor grows, at least 1.
        least, most: bounds of the factor.

    Returns:
        The scale of the next step.

    Raises:
        TypeError: `all_finite` is neither True nor False, `scale` no `LossScale`, its factor no
            number, or an option is not of its type.
        ValueError: a factor or an option that makes no sense, or a factor outside of the bounds,
            which a step could only move the wrong way.

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
    if not (isinstance(scale, LossScale) and hasattr(scale.factor, "__float__")):
        raise TypeError(f"scale is a LossScale of two numbers, got {scale!r}")
    if not isinstance(all_finite, bool):
        raise TypeError(
            f"all_finite is True or False, got {all_finite!r}; pass info.all_finite of the step"
        )
    check_real(growth=growth, backoff=backoff, least=least, most=most)
    check_counts("steps", every=every, **{"the streak of a loss scale": scale.streak})
    if not (math.isfinite(scale.factor) and scale.factor > 0.0):
        raise ValueError(f"a loss scale is finite and above 0, got {scale.factor}")
    if scale.streak < 0:
        raise ValueError(f"the streak of a loss scale is not negative, got {scale.streak}")
    if not (growth > 1.0 > backoff > 0.0 and every >= 1 and 0.0 < least <= most < math.inf):
        raise ValueError(
            f"growth must be above 1, backoff between 0 and 1, every at least 1 and 0 < least <= "
            f"most, got growth={growth}, backoff={backoff}, every={every}, least={least}, "
            f"most={most}"
        )
    if not least <= scale.factor <= most:
        raise ValueError(
            f"a loss scale is from least to most, {least} to {most}, got {scale.factor}; begin "
            f"within the bounds, or pass others"
        )
    if not all_finite:
        return LossScale(max(scale.factor * backoff, least))
    if scale.streak + 1 < every:
        return LossScale(scale.factor, scale.streak + 1)
    return LossScale(min(scale.factor * growth, most))
