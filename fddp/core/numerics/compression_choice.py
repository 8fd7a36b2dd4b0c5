"""Choice of a compression by its error, as pure functions of values that all ranks share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fddp.core.numerics.noise_scale import NoiseScale, SquaredNorms, next_noise_scale


class CompressionErrors(NamedTuple):
    """Noise of a gradient and errors of compressions of it, smoothed over the same steps.

    Attributes:
        noise: noise of the gradients of ranks.
        errors: for each compression, the squared norm of the error of the mean over ranks.
    """

    noise: NoiseScale
    errors: tuple[float, ...]


def next_errors(
    before: CompressionErrors, norms: SquaredNorms, errors: Sequence[float], *, decay: float
) -> CompressionErrors:
    """Return the errors that include one more step, smoothed as by `next_noise_scale`.

    A step without finite estimates of the noise leaves the value as it is. An error that is not
    finite replaces what is known of its compression, and is replaced by the next one.

    Example:
        >>> before = CompressionErrors(NoiseScale(), (0.0,))
        >>> norms = SquaredNorms(5.0, 12.0, mean=4.0, active=2, total_weight=2.0)
        >>> next_errors(before, norms, [0.5], decay=0.5).errors
        (0.5,)
    """
    if not (math.isfinite(norms.variance) and math.isfinite(norms.signal)):
        return before
    noise = next_noise_scale(before.noise, norms, decay=decay)
    rate = (1.0 - decay) / noise.share
    smoothed = [
        old + rate * (new - old) if math.isfinite(old) and math.isfinite(new) else new
        for old, new in zip(before.errors, errors, strict=True)
    ]
    return CompressionErrors(noise, tuple(smoothed))


def cheapest(costs: Sequence[float], errors: Sequence[float], bound: float) -> int:
    """Return the index of the cheapest compression whose error is at most a bound.

    Of equal costs, the smaller error is taken; of equal errors, the first. Without an error within
    the bound, as when the bound is NaN, the compression of the smallest error is taken.

    Args:
        costs: bytes of each compression.
        errors: error of each compression, in the unit of `bound`; NaN if unknown.
        bound: largest error to accept.

    Example:
        >>> costs, errors = [100.0, 25.0, 2.0], [0.0, 0.1, 3.0]
        >>> [cheapest(costs, errors, bound) for bound in (0.0, 1.0, 10.0)]
        [0, 1, 2]
    """
    known = [i for i, error in enumerate(errors) if not math.isnan(error)]
    within = [i for i in known if errors[i] <= bound]
    if within:
        return min(within, key=lambda i: (costs[i], errors[i]))
    return min(known, key=lambda i: errors[i], default=0)


def is_measured(step: int, every: int) -> bool:
    """Return True for the steps in which errors are measured: 0, powers of two below `every`, and
    each multiple of it. All ranks know them in advance.

    Example:
        >>> [step for step in range(100) if is_measured(step, 30)]
        [0, 1, 2, 4, 8, 16, 30, 60, 90]
    """
    return step % every == 0 or (step < every and step & (step - 1) == 0)
