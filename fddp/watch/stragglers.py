"""Time use of ranks, and detection of stragglers.

Ranks start a step together, because each has waited for the gradients of the previous one. The
others wait for the rank whose own work takes longest. All ranks wait for a slow link, also the last
one to arrive. Detection compares durations, which each rank measures by its own clock; times on
clocks of different ranks are never compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fddp.extend import MappingOf, Schema, optional
from fddp.watch.phases import INPUT, NOT_OWN, SYNC, WAIT, StepRecord

COMMUNICATION = "communication"
"""Phase of a straggler with a slow link."""

LEAST_STEPS = 9  # with fewer, noise of 10% yields a false straggler in over 1% of the reports
_SIGMAS = 4.0  # standard errors by which a straggler must be behind
_PHASE_SIGMAS = 5.0  # the same in one phase, of which there are several to be wrong about
_PHASE_PART = 1 / 3  # of such a lead that the whole of the rank's time must have, or vice versa
_LEAST_SHARE = 0.02  # of the step
_LEAST_S = 5e-4  # differences below this are background load of the host
_LINK_RATIO = 2.0  # of the time of a slow link to that of the others
_MAD_SIGMAS = 1.4826  # standard deviations of a normal distribution in its MAD
_MEDIAN_ERROR = 1.2533  # standard error of the median over that of the mean, for a normal one


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


_STATS: Schema = (float, float, float, int)
SUMMARY: Schema = {
    "rank": int,
    "first": int,
    "last": int,
    "phases": MappingOf(_STATS),
    "own": _STATS,
    "step": _STATS,
    "link_s": optional(float),
}


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
        link_s: seconds per step in which data between this rank and most of its peers was in
            flight, since the report before; None if unknown.
    """

    rank: int
    first: int
    last: int
    phases: Mapping[str, RobustStats]
    own: RobustStats
    step: RobustStats
    link_s: float | None = None

    @classmethod
    def of(cls, rank: int, steps: Sequence[StepRecord]) -> RankSummary:
        """Summarise at least one step of a rank.

        Example:
            >>> from fddp.extend import StepTimes
            >>> times = StepTimes((), 1.0, 3.0, 4.0)
            >>> steps = [StepRecord(n, {"backward": 2.0, "wait": 1.0}, times) for n in range(5)]
            >>> RankSummary.of(0, steps).own.median_s
            2.0
        """
        # A step whose start is unknown is incomplete.
        whole = [record for record in steps if INPUT in record.phases_s] or list(steps)
        names = dict.fromkeys(name for record in whole for name in record.phases_s)
        return cls(
            rank=rank,
            first=steps[0].step,
            last=steps[-1].step,
            phases={n: RobustStats.of([r.phases_s.get(n, 0.0) for r in whole]) for n in names},
            own=RobustStats.of([record.own_s for record in whole]),
            step=RobustStats.of([sum(record.phases_s.values()) for record in whole]),
        )

    @classmethod
    def from_message(cls, fields: Mapping[str, Any]) -> RankSummary:
        """Return the summary whose fields fit `SUMMARY`."""
        phases = {name: RobustStats(*stats) for name, stats in fields["phases"].items()}
        own, step = RobustStats(*fields["own"]), RobustStats(*fields["step"])
        return cls(**{**fields, "phases": phases, "own": own, "step": step})


