"""Helpers of all figures: creation, colours, bars and labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN = 8.0  # inches; notebooks show it without scaling

TITLE_PT = 9.5
SMALL_PT = 8.0

_LEAST_LETTERS = 9

# Okabe and Ito's
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
BLACK = "#000000"
GREY = "#999999"

_DARK = frozenset({BLUE, GREEN, VERMILION, BLACK})  # on which text is white


def new_figure(height_in: float, columns: int = 1) -> list[Axes]:
    """Return axes side by side in a new figure of notebook width.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install fddp[viz]") from error
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    return list(figure.subplots(1, columns, squeeze=False).flat)


def figure_of(ax: Axes) -> Figure:
    """Return the root figure of axes."""
    figure = ax.get_figure(root=True)
    if figure is None:
        raise ValueError("ax was removed from its figure; pass axes that are part of one")
    return figure


def label_(ax: Axes, *, title: str, x: str, y: str = "", grid: Literal["x", "y"]) -> None:
    """Write title and labels, remove the frame, and add a light grid."""
    ax.set_title(title, fontsize=TITLE_PT)
    ax.set_xlabel(x, fontsize=SMALL_PT)
    ax.set_ylabel(y, fontsize=SMALL_PT)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.tick_params(labelsize=SMALL_PT)
    ax.set_axisbelow(True)
    ax.grid(axis=grid, color="#DDDDDD", linewidth=0.6)


def explain_(ax: Axes, handles: Sequence[Artist]) -> None:
    """Add a one-line legend below the axes and their label."""
    from matplotlib.transforms import ScaledTranslation

    below = ScaledTranslation(0.0, -0.4, figure_of(ax).dpi_scale_trans)
    ax.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.0, 0.0),
        bbox_transform=ax.transAxes + below,
        borderaxespad=0.0,
        ncols=len(handles),
        columnspacing=1.2,
        handlelength=1.4,
        frameon=False,
        fontsize=SMALL_PT,
    )


class Bar(NamedTuple):
    """A rectangle in axes units, by its vertical centre and its start."""

    row: float
    start: float
    width: float
    colour: str
    edge: str


def fill_(ax: Axes, bars: Sequence[Bar], height: float) -> None:
    """Draw bars as one artist, because there may be thousands."""
    from matplotlib.collections import PolyCollection

    corners = np.array([(0.0, -0.5), (1.0, -0.5), (1.0, 0.5), (0.0, 0.5)])
    ax.add_collection(
        PolyCollection(
            [corners * (bar.width, height) + (bar.start, bar.row) for bar in bars],
            facecolors=[bar.colour for bar in bars],
            edgecolors=[bar.edge for bar in bars],
            linewidths=0.5,
        )
    )


def size_in(ax: Axes) -> tuple[float, float]:
    """Return width and height in inches, after layout."""
    figure = figure_of(ax)
    figure.draw_without_rendering()  # lays it out
    box = ax.get_window_extent().transformed(figure.dpi_scale_trans.inverted())
    return box.width, box.height


def shortened(path: str, width_in: float) -> str:
    """Return the last keys of the path that fit, or "" if fewer than nine letters fit.

    Example:
        >>> shortened("layers.0.attention.weight", 1.2)
        '…attention.weight'
        >>> shortened("layers.0.attention.weight", 0.1)
        ''
    """
    fitting = int(width_in / (0.57 * SMALL_PT / 72.0))  # letters of average width
    if len(path) <= fitting:
        return path
    rest = path
    while "." in rest:
        rest = rest.partition(".")[2]
        if _LEAST_LETTERS <= len(rest) < fitting:
            return f"…{rest}"
    return ""


def write_on_(ax: Axes, x: float, y: float, text: str, colour: str) -> None:
    """Write small text in the middle of a bar of this colour, outside of the layout."""
    ax.text(
        x,
        y,
        text,
        size=SMALL_PT,
        color="white" if colour in _DARK else "black",
        ha="center",
        va="center_baseline",
    ).set_in_layout(False)
