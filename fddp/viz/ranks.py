"""Phases of steps on each rank."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING, Any

from fddp.extend import entrance
from fddp.viz import canvas
from fddp.watch import MonitorReport

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {
    "input": canvas.PURPLE,
    "forward": canvas.GREEN,
    "backward": canvas.BLUE,
    "hook": "#F0E442",
    "gc": "#882255",
    "sync": canvas.ORANGE,
    "wait": "#DDDDDD",
    "monitor": "#666666",
}
_OTHERS = (canvas.GREY, "#56B4E9", "#A6761D")
_TITLE_LINES = 3  # further stragglers are only framed
_TITLE_WIDTH = 105  # letters of a line
_FRAME: dict[str, Any] = {"fill": False, "edgecolor": canvas.VERMILION, "linewidth": 2.0}
_BAR = 0.7  # share of its row
_ROW_IN = 0.32
_MOST_IN = 12.0
_AROUND_IN = 1.2  # title, axis and legend


@entrance
def plot_ranks(report: MonitorReport, ax: Axes | None = None) -> Figure:
    """Plot a bar of phases for each rank, with stragglers marked.

    The length of a part is the median of its phase. The phase in which a straggler delays the
    others has a frame.

    Args:
        report: report of a `Monitor`.
        ax: axes to draw into; None creates a figure.

    Raises:
        ImportError: matplotlib is missing.

    Example:
        >>> from fddp.extend import StepTimes
        >>> from fddp.watch import RankSummary, StepRecord
        >>> def rank_that_needs(rank, forward_s):
        ...     times = StepTimes((), 1.0, 3.0, 4.0)
        ...     phases_s = {"forward": forward_s, "wait": 0.1 - forward_s}
        ...     return RankSummary.of(rank, [StepRecord(n, phases_s, times) for n in range(9)])
        >>> report = MonitorReport.of([rank_that_needs(0, 0.02), rank_that_needs(1, 0.08)])
        >>> print(plot_ranks(report).axes[0].get_title())
        steps 0 to 8: rank 1 holds the others up by 60.0 ms a step (60% of it), most of all in ...
    """
    ranks = report.ranks
    if ax is None:
        (ax,) = canvas.new_figure(min(_MOST_IN, _AROUND_IN + _ROW_IN * len(ranks)))
    slow = {one.rank: one.phase for one in report.stragglers}
    colours = _colours(report.phases)
    bars, framed, longest_ms = [], [], 0.0
    for row, rank in enumerate(ranks):
        start_ms = 0.0
        for phase in (name for name in report.phases if name in rank.phases):
            width_ms = rank.phases[phase].median_s * 1e3
            bar = canvas.Bar(row, start_ms, width_ms, colours[phase], "white")
            bars.append(bar)
            if slow.get(rank.rank) == phase:
                framed.append(bar)
            start_ms += width_ms
        longest_ms = max(longest_ms, start_ms)
    ax.set_xlim(0.0, 1.02 * max(longest_ms, 1e-6))
    ax.set_ylim(len(ranks) - 0.5, -0.5)
    labels = [f"rank {r.rank}{' ◂' if r.rank in slow else ''}" for r in ranks]
    shown = range(0, len(ranks), max(1, len(ranks) // 32))
    ax.set_yticks(list(shown), [labels[row] for row in shown])
    canvas.label_(ax, title=_title(report), x="ms a step, median", grid="x")
    canvas.fill_(ax, bars, _BAR)
    _frame_(ax, framed)
    canvas.explain_(ax, _legend(colours, bool(framed)))
    return canvas.figure_of(ax)


def _colours(phases: tuple[str, ...]) -> dict[str, str]:
    others = iter(_OTHERS * len(phases))
    return {phase: _COLOURS.get(phase) or next(others) for phase in phases}


def _title(report: MonitorReport) -> str:
    spans = {(rank.first, rank.last) for rank in report.ranks}
    first, last = min(spans)
    # If ranks report different steps, the finding names them.
    text = report.finding if len(spans) > 1 else f"steps {first} to {last}: {report.finding}"
    lines = [part for line in text.splitlines() for part in wrap(line, _TITLE_WIDTH)]
    return "\n".join(lines[:_TITLE_LINES])


def _frame_(ax: Axes, bars: list[canvas.Bar]) -> None:
    from matplotlib.patches import Rectangle

    for bar in bars:
        corner = (bar.start, bar.row - _BAR / 2.0)
        ax.add_patch(Rectangle(corner, bar.width, _BAR, **_FRAME))


def _legend(colours: dict[str, str], marked: bool) -> list[Artist]:
    from matplotlib.patches import Patch

    phases: list[Artist] = [Patch(color=c, label=phase) for phase, c in colours.items()]
    return [*phases, Patch(label="holds the others up", **_FRAME)] if marked else phases
