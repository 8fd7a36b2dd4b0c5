"""Where ranks spend their steps, and which of them holds the others up.

Ranks start a step together, because each has waited for the last one's gradients; whoever takes
longest for its own part is waited for by the others. So durations tell, which each rank measures
by its own clock; times on clocks of different ranks are never compared.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from fddp.core.protocol.messages import MappingOf, Schema
from fddp.core.timeline import StepTimes
from fddp.telemetry.decode import check_least, decode_from
from fddp.telemetry.phases import INPUT, MONITOR, WAIT

_NOT_OWN = (WAIT, MONITOR)
LEAST_STEPS = 9  # of fewer, noise of 10% names somebody in more than 1% of the reports
_SIGMAS = 4.0  # by how many standard errors a rank must be behind
_LEAST_SHARE = 0.02  # of the step
_LEAST_S = 5e-4  # below which hosts differ by what else they do
_MAD_SIGMAS = 1.4826  # standard deviations of a normal distribution in its MAD
_MEDIAN_ERROR = 1.2533  # standard errors of the mean in that of the median, of a normal one


class StepRecord(NamedTuple):
    """One step as one rank measured it.

    Attributes:
        step: its number.
        phases_s: seconds by phase: "input" is what lay between the step before and this one, less
            what was measured by itself, which has names of its own; "forward"; "backward"; "hook"
            is what a communication hook did, if there is one; "sync" is what else was done after
            backward. Waiting for other ranks counts as "wait" and as nothing else, and what the
            monitor and its exporters did since the step before as "monitor". "input" and "monitor"
            are missing where the step before was not observed.
        times: when things happened, on this rank's clock; its waits begin with those of "input".
    """

    step: int
    phases_s: Mapping[str, float]
    times: StepTimes

    @property
    def own_s(self) -> float:
        """Seconds in which the rank neither waited for others nor ran its monitor."""
        return sum(s for phase, s in self.phases_s.items() if phase not in _NOT_OWN)


class RobustStats(NamedTuple):
    """Seconds over several steps.

    Attributes:
        median_s: the median.
        mad_s: the median distance from it.
        most_s: the largest.
        steps: of how many steps.
    """

    median_s: float
    mad_s: float
    most_s: float
    steps: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> RobustStats:
        """Of one value at least.

        Example:
            >>> RobustStats.of([1.0, 2.0, 9.0])
            RobustStats(median_s=2.0, mad_s=1.0, most_s=9.0, steps=3)
        """
        median_s = statistics.median(seconds)
        mad_s = statistics.median(abs(s - median_s) for s in seconds)
        return cls(median_s, mad_s, max(seconds), len(seconds))

    @property
    def error_s(self) -> float:
        """Standard error of the median."""
        return _MEDIAN_ERROR * _MAD_SIGMAS * self.mad_s / math.sqrt(self.steps)


class BucketSpread(NamedTuple):
    """When a bucket was ready, launched and done: medians, in seconds since backward began on the
    rank in question."""

    bucket: int
    ready_s: float
    launch_s: float
    done_s: float


@dataclass(frozen=True)
class RankSummary:
    """Some steps of one rank.

    Attributes:
        rank: its number.
        first: number of the first step.
        last: number of the last.
        phases: by phase, what it took.
        own: what all phases but "wait" and "monitor" took together.
        step: what the whole step took, with what lay before it.
        buckets: in plan order; of the steps that ran with the last one's number of buckets.
    """

    rank: int
    first: int
    last: int
    phases: Mapping[str, RobustStats]
    own: RobustStats
    step: RobustStats
    buckets: tuple[BucketSpread, ...]

    def to_json(self) -> str:
        """The summary as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str, rank: int) -> RankSummary:
        """What `to_json` wrote.

        Args:
            text: what a rank told.
            rank: its number.

        Raises:
            ValueError: it is something else; names the rank, and says what.

        Example:
            >>> times = StepTimes((), 1.0, 3.0, 4.0)
            >>> summary = summarize(1, [StepRecord(0, {"backward": 2.0, "wait": 1.0}, times)])
            >>> RankSummary.from_json(summary.to_json(), 1) == summary
            True
        """
        return decode_from(rank, "summary of its steps", text, _SUMMARY, partial(_summary, rank))


