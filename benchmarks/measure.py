"""Times contestants in turn, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

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

    def text(self, digits: int = 2) -> str:
        """Return the median with the extremes in parentheses.

        Example:
            >>> Ratio(1.5, 1.0, 3.0).text()
            '1.50 (1.00-3.00)'
            >>> Ratio(1.5, 1.0, math.inf).text()  # in some round to a time of nothing
            '1.50 (1.00 and more)'
            >>> Ratio(math.inf, 1.0, math.inf).text()
            'none'
        """
        if math.isinf(self.median):
            return "none"
        highest = " and more" if math.isinf(self.high) else f"-{self.high:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}{highest})"


def ratio(ours: Series, theirs: Series) -> Ratio:
    """Ratios of times in the same round: their median and extremes.

    Example:
        >>> ratio(Series((2.0, 3.0, 9.0)), Series((2.0, 2.0, 3.0)))
        Ratio(median=1.5, low=1.0, high=3.0)
    """
    return spread(a / b for a, b in zip(ours.rounds_s, theirs.rounds_s, strict=True))


def added_ratio(ours: Series, theirs: Series) -> Ratio:
    """Ratios of times beyond a local step; infinite in a round in which theirs is noise.

    Example:
        >>> added_ratio(Series((1.0, 1.0, 1.0)), Series((2.0, 4.0, -0.5)))
        Ratio(median=0.5, low=0.25, high=inf)
    """
    pairs = zip(ours.rounds_s, theirs.rounds_s, strict=True)
    return spread(a / b if b > 0.0 else math.inf for a, b in pairs)


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

    def median_s(name: str) -> float:
        steps[name]()
        return statistics.median(timed(steps[name]) for _ in range(steps_per_round))

    return medians_in_turns(list(steps), rounds, median_s, after_round)


def medians_in_turns(
    names: Sequence[str],
    rounds: int,
    median_s: Callable[[str], float],
    after_round: Callable[[], None],
) -> dict[str, Series]:
    """Times contestants on all ranks, as `measure`, by a function that measures one turn.

    Args:
        names: of the contestants.
        rounds: number of rounds.
        median_s: measures one contestant's turn; a collective call.
        after_round: called after each round.

    Returns:
        The times by name, in the order of `names`, the same on all ranks.
    """
    medians = torch.zeros(len(names), rounds, dtype=torch.float64)
    for turn in range(rounds):
        for place in range(len(names)):
            which = (place + turn) % len(names)
            dist.barrier()
            medians[which, turn] = median_s(names[which])
        after_round()
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return {name: Series(tuple(row)) for name, row in zip(names, medians.tolist(), strict=True)}


def timed(step: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start_s = time.perf_counter()
    step()
    return time.perf_counter() - start_s


def holding_results(steps: Mapping[str, Callable[[], object]]) -> dict[str, Callable[[], object]]:
    """Return steps that hold their results until their next, as training loops hold gradients."""
    held: dict[str, object] = {}

    def hold(name: str) -> None:
        held[name] = steps[name]()

    return {name: partial(hold, name) for name in steps}


def rounds_s(results: Mapping[str, Mapping[str, Series]]) -> dict[str, dict[str, Any]]:
    """Return the rounds of all series, by title and name, as JSON values."""
    return {
        title: {name: series.rounds_s for name, series in of_title.items()}
        for title, of_title in results.items()
    }
