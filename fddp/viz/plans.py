"""Bucket plans as stacked bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fddp.core.plan.defaults import MIB
from fddp.core.plan.plan import Bucket, BucketPlan, summary
from fddp.tree.planner import plan_buckets
from fddp.viz import canvas

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Two shades for each dtype and device, to distinguish neighbours in a bar.
_SHADES = (
    (canvas.BLUE, "#7DBFE3"),
    (canvas.ORANGE, "#F7D692"),
    (canvas.GREEN, "#7FD1BA"),
    (canvas.PURPLE, "#EBCADC"),
    (canvas.VERMILION, "#F2AE80"),
)
_SPARSE_SHADES = (canvas.GREY, canvas.GREY)

_ROW_IN = 0.24
_AROUND_IN = 1.2  # title, numbers and legend
_HIGHEST_IN = 8.0
_MOST_ROW_IN = 0.4
_LEAST_TEXT_IN = 0.13  # lower rows have no text
_LEAST_GAP_IN = 0.05  # lower rows have no gaps
_LEAST_TICK_IN = 0.2
_GAP = 0.2  # of a row
_MARGIN_IN = 0.65  # on the right, for the number of leaves
_LONGEST_CAP = 1.3  # of the largest bucket; larger caps are not drawn
_STRIPE = 0.004  # of the axis; narrower leaves share a shade


class _Segment(NamedTuple):
    """A leaf and its part of a bar, in MiB."""

    path: str
    bar: canvas.Bar


def plot_plan(plan: Any, ax: Axes | None = None) -> Figure:
    """Plot a bucket plan: a bar for each bucket, in launch order from the top, stacked by leaf.

    Consecutive leaves differ in shade, dtypes and devices in colour. Large leaves have labels. A
    black line marks the cap of a bucket, unless it is far off.

    Args:
        plan: the plan; or a tree or an `nn.Module`, for the plan of `plan_buckets`.
        ax: axes to draw into; None creates a figure.

    Raises:
        ImportError: matplotlib is missing.

    Example:
        >>> import fddp, numpy as np
        >>> plan = fddp.plan_buckets({"w": np.zeros((512, 512)), "b": np.zeros(512)})
        >>> plot_plan(plan).axes[0].get_xlabel()
        'MiB'
    """
    if not isinstance(plan, BucketPlan):
        plan = plan_buckets(plan)
    if ax is None:
        (ax,) = canvas.new_figure(_height_in(plan))
    _draw_(ax, plan, summary(plan), _extent(plan))
    return canvas.figure_of(ax)


def compare_plans(a: BucketPlan, b: BucketPlan, *, names: tuple[str, str] = ("a", "b")) -> Figure:
    """Plot two plans side by side on the same scale; see `plot_plan`.

    Args:
        a: the plan on the left.
        b: the plan on the right.
        names: names of the plans.

    Raises:
        ImportError: matplotlib is missing.

    Example:
        >>> import fddp, numpy as np
        >>> tree = {"a": np.zeros((512, 512)), "b": np.zeros((512, 512))}
        >>> plans = [fddp.plan_buckets(tree, bucket_cap_mb=[cap]) for cap in (1.0, 25.0)]
        >>> [ax.get_title() for ax in compare_plans(*plans, names=("1 MiB", "25 MiB")).axes]
        ['1 MiB: 2 buckets, largest 2 MiB', '25 MiB: 1 bucket, largest 4 MiB']
    """
    axes = canvas.new_figure(max(map(_height_in, (a, b))), columns=2)
    extent = max(map(_extent, (a, b)))
    for ax, plan, name in zip(axes, (a, b), names, strict=True):
        largest = max((bucket.nbytes for bucket in plan.buckets), default=0) / MIB
        title = f"{name}: {_counted(len(plan.buckets), 'bucket')}, largest {largest:.4g} MiB"
        _draw_(ax, plan, title, extent)
    right = max(ax.get_xlim()[1] for ax in axes)  # their widths may differ by a few pixels
    for ax in axes:
        ax.set_xlim(0.0, right)
    return canvas.figure_of(axes[0])


def _height_in(plan: BucketPlan) -> float:
    return min(_AROUND_IN + _ROW_IN * max(len(plan.buckets), 2), _HIGHEST_IN)


def _extent(plan: BucketPlan) -> float:
    largest = max((bucket.nbytes for bucket in plan.buckets), default=0)
    caps = (bucket.cap_bytes for bucket in plan.buckets)
    return max(largest, *(cap for cap in caps if cap <= _LONGEST_CAP * largest), 1) / MIB


def _draw_(ax: Axes, plan: BucketPlan, title: str, extent: float) -> None:
    shades = _shades(plan)
    rows = max(len(plan.buckets), 1)
    ax.set_xlim(0.0, extent)
    ax.set_ylim(rows - 0.5, -0.5)
    canvas.label_(ax, title=title, x="MiB", y="bucket", grid="x")
    canvas.explain_(ax, _legend(shades))
    width_in, height_in = canvas.size_in(ax)
    x_inch = extent / max(width_in - _MARGIN_IN, _MARGIN_IN)
    ax.set_xlim(0.0, x_inch * width_in)
    ax.set_ylim(max(rows, height_in / _MOST_ROW_IN) - 0.5, -0.5)
    ax.set_yticks(range(0, rows, _tick_step(rows, height_in)))
    segments = list(_segments(plan, shades, _STRIPE * extent))
    bars = [segment.bar for segment in segments]
    row_in = height_in / rows
    canvas.fill_(ax, bars, height=1.0 - _GAP if row_in >= _LEAST_GAP_IN else 1.0)
    _mark_caps_(ax, plan, extent)
    if row_in >= _LEAST_TEXT_IN:
        _name_leaves_(ax, segments, x_inch)
        _count_leaves_(ax, plan, x_inch)


def _tick_step(rows: int, height_in: float) -> int:
    steps = (digit * int(10**power) for power in count() for digit in (1, 2, 5))
    return next(step for step in steps if height_in * step / rows >= _LEAST_TICK_IN)


def _shades(plan: BucketPlan) -> dict[str, tuple[str, str]]:
    dense = sorted({_class_of(bucket) for bucket in plan.buckets if not bucket.sparse})
    shades = {name: _SHADES[number % len(_SHADES)] for number, name in enumerate(dense)}
    sparse = sorted({_class_of(bucket) for bucket in plan.buckets if bucket.sparse})
    return {**shades, **dict.fromkeys(sparse, _SPARSE_SHADES)}


def _class_of(bucket: Bucket) -> str:
    return "sparse, as if dense" if bucket.sparse else f"{bucket.dtype} on {bucket.device}"


def _segments(
    plan: BucketPlan, shades: dict[str, tuple[str, str]], stripe: float
) -> Iterator[_Segment]:
    for row, bucket in enumerate(plan.buckets):
        start, shade_start, shade = 0.0, 0.0, 0
        for leaf in bucket.leaves:
            if start - shade_start >= stripe:
                shade_start, shade = start, 1 - shade
            width = plan.leaves[leaf].nbytes / MIB
            colour = shades[_class_of(bucket)][shade]
            yield _Segment(plan.paths[leaf], canvas.Bar(row, start, width, colour, "none"))
            start += width


def _mark_caps_(ax: Axes, plan: BucketPlan, extent: float) -> None:
    marks = [
        (row, bucket.cap_bytes / MIB)
        for row, bucket in enumerate(plan.buckets)
        if not bucket.sparse and bucket.cap_bytes / MIB <= extent
    ]
    rows = np.array([row for row, _ in marks])
    ax.vlines([cap for _, cap in marks], rows - 0.5, rows + 0.5, colors="black", linewidths=1.2)


def _name_leaves_(ax: Axes, segments: Sequence[_Segment], x_inch: float) -> None:
    for path, bar in segments:
        text = canvas.shortened(path, bar.width / x_inch - 0.1)
        if text:
            canvas.write_on_(ax, bar.start + bar.width / 2.0, bar.row, text, bar.colour)


def _count_leaves_(ax: Axes, plan: BucketPlan, x_inch: float) -> None:
    for row, bucket in enumerate(plan.buckets):
        end, cap = bucket.nbytes / MIB, bucket.cap_bytes / MIB
        if end < cap < end + _MARGIN_IN * x_inch:
            end = cap  # beyond its mark
        ax.text(
            end + 0.07 * x_inch,
            row,
            _counted(len(bucket.leaves), "leaf", "leaves"),
            size=canvas.SMALL_PT,
            color="#555555",
            va="center_baseline",
        ).set_in_layout(False)


def _counted(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _legend(shades: dict[str, tuple[str, str]]) -> list[Artist]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    cap = Line2D([], [], color="black", linewidth=1.2, label="cap")
    return [*(Patch(color=pair[0], label=name) for name, pair in shades.items()), cap]
