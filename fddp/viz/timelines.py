"""A step as lanes of compute and communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fddp.extend import COMPUTE, Span, StepTimes, Timeline, entrance
from fddp.viz import canvas

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {
    "backward": "#C8C8C8",
    "bucket": canvas.BLUE,
    "all_reduce": canvas.BLUE,
    "reduce_scatter": canvas.ORANGE,
    "all_gather": canvas.GREEN,
    "gather": canvas.PURPLE,
    "control": canvas.BLACK,
}
_BAR = 0.6  # share of its lane
_LEAST_EDGED_IN = 0.04
_LANE_IN = 0.5
_AROUND_IN = 1.3  # title, axis and legend


@entrance
def plot_timeline(timeline: Timeline | StepTimes, ax: Axes | None = None) -> Figure:
    """Plot a step with a lane for compute and one for each group. Exposed time is shaded.

    A triangle marks a launch. If a bar begins after its triangle, the collective waited for other
    ranks or for the collective before it. Bars have the number of their bucket if there is room.

    Args:
        timeline: a simulated step, or a measured one, as in `SyncInfo.timeline`.
        ax: axes to draw into; None creates a figure.

    Raises:
        ImportError: matplotlib is missing.

    Example:
        >>> span = Span(1, "all_reduce", 0, "world", "all_reduce 0", 0.0, 0.001, 0.003)
        >>> figure = plot_timeline(Timeline((span,), 0.002, 0.003, 0, (0.003,)))
        >>> figure.axes[0].get_title()
        'rank 0: step 3.00 ms, of which 1.00 ms exposed; 50% of communication hidden'
    """
    if isinstance(timeline, StepTimes):
        timeline = timeline.to_timeline()
    title = (
        f"rank {timeline.rank}: step {timeline.step_s * 1e3:.2f} ms, of which "
        f"{timeline.exposed_s * 1e3:.2f} ms exposed; {timeline.hidden_fraction:.0%} of "
        f"communication hidden"
    )
    spans = timeline.spans
    lanes = list(dict.fromkeys([COMPUTE, *(span.lane for span in spans)]))
    if ax is None:
        (ax,) = canvas.new_figure(_AROUND_IN + _LANE_IN * len(lanes))
    shown = [span for span in spans if span.end_s > span.start_s]
    ax.set_xlim(0.0, 1.02e3 * max([timeline.step_s, *(span.end_s for span in shown), 1e-9]))
    ax.set_ylim(len(lanes) - 0.5, -0.5)
    ax.set_yticks(range(len(lanes)), [lane.replace("+", " + ") for lane in lanes])
    canvas.label_(ax, title=title, x="ms since the start of the step", grid="x")
    canvas.explain_(ax, _legend(list(dict.fromkeys(span.kind for span in shown))))
    width_in, _ = canvas.size_in(ax)
    x_inch = ax.get_xlim()[1] / width_in
    for row, lane in enumerate(lanes):
        _draw_lane_(ax, row, [span for span in shown if span.lane == lane], x_inch)
    backward_ms, step_ms = timeline.backward_end_s * 1e3, timeline.step_s * 1e3
    if step_ms > backward_ms:
        ax.axvspan(backward_ms, step_ms, color=canvas.VERMILION, alpha=0.18, linewidth=0.0)
    ax.axvline(backward_ms, color=canvas.VERMILION, linewidth=1.0, linestyle="--")
    return canvas.figure_of(ax)


def _draw_lane_(ax: Axes, row: int, spans: Sequence[Span], x_inch: float) -> None:
    bars = []
    for span in spans:
        start_ms, width_ms = span.start_s * 1e3, (span.end_s - span.start_s) * 1e3
        colour = _colour(span.kind)
        # A white edge separates neighbours, unless the bar is too narrow.
        edge = "white" if width_ms / x_inch >= _LEAST_EDGED_IN else colour
        bars.append(canvas.Bar(row, start_ms, width_ms, colour, edge))
        text = span.label if span.bucket < 0 else str(span.bucket)
        if canvas.shortened(text, width_ms / x_inch - 0.04) == text:
            canvas.write_on_(ax, start_ms + width_ms / 2.0, row, text, colour)
    canvas.fill_(ax, bars, _BAR)
    launches = [span.launch_s * 1e3 for span in spans if span.lane != COMPUTE]
    tops = [row - 0.38] * len(launches)
    ax.plot(launches, tops, linestyle="", marker="v", markersize=3.0, color="#444444")


def _colour(kind: str) -> str:
    return _COLOURS.get(kind, canvas.GREY)


def _legend(kinds: Sequence[str]) -> list[Artist]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        *(Patch(color=_colour(kind), label=kind) for kind in kinds),
        Line2D([], [], linestyle="", marker="v", markersize=3.0, color="#444444", label="launch"),
        Patch(color=canvas.VERMILION, alpha=0.18, label="exposed"),
    ]
