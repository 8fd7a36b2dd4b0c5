"""Reports of a `Monitor`: tables of phases and buckets by rank, and the stragglers."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from fddp.core.tables import html_table, plain_table
from fddp.core.text import counted
from fddp.telemetry.flight.log import names
from fddp.telemetry.phases import INPUT, MONITOR, OF_STEPS
from fddp.telemetry.stragglers import (
    LEAST_STEPS,
    RankSummary,
    RobustStats,
    Straggler,
    find_slow_monitors,
    find_stragglers,
    find_suspects,
)


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
        names = dict.fromkeys(name for rank in self.ranks for name in rank.phases)
        own = (INPUT, *OF_STEPS, MONITOR)
        order = (INPUT, *(name for name in names if name not in own), *OF_STEPS, MONITOR)
        return tuple(name for name in order if name in names)

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))

    def __repr__(self) -> str:
        ranks = counted(len(self.ranks), "rank")
        return f"MonitorReport({self._steps}, {ranks}: {'; '.join(self.finding.splitlines())})"

    def __str__(self) -> str:
        """Return a table of phases, one of buckets, and the finding."""
        head, header, rows = self._phase_table()
        table = plain_table(header, rows, numeric=range(len(header)))
        return "\n\n".join([f"{head}\n{table}", *self._bucket_table(), self.finding])

    def _repr_html_(self) -> str:
        head, header, rows = self._phase_table()
        return f"{html_table(head, header, rows)}<p>{html.escape(self.finding)}</p>"

    def _phase_table(self) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
        """Return caption, header and rows."""
        phases = self.phases
        rows = []
        for rank in self.ranks:
            spreads = [rank.phases.get(name) for name in phases]
            rows.append((str(rank.rank), *map(_cell, spreads), _cell(rank.step)))
        head = f"{self._steps}, {counted(len(self.ranks), 'rank')}; ms, median ± MAD"
        return head, ("rank", *phases, "step"), rows

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
        none = ["no straggler: no rank takes longer for its own part than the others"]
        unsure = [
            f"not certain: rank {one.rank} may hold the others up by {one.behind_s * 1e3:.1f} ms a "
            f"step ({one.share:.0%} of it), which is within the noise of {steps} steps"
            for one in find_suspects(self.ranks)[:1]
        ]
        lines = [
            f"rank {one.rank} holds the others up by {one.behind_s * 1e3:.1f} ms a step "
            f"({one.share:.0%} of it), most of all in {one.phase} "
            f"({one.phase_behind_s * 1e3:+.1f} ms)"
            for one in self.stragglers
        ]
        # Separate: exporters are not part of the rank's own work, but the others wait for them.
        exporters = [
            f"exporters of the monitor take {one.behind_s * 1e3:.1f} ms a step ({one.share:.0%} of "
            f"it) longer on rank {one.rank} than on the others"
            for one in find_slow_monitors(self.ranks)
        ]
        return "\n".join([*(lines or unsure or none), *exporters])

    @property
    def _steps(self) -> str:
        spans: dict[tuple[int, int], list[int]] = {}
        for rank in self.ranks:
            spans.setdefault((rank.first, rank.last), []).append(rank.rank)
        if len(spans) == 1:
            ((first, last),) = spans
            return f"steps {first} to {last}"
        ranges = [f"{first} to {last} on {names(of)}" for (first, last), of in spans.items()]
        return f"steps {', '.join(ranges)}"

    def _bucket_table(self) -> list[str]:
        counts = {len(rank.buckets) for rank in self.ranks}
        if counts == {0} or len(counts) > 1:
            return []
        rows = [
            (str(of.bucket), str(rank.rank), _ms(of.ready_s), _ms(of.launch_s), _ms(of.done_s))
            for buckets in zip(*(rank.buckets for rank in self.ranks), strict=True)
            for rank, of in zip(self.ranks, buckets, strict=True)
        ]
        header = ("bucket", "rank", "ready", "launch", "done")
        table = plain_table(header, rows, numeric=range(len(header)))
        return [f"buckets; ms since the rank's backward began, median\n{table}"]


def _cell(spread: RobustStats | None) -> str:
    return "" if spread is None else f"{_ms(spread.median_s)} ± {_ms(spread.mad_s)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
