"""The tree of a sum over virtual ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fddp.core.schedule.virtual import Span, VirtualRanks, fold, tree_additions
from fddp.core.text import counted
from fddp.viz import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = (canvas.BLUE, canvas.ORANGE, canvas.GREEN, canvas.PURPLE, canvas.VERMILION)
_BAR = 0.8  # share of its row
_ROW_IN = 0.35
_AROUND_IN = 1.1  # title, axis and legend
_MOST_NAMED = 32  # virtual ranks


def plot_virtual_ranks(virtual: VirtualRanks, ax: Axes | None = None) -> Figure:
    """Plot the tree of a sum over virtual ranks as bars: virtual ranks below, the root above.

    Each bar is a sum of the bars under it, in the colour of the rank that computes it. Framed bars
    are sent. Grey ones are sums over ranks.

    Args:
        virtual: virtual ranks of a schedule, `schedule.virtual`.
        ax: axes to draw into; None creates a figure.

    Raises:
        ImportError: matplotlib is missing.

    Example:
        >>> figure = plot_virtual_ranks(VirtualRanks.over(8, world_size=3))
        >>> figure.axes[0].get_title()
        '8 virtual ranks on 3 ranks, which send 1, 2, 2 partial sums'
    """
    nodes = _nodes(virtual.count)
    if ax is None:
        rows = 1 + max(_level(node) for node in nodes)
        (ax,) = canvas.new_figure(_AROUND_IN + _ROW_IN * rows)
    sent = {span for own in virtual.spans for span in own}
    bars = []
    for node in nodes:
        owner = next((rank for rank, run in enumerate(virtual.runs) if _within(node, run)), None)
        colour = canvas.GREY if owner is None else _COLOURS[owner % len(_COLOURS)]
        edge = canvas.BLACK if node in sent else "white"
        start, stop = node
        bars.append(canvas.Bar(_level(node), start - 0.5, stop - start, colour, edge))
    canvas.fill_(ax, bars, _BAR)
    ax.set_xlim(-0.6, virtual.count - 0.4)
    ax.set_ylim(-0.5, max(bar.row for bar in bars) + 0.5)
    step = max(1, virtual.count // _MOST_NAMED)
    ax.set_xticks([*range(0, virtual.count, step)])
    ax.set_yticks([])
    sums = ", ".join(map(str, virtual.sent))
    title = (
        f"{counted(virtual.count, 'virtual rank')} on {counted(len(virtual.runs), 'rank')}, which "
        f"send {sums} partial sums"
    )
    canvas.label_(ax, title=title, x="virtual rank", grid="x")
    return canvas.figure_of(ax)


def _nodes(count: int) -> list[Span]:
    """Return the nodes of the tree, virtual ranks included."""
    nodes = [Span(number, number + 1) for number in range(count)]

    def joined(left: Span, right: Span) -> Span:
        nodes.append(Span(left.start, right.stop))
        return nodes[-1]

    fold(nodes[:], tree_additions(count), joined)
    return nodes


def _level(node: Span) -> int:
    return (node.stop - node.start - 1).bit_length()


def _within(node: Span, run: range) -> bool:
    return run.start <= node.start and node.stop <= run.stop
