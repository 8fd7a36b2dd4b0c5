"""Gradient norms that stand out from those before them: a rule on a state, both values.

The rule is the one-sided Hampel identifier on logarithms of norms: a norm is a spike if it lies
further above the median of the last ones than some multiple of their median absolute deviation
(F. R. Hampel, "The influence curve and its role in robust estimation", JASA 69, 1974; L. Davies and
U. Gather, "The identification of multiple outliers", JASA 88, 1993). Up to half of the norms that
it knows may be anything without moving either median beyond the others. Logarithms make it blind to
the unit of the norms, and norms of gradients vary by factors.
"""

from __future__ import annotations

import math
import sys
from statistics import median
from typing import NamedTuple

from fddp.core.numerics.arguments import check_counts, check_real

_NORMAL = 1.4826
"""Standard deviations of a normal distribution in one median absolute deviation."""

_LOWEST, _HIGHEST = math.log(math.ulp(0.0)), math.log(sys.float_info.max)
"""Between these are the logarithms of all floats."""


class NormVerdict(NamedTuple):
    """What was found of one norm.

    Attributes:
        is_spike: whether it is above the limit, NaN or infinite.
        limit: the norm up to which there was none, to clip by; infinite during warm-up.
        typical: the median of the norms before it; NaN while there are none.
    """

    is_spike: bool
    limit: float
    typical: float


class NormHistory(NamedTuple):
    """The last gradient norms, as natural logarithms; a state that `check_norm` returns anew.

    It is a tree of floats, to be saved with the optimizer's state. All ranks that are given the
    same norms have the same state.

    Attributes:
        logs: the last ones, the newest at the end.
    """

    logs: tuple[float, ...] = ()


def check_norm(
    history: NormHistory,
    grad_norm: float,
    *,
    deviations: float = 6.0,
    least_factor: float = 2.0,
    window: int = 128,
    warmup: int = 20,
) -> tuple[NormHistory, NormVerdict]:
    """Tells whether a gradient norm is a spike, and takes note of it.

    Give it `SyncInfo.grad_norm`, which has the same bits on all ranks, so that all decide alike
    without a word more. (Of shards it is each rank's own: add the squares up by `fddp.psum`.) What
    is NaN or infinite leaves the history as it is, and so does a norm of 0. A spike enters it as
    the limit that it passed, so that how large it is does not matter. Norms that have grown for
    good raise the limit, by `least_factor` at least in each half of a window.

    Args:
        history: of the norms before; `NormHistory()` at the beginning.
        grad_norm: the norm, in any unit that does not change from step to step.
        deviations: how many standard deviations (as the median absolute deviation suggests them) of
            the logarithms a norm may lie above their median.
        least_factor: how many times the median a norm may be in any case, above 1; for norms that
            hardly vary.
        window: how many norms are known at most.
        warmup: how many must be known for a verdict; until then no finite norm is a spike.

    Returns:
        The new history, and the verdict.

    Raises:
        TypeError: the norm, or an entry of the history, is no real number, or an option is not of
            its type.
        ValueError: a negative norm, an option that makes no sense, or a history with what is the
            logarithm of no norm, after which nothing would be a spike.

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
    grad_norm = _norm(grad_norm)
    logs = _logs(history)
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


def _norm(grad_norm: float) -> float:
    """As a float; integers beyond its range are as infinite as a norm that overflowed."""
    if isinstance(grad_norm, bool) or not hasattr(grad_norm, "__float__"):
        raise TypeError(
            f"a norm is a real number, got a {type(grad_norm).__name__}; pass SyncInfo.grad_norm"
        )
    try:
        norm = float(grad_norm)
    except OverflowError:
        norm = math.inf if grad_norm > 0 else -math.inf
    if norm < 0.0:
        raise ValueError(f"a norm is not negative, got {grad_norm}; pass SyncInfo.grad_norm")
    return norm


def _logs(history: NormHistory) -> tuple[float, ...]:
    """A history's entries, which may have been loaded as other numbers than floats."""
    logs = getattr(history, "logs", None)
    if not isinstance(logs, (tuple, list)):
        raise TypeError(
            f"history is a NormHistory, got a {type(history).__name__}; begin with NormHistory(), "
            f"and pass on what check_norm returns"
        )
    for place, log in enumerate(logs):
        if not hasattr(log, "__float__"):
            raise TypeError(
                f"history holds floats, got a {type(log).__name__} at position {place}; turn what "
                f"was loaded into floats"
            )
        if not _LOWEST <= log <= _HIGHEST:
            raise ValueError(
                f"history holds logarithms of norms, got {float(log)} at position {place}; "
                f"check_norm puts none of these there: begin anew with NormHistory()"
            )
    return tuple(map(float, logs))


def _check_options(deviations: float, least_factor: float, window: int, warmup: int) -> None:
    check_real(deviations=deviations, least_factor=least_factor)
    check_counts("norms", window=window, warmup=warmup)
    if not (math.isfinite(deviations) and deviations > 0.0):
        raise ValueError(f"deviations must be finite and above 0, got {deviations}")
    if not (math.isfinite(least_factor) and least_factor > 1.0):
        raise ValueError(f"least_factor must be finite and above 1, got {least_factor}")
    if not 1 <= warmup <= window:
        raise ValueError(
            f"warmup must be from 1 to window, got warmup={warmup} and window={window}"
        )
