"""The tree of a sum over virtual ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from fddp.core.schedule.schedule import Schedule, summed_blocks
from fddp.core.schedule.virtual import Span, VirtualRanks, fold, join, tree_additions
from fddp.core.text import counted
from fddp.viz import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = (canvas.BLUE, canvas.ORANGE, canvas.GREEN, canvas.PURPLE, canvas.VERMILION)
_LIGHT = "#CCCCCC"
_BAR = 0.8  # share of its row
_ROW_IN = 0.35
_AROUND_IN = 1.1  # title, axis and legend
_MOST_NAMED = 32  # virtual ranks
_MOST_COUNTED = 12  # ranks


def plot_virtual_ranks(schedule: Schedule | VirtualRanks, ax: Axes | None = None) -> Figure:
    """Plot the tree of a sum over virtual ranks as bars: virtual ranks below, the root above.

    Each bar is a sum of the bars under it, in the colour of the rank that computes it. Framed bars
    are sent. Grey ones are sums over ranks, those along inner axes in a lighter grey.

    Args:
        schedule: a schedule with virtual ranks, or its `schedule.virtual`, which is drawn as summed
            along all axes at once.
        ax: axes to draw into; None creates a figure.

    Raises:
        ImportError: matplotlib is missing.
        TypeError: `schedule` is neither.
        ValueError: the schedule has no virtual ranks.

    Example:
        >>> import fddp, numpy as np
        >>> plan = fddp.plan_buckets({"w": np.zeros(6)})
        >>> schedule = fddp.make_schedule(plan, 3, virtual_ranks=8)
        >>> plot_virtual_ranks(schedule).axes[0].get_title()
        '8 virtual ranks on 3 ranks, which send 1, 2, 2 partial sums'
        >>> hosts = fddp.Topology(host=2, local=3)
        >>> schedule = fddp.make_schedule(
        ...     plan, hosts, algorithm="hierarchical", virtual_ranks=6
        ... )
        >>> print(plot_virtual_ranks(schedule).axes[0].get_title())
        6 virtual ranks on 6 ranks, which send 1, 1, 1, 1, 1, 1 partial sums
        every 3 ranks send 2, 2 along host
    """
    virtual, blocks = _virtual_of(schedule)
    nodes = _nodes(virtual.count)
    if ax is None:
        rows = 1 + max(_level(node) for node in nodes)
        (ax,) = canvas.new_figure(_AROUND_IN + _ROW_IN * rows)
    sent = {*chain.from_iterable(virtual.spans)}
    title = f"{counted(virtual.count, 'virtual rank')} on {counted(len(virtual.runs), 'rank')}"
    if len(virtual.runs) > 1:
        title += f", which send {_numbers(virtual.spans)} partial sums"
    inner: list[range] = []  # virtual ranks of each block
    for block, axes in blocks.items():
        roots = virtual.roots(block)
        sent.update(chain.from_iterable(roots))
        inner += [range(own[0].start, own[-1].stop) for own in roots]
        title += f"\nevery {block} ranks send {_numbers(roots)} along {' and '.join(axes)}"
    bars = []
    for node in nodes:
        owner = next((rank for rank, run in enumerate(virtual.runs) if _within(node, run)), None)
        colour = canvas.GREY if owner is None else _COLOURS[owner % len(_COLOURS)]
        if owner is None and any(_within(node, run) for run in inner):
            colour = _LIGHT
        edge = canvas.BLACK if node in sent else "white"
        start, stop = node
        bars.append(canvas.Bar(_level(node), start - 0.5, stop - start, colour, edge))
    canvas.fill_(ax, bars, _BAR)
    ax.set_xlim(-0.6, virtual.count - 0.4)
    ax.set_ylim(-0.5, max(bar.row for bar in bars) + 0.5)
    step = max(1, virtual.count // _MOST_NAMED)
    ax.set_xticks([*range(0, virtual.count, step)])
    ax.set_yticks([])
    canvas.label_(ax, title=title, x="virtual rank", grid="x")
    return canvas.figure_of(ax)


def _virtual_of(
    schedule: Schedule | VirtualRanks,
) -> tuple[VirtualRanks, Mapping[int, tuple[str, ...]]]:
    """Return virtual ranks, and the blocks of ranks whose sums travel on, as in the schedule."""
    if isinstance(schedule, VirtualRanks):
        return schedule, {}
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"schedule must be a Schedule with virtual ranks, such as sync.schedule, got a "
            f"{type(schedule).__name__}"
        )
    if schedule.virtual is None:
        raise ValueError(
            "the schedule has no virtual ranks; build it with virtual_ranks=8, for instance"
        )
    return schedule.virtual, summed_blocks(schedule)


def _numbers(spans: Iterable[Sequence[Span]]) -> str:
    counts = [len(own) for own in spans]
    return ", ".join(map(str, counts)) if len(counts) <= _MOST_COUNTED else f"up to {max(counts)}"


def _nodes(count: int) -> list[Span]:
    """Return the nodes of the tree, virtual ranks included."""
    nodes = [Span(number, number + 1) for number in range(count)]

    def joined(left: Span, right: Span) -> Span:
        nodes.append(join(left, right))
        return nodes[-1]

    fold(nodes[:], tree_additions(count), joined)
    return nodes


def _level(node: Span) -> int:
    return (node.stop - node.start - 1).bit_length()


def _within(node: Span, run: range) -> bool:
    return run.start <= node.start and node.stop <= run.stop
