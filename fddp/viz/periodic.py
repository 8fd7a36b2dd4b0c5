"""A periodic schedule as lanes of fragments over steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fddp.extend import counted, entrance, size_text
from fddp.periodic import PeriodicSchedule
from fddp.viz import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR = 0.5  # share of a lane
_LANE_IN = 0.4
_AROUND_IN = 1.3  # title, axis and legend
_MOST_STEPS = 1000


@entrance
def plot_periodic(
    schedule: PeriodicSchedule, steps: int | None = None, ax: Axes | None = None
) -> Figure:
    """Plot the events of a periodic schedule with a lane for each fragment.

    A triangle marks the start of a collective and a circle the application of its average. The
    bar between them is the time during which inner steps overlap with it.

    Args:
        schedule: the schedule.
        steps: number of steps to show, by default two cycles and the steps before the first starts;
            at most 1000.
        ax: axes to draw into; None creates a figure.

    Raises:
        ImportError: matplotlib is missing.

    Example:
        >>> import torch
        >>> from fddp import periodic
        >>> tree = {"layers": [torch.zeros(4) for _ in range(4)]}
        >>> schedule = periodic.streaming_diloco(tree, 10, fragments=2, delay=2)
        >>> plot_periodic(schedule).axes[0].get_title()
        '2 fragments, 64 B in 10 steps; at most 32 B at once'
    """
    if steps is None:
        steps = schedule.warmup_steps + 2 * schedule.cycle
    steps = min(steps, _MOST_STEPS)
    count = len(schedule.fragments)
    if ax is None:
        (ax,) = canvas.new_figure(_AROUND_IN + _LANE_IN * count)
    sizes = [fragment.nbytes for fragment in schedule.fragments]
    ax.set_xlim(-1.0, steps)
    ax.set_ylim(count - 0.5, -0.5)
    ax.set_yticks(range(count), [f"fragment {n}, {size_text(sizes[n])}" for n in range(count)])
    title = (
        f"{counted(count, 'fragment')}, {size_text(_per_cycle(schedule))} in "
        f"{counted(schedule.cycle, 'step')}; at most {size_text(_at_once(schedule, steps))} at once"
    )
    canvas.label_(ax, title=title, x="step", grid="x")
    starts: list[tuple[int, int]] = []
    applied: list[tuple[int, int]] = []
    bars = []
    for step in range(steps):
        for event in schedule.due(step):
            row, delay = event.fragment, schedule.fragments[event.fragment].delay
            if event.kind == "start":
                starts.append((step, row))
                bars.append(canvas.Bar(row, step, delay, canvas.BLUE, "white"))
            else:
                applied.append((step, row))
    canvas.fill_(ax, bars, _BAR)
    marks = [(starts, "v", canvas.BLUE, "start"), (applied, "o", canvas.VERMILION, "apply")]
    handles = [
        ax.plot(
            [step for step, _ in places],
            [row for _, row in places],
            linestyle="",
            marker=marker,
            markersize=4.0,
            color=colour,
            label=name,
        )[0]
        for places, marker, colour, name in marks
    ]
    canvas.explain_(ax, handles)
    return canvas.figure_of(ax)


def _per_cycle(schedule: PeriodicSchedule) -> int:
    cycle = schedule.cycle
    return sum(part.nbytes * cycle // part.when.period for part in schedule.fragments)


def _at_once(schedule: PeriodicSchedule, steps: int) -> int:
    """Return the most bytes that are in flight after a step."""
    now = most = 0
    for step in range(steps):
        for event in schedule.due(step):
            nbytes = schedule.fragments[event.fragment].nbytes
            now += nbytes if event.kind == "start" else -nbytes
            most = max(most, now)
    return most
