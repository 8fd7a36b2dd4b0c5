"""Times contestants in turn, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist


class Series(NamedTuple):
    """One contestant's times.

    Attributes:
        rounds_s: seconds a step, one value a round: the median of the round's steps, on the
            slower rank.
    """

    rounds_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median over rounds."""
        return statistics.median(self.rounds_s)


def difference(ours: Series, theirs: Series) -> Series:
    """Difference of our time and theirs in each round.

    Example:
        >>> difference(Series((2.0, 3.0)), Series((1.5, 1.0)))
        Series(rounds_s=(0.5, 2.0))
    """
    pairs = zip(ours.rounds_s, theirs.rounds_s, strict=True)
    return Series(tuple(a - b for a, b in pairs))


class Ratio(NamedTuple):
    """Median, lowest and highest ratio of two series, round by round."""

    median: float
    low: float
    high: float


def ratio(ours: Series, theirs: Series) -> Ratio:
    """Ratios of times in the same round: their median and extremes.

    Example:
        >>> ratio(Series((2.0, 3.0, 9.0)), Series((2.0, 2.0, 3.0)))
        Ratio(median=1.5, low=1.0, high=3.0)
    """
    return spread(a / b for a, b in zip(ours.rounds_s, theirs.rounds_s, strict=True))


def spread(values: Iterable[float]) -> Ratio:
    """The median of one value a round, and the extremes."""
    each = list(values)
    return Ratio(statistics.median(each), min(each), max(each))


def measure(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    steps_per_round: int,
    after_round: Callable[[], None],
) -> dict[str, Series]:
    """Times steps on all ranks; a collective call.

    In each round each contestant has a turn, in an order that shifts by one from round to round.
    A turn begins with a step that does not count, since the caches hold another's data; then its
    steps follow each other as in a training loop.

    Args:
        steps: functions to time, by name; the same names in the same order on all ranks.
        rounds: number of rounds.
        steps_per_round: number of steps in a turn that count.
        after_round: called after each round.

    Returns:
        The times by name, in the order of `steps`, the same on all ranks.
    """
    names = list(steps)
    medians = torch.zeros(len(names), rounds, dtype=torch.float64)
    for turn in range(rounds):
        for place in range(len(names)):
            which = (place + turn) % len(names)
            step = steps[names[which]]
            dist.barrier()
            step()
            taken_s = [_timed(step) for _ in range(steps_per_round)]
            medians[which, turn] = statistics.median(taken_s)
        after_round()
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return {name: Series(tuple(row)) for name, row in zip(names, medians.tolist(), strict=True)}


def _timed(step: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    step()
    return time.perf_counter() - start_s
