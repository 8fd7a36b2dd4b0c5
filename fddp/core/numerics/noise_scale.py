"""Gradient noise scale by the two-batch-size estimate, as a pure function from step to step.

A gradient of one batch is the true gradient and noise, whose variance falls with the size of the
batch. Ranks have small batches, and their mean is the gradient of a large one: the difference of
the squared norms gives the variance, and what is left of that of the mean is the true gradient
(S. McCandlish et al., "An empirical model of large-batch training", arXiv:1812.06162, appendix A).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fddp.core.entrance import entrance


class SquaredNorms(NamedTuple):
    """Squared norms of the gradients of one step, over all leaves or a group of them.

    Estimates hold if the gradients of ranks are independent, and the variance of each falls with
    its weight: equal weights for equal batches, else the numbers of samples. A *unit* is the batch
    that a weight of 1 stands for: a rank's batch, or a sample. Their expected values are exact;
    `signal` may be below 0. Both are NaN with fewer than two gradients.

    Attributes:
        own: weight of this rank times the squared norm of its gradient; with virtual ranks, their
            sum over those of this rank. Differs between ranks.
        total: sum of `own` over ranks; NaN if unknown.
        mean: squared norm of the mean over ranks; NaN if unknown.
        active: number of gradients: of ranks, or virtual ranks, with a weight above 0.
        total_weight: sum of weights.

    Example:
        >>> norms = SquaredNorms(own=5.0, total=12.0, mean=4.0, active=2, total_weight=2.0)
        >>> norms.variance, norms.signal
        (4.0, 2.0)
    """

    own: float
    total: float
    mean: float
    active: int
    total_weight: float

    @property
    def variance(self) -> float:
        """Estimate of the trace of the covariance of the gradient of one unit."""
        if self.active < 2:
            return math.nan
        return (self.total - self.total_weight * self.mean) / (self.active - 1)

    @property
    def signal(self) -> float:
        """Estimate of the squared norm of the expected gradient."""
        return self.mean - self.variance / self.total_weight if self.active > 1 else math.nan


class NoiseScale(NamedTuple):
    """Gradient noise, smoothed over steps: a pytree of numbers, to be saved with the optimizer's
    state.

    Attributes:
        variance: weighted mean of `SquaredNorms.variance` over steps.
        signal: that of `SquaredNorms.signal`.
        share: sum of the weights of steps, from 0 before the first to 1.
    """

    variance: float = 0.0
    signal: float = 0.0
    share: float = 0.0

    @property
    def scale(self) -> float:
        """The noise scale: the number of units in a batch whose gradient has as much noise as
        signal. Up to it, a batch of twice the size takes almost half as many steps; far above it,
        hardly fewer. Infinite if there is no signal, NaN before the first step."""
        if self.share == 0.0:
            return math.nan
        return self.variance / self.signal if self.signal > 0.0 else math.inf


@entrance
def next_noise_scale(noise: NoiseScale, norms: SquaredNorms, *, decay: float = 0.99) -> NoiseScale:
    """Return the noise scale that includes one more step. Does not communicate.

    Variance and signal are smoothed separately, since the mean of their ratios is not the ratio of
    their means. All ranks stay equal: `norms` of a `SyncInfo` have the same bits on all ranks but
    for `own`, which is not used. A step without finite estimates leaves the value as it is.

    Args:
        noise: value before the step; `NoiseScale()` at first.
        norms: squared norms of the step, from `SyncInfo.squared_norms`.
        decay: factor on the weight of earlier steps, from 0 to below 1: a mean over about
            `1 / (1 - decay)` steps.

    Raises:
        ValueError: the decay is out of range.

    Example:
        >>> noise = NoiseScale()
        >>> for total in (12.0, 16.0):
        ...     norms = SquaredNorms(5.0, total, mean=4.0, active=2, total_weight=2.0)
        ...     noise = next_noise_scale(noise, norms, decay=0.5)
        ...     print(round(noise.variance, 3), round(noise.signal, 3), round(noise.scale, 3))
        4.0 2.0 2.0
        6.667 0.667 10.0
    """
    if not 0.0 <= decay < 1.0:
        raise ValueError(f"decay must be from 0 to below 1, got {decay}")
    variance, signal = norms.variance, norms.signal
    if not (math.isfinite(variance) and math.isfinite(signal)):
        return noise
    share = decay * noise.share + (1.0 - decay)
    rate = (1.0 - decay) / share
    return NoiseScale(
        noise.variance + rate * (variance - noise.variance),
        noise.signal + rate * (signal - noise.signal),
        share,
    )
