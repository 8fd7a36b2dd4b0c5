"""Time use of ranks, and detection of stragglers.

Ranks start a step together, because each has waited for the gradients of the previous one. The
others wait for the rank whose own work takes longest. Detection compares durations, which each rank
measures by its own clock; times on clocks of different ranks are never compared.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from fddp.core.protocol.messages import MappingOf, Schema
from fddp.core.timeline import StepTimes
from fddp.telemetry.decode import check_least, decode_from
from fddp.telemetry.phases import INPUT, MONITOR, SYNC, WAIT

_NOT_OWN = (WAIT, MONITOR)
LEAST_STEPS = 9  # with fewer, noise of 10% yields a false straggler in over 1% of the reports
_SIGMAS = 4.0  # standard errors by which a straggler must be behind
_PHASE_SIGMAS = 5.0  # the same in one phase, of which there are several to be wrong about
_PHASE_PART = 1 / 3  # of such a lead that the whole of the rank's time must have
_LEAST_SHARE = 0.02  # of the step
_LEAST_S = 5e-4  # differences below this are background load of the host
_MAD_SIGMAS = 1.4826  # standard deviations of a normal distribution in its MAD
_MEDIAN_ERROR = 1.2533  # standard error of the median over that of the mean, for a normal one


class StepRecord(NamedTuple):
    """Measurements of one step on one rank.

    Attributes:
        step: number of the step.
        phases_s: seconds by phase. "input" is the time since the previous step, less any part that
            was measured under a name of its own; "hook" is the time of a communication hook, if
            there is one; "sync" is the rest after backward. Waiting for other ranks counts only as
            "wait", and work of the monitor and its exporters since the previous step only as
            "monitor". "input" and "monitor" are absent if the previous step was not observed.
        times: timestamps on this rank's clock; its waits include those of "input".
    """

    step: int
    phases_s: Mapping[str, float]
    times: StepTimes

    @property
    def own_s(self) -> float:
        """Seconds in which the rank neither waited for others nor ran its monitor."""
        return sum(s for phase, s in self.phases_s.items() if phase not in _NOT_OWN)


class RobustStats(NamedTuple):
    """Statistics of durations over several steps.

    Attributes:
        median_s: median.
        mad_s: median absolute deviation.
        most_s: maximum.
        steps: number of steps.
    """

    median_s: float
    mad_s: float
    most_s: float
    steps: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> RobustStats:
        """Compute the statistics of at least one value.

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
    """Median times at which a bucket was ready, launched and done, in seconds since the start of
    backward on the rank."""

    bucket: int
    ready_s: float
    launch_s: float
    done_s: float


