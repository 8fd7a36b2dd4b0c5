"""Bucket plans as stacked bars."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count as count_from
from typing import TYPE_CHECKING, Any

from fddp import Bucket, BucketPlan, plan_buckets
from fddp.extend import counted, entrance, size_text, summary, unit_of
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
_SPARSE = "sparse, as if dense"

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


@entrance
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


@entrance
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
    axes = canvas.new_figure(max(_height_in(a), _height_in(b)), columns=2)
    extent_bytes = max(_extent(a), _extent(b))
    for ax, plan, name in zip(axes, (a, b), names, strict=True):
        largest = size_text(max((bucket.nbytes for bucket in plan.buckets), default=0))
        title = f"{name}: {counted(len(plan.buckets), 'bucket')}, largest {largest}"
        _draw_(ax, plan, title, extent_bytes)
    right = max(ax.get_xlim()[1] for ax in axes)  # their widths may differ by a few pixels
    for ax in axes:
        ax.set_xlim(0.0, right)
    return canvas.figure_of(axes[0])


def _class_of(bucket: Bucket) -> str:
    return _SPARSE if bucket.sparse else f"{bucket.dtype} on {bucket.device}"


def _height_in(plan: BucketPlan) -> float:
    return min(_AROUND_IN + _ROW_IN * max(len(plan.buckets), 2), _HIGHEST_IN)


def _extent(plan: BucketPlan) -> int:
    largest = max((bucket.nbytes for bucket in plan.buckets), default=0)
    caps = (bucket.cap_bytes for bucket in plan.buckets)
    return max(largest, *(cap for cap in caps if cap <= _LONGEST_CAP * largest), 1)


def _draw_(ax: Axes, plan: BucketPlan, title: str, extent_bytes: int) -> None:
    unit, unit_bytes = unit_of(extent_bytes)
    extent = extent_bytes / unit_bytes
    shades = _shades(plan)
    count = max(len(plan.buckets), 1)
    ax.set_xlim(0.0, extent)
    ax.set_ylim(count - 0.5, -0.5)
    ax.set_yticks(range(0, len(plan.buckets), _tick_step(count, canvas.size_in(ax)[1])))
    canvas.label_(ax, title=title, x=unit, y="bucket", grid="x")
    canvas.explain_(ax, _legend(shades))
    width_in, height_in = canvas.size_in(ax)
    x_inch = extent / max(width_in - _MARGIN_IN, _MARGIN_IN)
    ax.set_xlim(0.0, x_inch * width_in)
    ax.set_ylim(max(count, height_in / _MOST_ROW_IN) - 0.5, -0.5)
    row_in = height_in / count
    bars = []
    for number, bucket in enumerate(plan.buckets):
        start, shade_start, shade = 0.0, 0.0, 0
        cap = bucket.cap_bytes / unit_bytes
        for leaf in bucket.leaves:
            if start - shade_start >= _STRIPE * extent:
                shade_start, shade = start, 1 - shade
            width = plan.leaves[leaf].nbytes / unit_bytes
            colour = shades[_class_of(bucket)][shade]
            bars.append(canvas.Bar(number, start, width, colour, "none"))
            if row_in >= _LEAST_TEXT_IN:
                _name_(ax, plan.paths[leaf], bars[-1], cap, x_inch)
            start += width
        if row_in >= _LEAST_TEXT_IN:
            _write_note_(ax, number, counted(len(bucket.leaves), "leaf"), start, cap, x_inch)
        if 0.0 < cap <= extent:
            ax.vlines(cap, number - 0.5, number + 0.5, colors="black", linewidths=1.2)
    canvas.fill_(ax, bars, height=1.0 - _GAP if row_in >= _LEAST_GAP_IN else 1.0)


def _tick_step(rows: int, height_in: float) -> int:
    steps = (digit * int(10**power) for power in count_from() for digit in (1, 2, 5))
    return next(step for step in steps if height_in * step / rows >= _LEAST_TICK_IN)


def _shades(plan: BucketPlan) -> dict[str, tuple[str, str]]:
    kinds = {_class_of(bucket) for bucket in plan.buckets}
    dense = enumerate(sorted(kinds - {_SPARSE}))
    shades = {kind: _SHADES[number % len(_SHADES)] for number, kind in dense}
    return {**shades, _SPARSE: (canvas.GREY, canvas.GREY)} if _SPARSE in kinds else shades


def _name_(ax: Axes, path: str, bar: canvas.Bar, cap: float, x_inch: float) -> None:
    start, end = bar.start, bar.start + bar.width
    if start < cap < end:  # on the wider side of its mark
        start, end = (start, cap) if cap - start > end - cap else (cap, end)
    text = canvas.shortened(path, (end - start) / x_inch - 0.1)
    if text:
        canvas.write_on_(ax, (start + end) / 2.0, bar.row, text, bar.colour)


def _write_note_(ax: Axes, row: int, note: str, end: float, cap: float, x_inch: float) -> None:
    if end < cap < end + _MARGIN_IN * x_inch:
        end = cap  # beyond its mark
    ax.text(
        end + 0.07 * x_inch,
        row,
        note,
        size=canvas.SMALL_PT,
        color="#555555",
        va="center_baseline",
    ).set_in_layout(False)


def _legend(shades: Mapping[str, tuple[str, str]]) -> list[Artist]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds: list[Artist] = [Patch(color=pair[0], label=name) for name, pair in shades.items()]
    return [*kinds, Line2D([], [], color="black", linewidth=1.2, label="cap")]
