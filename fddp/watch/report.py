"""Reports of a `Monitor`: a table of phases by rank, and the stragglers."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from fddp.extend import counted, html_table, plain_table, rank_names
from fddp.watch.phases import INPUT, MONITOR, OF_STEPS
from fddp.watch.stragglers import LEAST_STEPS, RankSummary, RobustStats, Straggler, find_stragglers


@dataclass(frozen=True, repr=False)
class MonitorReport:
    """Measurements of some steps of all ranks, equal on every rank; print it.

    Attributes:
        ranks: summary of each rank, by rank.
        stragglers: ranks that hold the others up, the slowest first.
    """

    ranks: tuple[RankSummary, ...]
    stragglers: tuple[Straggler, ...]

    @classmethod
    def of(cls, summaries: Iterable[RankSummary]) -> MonitorReport:
        """Create a report and find the stragglers."""
        ranks = tuple(summaries)
        return cls(ranks, find_stragglers(ranks))

    @property
    def straggler(self) -> Straggler | None:
        """The slowest straggler; None if there is none."""
        return self.stragglers[0] if self.stragglers else None

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases of any rank, in order of a step; the monitor's own comes last."""
        named = dict.fromkeys(name for rank in self.ranks for name in rank.phases)
        own = (INPUT, *OF_STEPS, MONITOR)
        order = (INPUT, *(name for name in named if name not in own), *OF_STEPS, MONITOR)
        return tuple(name for name in order if name in named)

    @property
    def finding(self) -> str:
        """The stragglers in words."""
        if len({(rank.first, rank.last) for rank in self.ranks}) > 1:
            return (
                f"no finding: the ranks have observed different steps ({self._steps}); call "
                f"observe(info) on every rank after each step"
            )
        if len(self.ranks) == 1:
            return "no straggler: there is one rank"
        steps = min(rank.own.steps for rank in self.ranks)
        if steps < LEAST_STEPS:
            return f"not certain: too few steps ({steps} of {LEAST_STEPS})"
        lines = [
            f"rank {one.rank} holds the others up by {one.behind_s * 1e3:.1f} ms a step "
            f"({one.share:.0%} of it), most of all in {one.phase} "
            f"({one.phase_behind_s * 1e3:+.1f} ms)"
            for one in self.stragglers
        ]
        none = "no straggler: no rank takes longer for its own part than the others, beyond noise"
        return "\n".join(lines) or none

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))

    def __repr__(self) -> str:
        ranks = counted(len(self.ranks), "rank")
        return f"MonitorReport({self._steps}, {ranks}: {'; '.join(self.finding.splitlines())})"

    def __str__(self) -> str:
        """Return a table of phases, and the finding."""
        caption, header, rows = self._table()
        table = plain_table(header, rows, numeric=range(len(header)))
        return f"{caption}\n{table}\n\n{self.finding}"

    def _repr_html_(self) -> str:
        return f"{html_table(*self._table())}<p>{html.escape(self.finding)}</p>"

    def _table(self) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
        """Return caption, header and rows."""
        phases = self.phases
        rows = [
            (str(rank.rank), *(_cell(rank.phases.get(name)) for name in phases), _cell(rank.step))
            for rank in self.ranks
        ]
        header = ("rank", *phases, "step")
        if any(rank.link_s is not None for rank in self.ranks):
            header = (*header, "link")
            rows = [(*row, _ms(rank.link_s)) for row, rank in zip(rows, self.ranks, strict=True)]
        caption = f"{self._steps}, {counted(len(self.ranks), 'rank')}; ms, median ± MAD"
        return caption, header, rows

    @property
    def _steps(self) -> str:
        observed: dict[tuple[int, int], list[int]] = {}
        for rank in self.ranks:
            observed.setdefault((rank.first, rank.last), []).append(rank.rank)
        if len(observed) == 1:
            ((first, last),) = observed
            return f"steps {first} to {last}"
        ranges = [
            f"{first} to {last} on {rank_names(of)}" for (first, last), of in observed.items()
        ]
        return f"steps {', '.join(ranges)}"


def _cell(stats: RobustStats | None) -> str:
    return "" if stats is None else f"{stats.median_s * 1e3:.2f} ± {stats.mad_s * 1e3:.2f}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"