_SPREAD: Schema = (float, float, float, int)
_SUMMARY: Schema = {
    "rank": int,
    "first": int,
    "last": int,
    "phases": MappingOf(_SPREAD),
    "own": _SPREAD,
    "step": _SPREAD,
    "buckets": [(int, float, float, float)],
}


def _summary(rank: int, read: dict[str, Any]) -> RankSummary:
    if read["rank"] != rank:
        raise ValueError(f"it is of rank {read['rank']}")
    check_least(0, {"first": read["first"], "last": read["last"]})
    for bucket, *_ in read["buckets"]:
        check_least(0, {"bucket": bucket})
    return RankSummary(
        rank=rank,
        first=read["first"],
        last=read["last"],
        phases={name: _spread(spread) for name, spread in read["phases"].items()},
        own=_spread(read["own"]),
        step=_spread(read["step"]),
        buckets=tuple(BucketSpread(*bucket) for bucket in read["buckets"]),
    )


def _spread(read: list[Any]) -> RobustStats:
    spread = RobustStats(*read)
    check_least(0, spread._asdict())
    check_least(1, {"steps": spread.steps})
    return spread


def summarize(rank: int, steps: Sequence[StepRecord]) -> RankSummary:
    """What a rank tells the others of its steps, of which there must be one.

    Example:
        >>> times = StepTimes((), 1.0, 3.0, 4.0)
        >>> steps = [StepRecord(n, {"backward": 2.0, "wait": 1.0}, times) for n in range(5)]
        >>> summarize(0, steps).own.median_s
        2.0
    """
    # One whose beginning is not known is no whole step.
    whole = [record for record in steps if INPUT in record.phases_s] or list(steps)
    names = dict.fromkeys(name for record in whole for name in record.phases_s)
    phases = {n: RobustStats.of([record.phases_s.get(n, 0.0) for record in whole]) for n in names}
    return RankSummary(
        rank=rank,
        first=steps[0].step,
        last=steps[-1].step,
        phases=phases,
        own=RobustStats.of([record.own_s for record in whole]),
        step=RobustStats.of([sum(record.phases_s.values()) for record in whole]),
        buckets=_bucket_spreads([record.times for record in whole]),
    )


def _bucket_spreads(steps: Sequence[StepTimes]) -> tuple[BucketSpread, ...]:
    count = len(steps[-1].buckets)
    alike = [step for step in steps if len(step.buckets) == count]
    spreads = []
    for number in range(count):
        of = [(step.buckets[number], step.backward_start_s) for step in alike]
        spreads.append(
            BucketSpread(
                steps[-1].buckets[number].bucket,
                statistics.median(times.ready_s - origin_s for times, origin_s in of),
                statistics.median(times.launch_s - origin_s for times, origin_s in of),
                statistics.median(times.done_s - origin_s for times, origin_s in of),
            )
        )
    return tuple(spreads)


class Straggler(NamedTuple):
    """A rank that holds the others up.

    Attributes:
        rank: its number.
        phase: in which it is furthest behind.
        behind_s: seconds a step by which its own part takes longer than the others'.
        phase_behind_s: seconds of these in that phase.
        share: `behind_s` as a share of the step.
    """

    rank: int
    phase: str
    behind_s: float
    phase_behind_s: float
    share: float