class Straggler(NamedTuple):
    """Rank that holds the others up.

    Attributes:
        rank: rank in the group.
        phase: phase in which it is furthest behind; "communication" if its link is slow.
        behind_s: seconds per step by which its own work takes longer than that of the others, or
            for which all ranks wait for its link.
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
    as noise in the other phases may hide it. Its phase is the one with the largest lead, but "sync"
    only if no other phase has a third of the whole lead.

    Even the last rank to arrive waits for a slow link. A rank whose link takes more than twice as
    long as that of the others holds them up in "communication", for as long as all ranks wait.

    Args:
        summaries: summaries of all ranks. The result is empty unless they cover the same steps, at
            least 9.

    Example:
        >>> from fddp.extend import StepTimes
        >>> def rank_that_needs(rank, forward_s):
        ...     phases_s = {"input": 0.0, "forward": forward_s, "backward": 0.020, "wait": 0.001}
        ...     times = StepTimes((), 1.0, 3.0, 4.0)
        ...     return RankSummary.of(rank, [StepRecord(n, phases_s, times) for n in range(9)])
        >>> (found,) = find_stragglers([rank_that_needs(0, 0.010), rank_that_needs(1, 0.060)])
        >>> found.rank, found.phase, f"{found.behind_s * 1e3:.0f} ms"
        (1, 'forward', '50 ms')
    """
    if len(summaries) < 2 or min(summary.own.steps for summary in summaries) < LEAST_STEPS:
        return ()
    if len({(summary.first, summary.last) for summary in summaries}) > 1:
        return ()
    step_s = statistics.median(summary.step.median_s for summary in summaries)
    least_s = max(_LEAST_SHARE * step_s, _LEAST_S)
    link_behind_s = _link_leads(summaries)
    found = []
    for at, summary in enumerate(summaries):
        behind_s, error_s = _lead([other.own for other in summaries], at)
        by_phase = {
            phase: _lead([_of_phase(other, phase) for other in summaries], at)
            for phase in summary.phases
            if phase not in NOT_OWN
        }
        # The last rank to arrive may run the sums for all, which makes its sync no cause.
        is_certain = behind_s > _SIGMAS * error_s or any(
            phase_s > max(_PHASE_SIGMAS * phase_error_s, least_s)
            and behind_s > _PHASE_PART * phase_s
            for name, (phase_s, phase_error_s) in by_phase.items()
            if name != SYNC
        )
        if not (behind_s > least_s and is_certain):
            behind_s = 0.0
        if max(behind_s, link_behind_s[at]) <= least_s:
            continue
        leads_s = {name: phase_s for name, (phase_s, _) in by_phase.items()}
        # A rank that arrives late for another cause makes way for those that have waited.
        causes_s = {n: s for n, s in leads_s.items() if n != SYNC and s > _PHASE_PART * behind_s}
        phase, phase_behind_s = max((causes_s or leads_s).items(), key=lambda lead: lead[1])
        if link_behind_s[at] > behind_s:
            behind_s = phase_behind_s = link_behind_s[at]
            phase = COMMUNICATION
        share = behind_s / step_s if step_s > 0.0 else 0.0
        found.append(Straggler(summary.rank, phase, behind_s, phase_behind_s, share))
    return tuple(sorted(found, key=lambda one: -one.behind_s))


def _link_leads(summaries: Sequence[RankSummary]) -> list[float]:
    """Return the seconds per step for which all ranks wait for the link of each; 0 for one that is
    not slow."""
    exposed_s = min(_of_phase(summary, WAIT).median_s for summary in summaries)
    leads_s = []
    for at, summary in enumerate(summaries):
        others = (*summaries[:at], *summaries[at + 1 :])
        others_s = [other.link_s for other in others if other.link_s is not None]
        middle_s = statistics.median_low(others_s) if others_s else math.inf
        link_s = summary.link_s or 0.0
        is_slow = link_s > _LINK_RATIO * middle_s
        leads_s.append(min(link_s - middle_s, exposed_s) if is_slow else 0.0)
    return leads_s


def _of_phase(summary: RankSummary, phase: str) -> RobustStats:
    return summary.phases.get(phase, RobustStats(0.0, 0.0, 0.0, summary.own.steps))


def _lead(stats: Sequence[RobustStats], at: int) -> tuple[float, float]:
    """Return the lead of one median over the others', and its standard error."""
    others = [*stats[:at], *stats[at + 1 :]]
    middle_s = statistics.median_low(other.median_s for other in others)
    middle = next(other for other in others if other.median_s == middle_s)
    return stats[at].median_s - middle_s, math.hypot(stats[at].error_s, middle.error_s)