@dataclass(frozen=True)
class RankSummary:
    """Statistics of some steps of one rank.

    Attributes:
        rank: rank in the group.
        first: number of the first step.
        last: number of the last step.
        phases: statistics by phase.
        own: statistics of all phases together, without "wait" and "monitor".
        step: statistics of the whole step, including the time before it.
        buckets: in plan order, over the steps with as many buckets as the last one.
    """

    rank: int
    first: int
    last: int
    phases: Mapping[str, RobustStats]
    own: RobustStats
    step: RobustStats
    buckets: tuple[BucketSpread, ...]

    def to_json(self) -> str:
        """Return the summary as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str, rank: int) -> RankSummary:
        """Decode the output of `to_json`.

        Args:
            text: the message.
            rank: its sender.

        Raises:
            ValueError: the message is malformed; names the rank.

        Example:
            >>> times = StepTimes((), 1.0, 3.0, 4.0)
            >>> summary = summarize(1, [StepRecord(0, {"backward": 2.0, "wait": 1.0}, times)])
            >>> RankSummary.from_json(summary.to_json(), 1) == summary
            True
        """
        return decode_from(rank, "summary", text, _SUMMARY, partial(_summary, rank))


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


def _summary(rank: int, fields: dict[str, Any]) -> RankSummary:
    if fields["rank"] != rank:
        raise ValueError(f"it is of rank {fields['rank']}")
    check_least(0, {"first": fields["first"], "last": fields["last"]})
    for bucket, *_ in fields["buckets"]:
        check_least(0, {"bucket": bucket})
    stats = {
        "phases": {name: _stats(entries) for name, entries in fields["phases"].items()},
        "own": _stats(fields["own"]),
        "step": _stats(fields["step"]),
        "buckets": tuple(BucketSpread(*bucket) for bucket in fields["buckets"]),
    }
    return RankSummary(**{**fields, **stats})


def _stats(entries: list[Any]) -> RobustStats:
    stats = RobustStats(*entries)
    check_least(0, stats._asdict())
    check_least(1, {"steps": stats.steps})
    return stats


def summarize(rank: int, steps: Sequence[StepRecord]) -> RankSummary:
    """Summarise at least one step of a rank, to be sent to the other ranks.

    Example:
        >>> times = StepTimes((), 1.0, 3.0, 4.0)
        >>> steps = [StepRecord(n, {"backward": 2.0, "wait": 1.0}, times) for n in range(5)]
        >>> summarize(0, steps).own.median_s
        2.0
    """
    # A step whose start is unknown is incomplete.
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
    """Rank that holds the others up.

    Attributes:
        rank: rank in the group.
        phase: phase in which it is furthest behind.
        behind_s: seconds per step by which its own work takes longer than that of the others.
        phase_behind_s: part of these seconds in that phase.
        share: `behind_s` as a share of the step.
    """

    rank: int
    phase: str
    behind_s: float
    phase_behind_s: float
    share: float


def find_stragglers(summaries: Sequence[RankSummary]) -> tuple[Straggler, ...]:
    """Return the ranks that hold the others up, slowest first. Differences within noise are
    ignored.

    A rank is a straggler if the median of its own time exceeds that of the others (their lower
    median, as up to half of them may be slow too) by 2% of the step and by half a millisecond, and
    by 4 standard errors of the difference; or if one phase but "sync" does, by 5 standard errors,
    as noise in the other phases may hide it. Its phase is the one with the largest lead.

    Args:
        summaries: summaries of all ranks. The result is empty unless they cover the same steps, at
            least 9.

    Example:
        >>> def rank_that_needs(rank, forward_s):
        ...     phases_s = {"input": 0.0, "forward": forward_s, "backward": 0.020, "wait": 0.001}
        ...     times = StepTimes((), 1.0, 3.0, 4.0)
        ...     return summarize(rank, [StepRecord(n, phases_s, times) for n in range(9)])
        >>> (found,) = find_stragglers([rank_that_needs(0, 0.010), rank_that_needs(1, 0.060)])
        >>> found.rank, found.phase, f"{found.behind_s * 1e3:.0f} ms"
        (1, 'forward', '50 ms')
    """
    return tuple(one for one, is_certain in _own_leads(summaries) if is_certain)


def find_suspects(summaries: Sequence[RankSummary]) -> tuple[Straggler, ...]:
    """Return the ranks that may hold the others up, slowest first: their lead is as large as that
    of a straggler, but within noise."""
    return tuple(one for one, is_certain in _own_leads(summaries) if not is_certain)


def _own_leads(summaries: Sequence[RankSummary]) -> list[tuple[Straggler, bool]]:
    """Return the leads of ranks that are not negligible, largest first, and if they are beyond
    noise."""
    found = []
    for lead in _leads(summaries, [summary.own for summary in summaries]):
        mine = summaries[lead.at]
        by_phase = {
            phase: _lead([_of_phase(summary, phase) for summary in summaries], lead.at)
            for phase in mine.phases
            if phase not in _NOT_OWN
        }
        phase = max(by_phase, key=lambda name: by_phase[name][0])
        # The last rank to arrive may run the sums for all, which makes its sync no cause.
        is_certain = lead.is_certain or any(
            phase_s > max(_PHASE_SIGMAS * error_s, lead.least_s)
            and lead.behind_s > _PHASE_PART * phase_s
            for name, (phase_s, error_s) in by_phase.items()
            if name != SYNC
        )
        one = Straggler(mine.rank, phase, lead.behind_s, by_phase[phase][0], lead.share)
        found.append((one, is_certain))
    return found


def find_slow_monitors(summaries: Sequence[RankSummary]) -> tuple[Straggler, ...]:
    """Return the ranks whose monitors take longer than the others', by the same rule.

    The usual cause is exporters. The others wait for such a rank although its own work is not slow.

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
    return tuple(
        Straggler(summaries[lead.at].rank, MONITOR, lead.behind_s, lead.behind_s, lead.share)
        for lead in _leads(summaries, taken)
        if lead.is_certain
    )


class _Lead(NamedTuple):
    """A lead that is not negligible."""

    at: int  # position of the rank
    behind_s: float
    least_s: float  # the smallest lead that is not negligible
    share: float  # of the step
    is_certain: bool  # beyond noise


def _leads(summaries: Sequence[RankSummary], spreads: Sequence[RobustStats]) -> list[_Lead]:
    """Return the leads that are not negligible, largest first."""
    if len(summaries) < 2 or min(summary.own.steps for summary in summaries) < LEAST_STEPS:
        return []
    if len({(summary.first, summary.last) for summary in summaries}) > 1:
        return []
    step_s = statistics.median(summary.step.median_s for summary in summaries)
    least_s = max(_LEAST_SHARE * step_s, _LEAST_S)
    found = []
    for at in range(len(spreads)):
        behind_s, error_s = _lead(spreads, at)
        if behind_s > least_s:
            share = behind_s / step_s if step_s > 0.0 else 0.0
            found.append(_Lead(at, behind_s, least_s, share, behind_s > _SIGMAS * error_s))
    return sorted(found, key=lambda lead: -lead.behind_s)


def _of_phase(summary: RankSummary, phase: str) -> RobustStats:
    return summary.phases.get(phase, RobustStats(0.0, 0.0, 0.0, summary.own.steps))


def _lead(spreads: Sequence[RobustStats], at: int) -> tuple[float, float]:
    """Return the lead of one median over the others', and its standard error."""
    mine, others = spreads[at], [*spreads[:at], *spreads[at + 1 :]]
    middle_s = statistics.median_low(other.median_s for other in others)
    other = next(other for other in others if other.median_s == middle_s)
    return mine.median_s - middle_s, math.hypot(mine.error_s, other.error_s)