def find_stragglers(summaries: Sequence[RankSummary]) -> tuple[Straggler, ...]:
    """The ranks that hold the others up, the slowest first; none where differences are noise.

    A rank is one if the median of its own time lies above the others' (their lower median, so that
    half of them may be slow, too) by 4 standard errors of the difference, by 2% of the step and by
    half a millisecond. Its phase is the one with the largest such lead.

    Args:
        summaries: of all ranks, over the same steps; of others, or of fewer than 9, nothing is
            said.

    Example:
        >>> def rank_that_needs(rank, forward_s):
        ...     phases_s = {"input": 0.0, "forward": forward_s, "backward": 0.020, "wait": 0.001}
        ...     times = StepTimes((), 1.0, 3.0, 4.0)
        ...     return summarize(rank, [StepRecord(n, phases_s, times) for n in range(9)])
        >>> (found,) = find_stragglers([rank_that_needs(0, 0.010), rank_that_needs(1, 0.060)])
        >>> found.rank, found.phase, f"{found.behind_s * 1e3:.0f} ms"
        (1, 'forward', '50 ms')
    """
    found = []
    for at, behind_s, share in _behind(summaries, [summary.own for summary in summaries]):
        mine = summaries[at]
        leads = {
            phase: _lead([_of_phase(summary, phase) for summary in summaries], at)[0]
            for phase in mine.phases
            if phase not in _NOT_OWN
        }
        phase = max(leads, key=lambda name: leads[name])
        found.append(Straggler(mine.rank, phase, behind_s, leads[phase], share))
    return tuple(sorted(found, key=lambda one: -one.behind_s))


def find_slow_monitors(summaries: Sequence[RankSummary]) -> tuple[Straggler, ...]:
    """The ranks whose monitors take longer than the others', by the measure of `find_stragglers`.

    Exporters do: the others wait for the rank, which is not slow itself.

    Example:
        >>> def rank_with_exporters(rank, monitor_s):
        ...     phases_s = {"input": 0.001, "monitor": monitor_s, "backward": 0.020}
        ...     times = StepTimes((), 1.0, 3.0, 4.0)
        ...     return summarize(rank, [StepRecord(n, phases_s, times) for n in range(9)])
        >>> ranks = [rank_with_exporters(0, 0.010), rank_with_exporters(1, 0.0)]
        >>> [(one.rank, one.phase) for one in find_slow_monitors(ranks)], find_stragglers(ranks)
        ([(0, 'monitor')], ())
    """
    taken = [_of_phase(summary, MONITOR) for summary in summaries]
    found = [
        Straggler(summaries[at].rank, MONITOR, behind_s, behind_s, share)
        for at, behind_s, share in _behind(summaries, taken)
    ]
    return tuple(sorted(found, key=lambda one: -one.behind_s))


def _behind(
    summaries: Sequence[RankSummary], spreads: Sequence[RobustStats]
) -> Iterator[tuple[int, float, float]]:
    """Whose spread lies above the others' beyond noise: its position, by how much, and as a share
    of the step."""
    if len(summaries) < 2 or min(summary.own.steps for summary in summaries) < LEAST_STEPS:
        return
    if len({(summary.first, summary.last) for summary in summaries}) > 1:
        return
    step_s = statistics.median(summary.step.median_s for summary in summaries)
    for at in range(len(spreads)):
        behind_s, error_s = _lead(spreads, at)
        if behind_s > max(_SIGMAS * error_s, _LEAST_SHARE * step_s, _LEAST_S):
            yield at, behind_s, behind_s / step_s if step_s > 0.0 else 0.0


def _of_phase(summary: RankSummary, phase: str) -> RobustStats:
    return summary.phases.get(phase, RobustStats(0.0, 0.0, 0.0, summary.own.steps))


def _lead(spreads: Sequence[RobustStats], at: int) -> tuple[float, float]:
    """By how much one's median lies above the others', and the standard error of that."""
    mine, others = spreads[at], [*spreads[:at], *spreads[at + 1 :]]
    middle_s = statistics.median_low(other.median_s for other in others)
    other = next(other for other in others if other.median_s == middle_s)
    return mine.median_s - middle_s, math.hypot(mine.error_s, other.error_s)
