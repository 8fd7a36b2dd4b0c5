"""Detection of gradient norms that stand out from the preceding ones, as a pure function.

The rule is the one-sided Hampel identifier on logarithms of norms: a norm is a spike if it exceeds
the median of the last norms by more than a multiple of their median absolute deviation
(F. R. Hampel, "The influence curve and its role in robust estimation", JASA 69, 1974; L. Davies and
U. Gather, "The identification of multiple outliers", JASA 88, 1993). Up to half of the recorded
norms may be outliers without moving either median beyond the others. Logarithms make the rule
independent of the unit, and fit norms of gradients, which vary by factors.
"""

from __future__ import annotations

import math
from statistics import median
from typing import NamedTuple

from fddp.core.entrance import entrance

_NORMAL = 1.4826  # standard deviations of a normal distribution per median absolute deviation


class NormVerdict(NamedTuple):
    """Result of checking one norm.

    Attributes:
        is_spike: True if the norm is above the limit, NaN or infinite.
        limit: largest norm that is no spike, suitable for clipping; infinite during warm-up.
        typical: median of the preceding norms; NaN if there are none.
    """

    is_spike: bool
    limit: float
    typical: float


class NormHistory(NamedTuple):
    """Natural logarithms of the last gradient norms: the state of `check_norm`.

    It is a pytree of floats, to be saved with the optimizer's state. Ranks that pass equal norms
    have equal states.

    Attributes:
        logs: logarithms, newest last.
    """

    logs: tuple[float, ...] = ()


@entrance
def check_norm(
    history: NormHistory,
    grad_norm: float,
    *,
    deviations: float = 6.0,
    least_factor: float = 2.0,
    window: int = 128,
    warmup: int = 20,
) -> tuple[NormHistory, NormVerdict]:
    """Return whether a gradient norm is a spike, and the history that includes it.

    Pass `SyncInfo.grad_norm`. It has the same bits on all ranks, so all ranks decide alike without
    communication. (The norm of shards differs by rank: sum the squares with `fddp.psum` first.) A
    norm that is NaN, infinite or 0 does not enter the history. A spike enters it as the limit that
    it exceeded, so its size does not matter. If norms grow permanently, the limit follows, by a
    factor of at least `least_factor` in each half of a window.

    Args:
        history: preceding norms; `NormHistory()` at first.
        grad_norm: the norm, in any unit that does not change between steps.
        deviations: standard deviations of the logarithms, estimated from the median absolute
            deviation, that a norm may lie above their median.
        least_factor: multiple of the median up to which a norm is never a spike, above 1; for norms
            that hardly vary.
        window: maximum length of the history.
        warmup: length of the history from which on norms are judged; until then no finite norm is
            a spike.

    Returns:
        The new history, and the verdict.

    Raises:
        ValueError: the norm is negative, or an option is out of range.

    Example:
        >>> history = NormHistory()
        >>> for norm in [1.0, 1.1, 0.9, 1.0, 8.0, 1.1]:
        ...     history, verdict = check_norm(history, norm, warmup=4)
        ...     print(norm, verdict.is_spike, round(verdict.limit, 2))
        1.0 False inf
        1.1 False inf
        0.9 False inf
        1.0 False inf
        8.0 True 2.0
        1.1 False 2.33
    """
    if grad_norm < 0.0:
        raise ValueError(
            f"grad_norm must not be negative, got {grad_norm}; pass SyncInfo.grad_norm"
        )
    logs = tuple(map(float, history.logs))  # a loaded history may hold tensors
    _check_options(deviations, least_factor, window, warmup)
    limit, middle = math.inf, math.nan
    if logs:
        middle = median(logs)
    if len(logs) >= warmup:
        spread = _NORMAL * median(abs(log - middle) for log in logs)
        limit = middle + max(deviations * spread, math.log(least_factor))
    is_finite = math.isfinite(grad_norm)
    log = math.log(grad_norm) if is_finite and grad_norm > 0.0 else math.nan
    verdict = NormVerdict(not is_finite or log > limit, _exp(limit), _exp(middle))
    if math.isnan(log):
        return history, verdict
    return NormHistory((*logs, min(log, limit))[-window:]), verdict


def _exp(log: float) -> float:
    try:
        return math.exp(log)
    except OverflowError:
        return math.inf


def _check_options(deviations: float, least_factor: float, window: int, warmup: int) -> None:
    if not (math.isfinite(deviations) and deviations > 0.0):
        raise ValueError(f"deviations must be finite and above 0, got {deviations}")
    if not (math.isfinite(least_factor) and least_factor > 1.0):
        raise ValueError(f"least_factor must be finite and above 1, got {least_factor}")
    if not 1 <= warmup <= window:
        raise ValueError(
            f"warmup must be from 1 to window, got warmup={warmup} and window={window}"
        )
