"""Bucket plans as stacked bars."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count as count_from
from itertools import groupby, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fddp.core.plan.plan import Bucket, BucketPlan, summary
from fddp.core.text import counted, size_text, unit_of
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
_NAMED = 0.1  # of the largest bucket; narrower leaves have no room for labels
_COMMON = 0.9  # of all paths; keys that so many begin with are left out
_MOST_BUCKETS = 50  # with bars of their own, which are high enough for text


class _Part(NamedTuple):
    """A part of a bar: a leaf, the leaves of a layer, or a bucket."""

    label: str
    nbytes: int
    kind: str  # dtype and device


class _Row(NamedTuple):
    """A bar: a bucket, or the buckets of a layer."""

    label: str
    note: str  # at its end
    cap_bytes: int  # 0 for none
    parts: Sequence[_Part]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def plot_plan(plan: Any, ax: Axes | None = None) -> Figure:
    """Plot a bucket plan: a bar for each bucket, in launch order from the top, stacked by leaf.

    Consecutive leaves differ in shade, dtypes and devices in colour. Large leaves have labels,
    without the part that all paths begin with. A black line marks the cap of a bucket, unless it is
    far off. If most leaves are too narrow for labels, those of one layer are drawn as one part; if
    there are too many buckets for bars of their own, those of one layer share a bar. A layer is the
    path up to its first number.

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
    rows = _rows(plan)
    if ax is None:
        (ax,) = canvas.new_figure(_height_in(rows))
    _draw_(ax, plan, rows, summary(plan), _extent(rows))
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
    rows = [_rows(plan) for plan in (a, b)]
    axes = canvas.new_figure(max(map(_height_in, rows)), columns=2)
    extent_bytes = max(map(_extent, rows))
    for ax, own, plan, name in zip(axes, rows, (a, b), names, strict=True):
        largest = size_text(max((bucket.nbytes for bucket in plan.buckets), default=0))
        title = f"{name}: {counted(len(plan.buckets), 'bucket')}, largest {largest}"
        _draw_(ax, plan, own, title, extent_bytes)
    right = max(ax.get_xlim()[1] for ax in axes)  # their widths may differ by a few pixels
    for ax in axes:
        ax.set_xlim(0.0, right)
    return canvas.figure_of(axes[0])


def _rows(plan: BucketPlan) -> list[_Row]:
    layers = [_layer(path) for path in plan.paths]
    firsts = [layers[bucket.leaves[0]] for bucket in plan.buckets]
    bars = sum(1 for _ in groupby(firsts))
    if len(firsts) > _MOST_BUCKETS and 2 * bars < len(firsts):
        return _layer_rows(plan, firsts)
    return _bucket_rows(plan, layers)


def _layer(path: str) -> str:
    """Return a path up to its first number; without its last key, if there is none.

    Example:
        >>> _layer("model.layers.3.mlp.weight"), _layer("lm_head.weight"), _layer("w")
        ('model.layers.3', 'lm_head', 'w')
    """
    keys = path.split(".")
    numbers = (at for at, key in enumerate(keys) if key.isdigit())
    return ".".join(keys[: next(numbers, max(len(keys) - 2, 0)) + 1])


def _without_prefix(paths: Sequence[str]) -> dict[str, str]:
    """Return each path without the keys that most of them begin with. The last key stays, and the
    one before a number, which names what is numbered.

    Example:
        >>> _without_prefix(["model.layers.0.w", "model.layers.1.w"])
        {'model.layers.0.w': 'layers.0.w', 'model.layers.1.w': 'layers.1.w'}
    """
    short = {path: path for path in paths}
    while short:
        ((key, _),) = Counter(left.partition(".")[0] for left in short.values()).most_common(1)
        begun = {path for path, left in short.items() if left.startswith(f"{key}.")}
        rest = {path: left.removeprefix(f"{key}.") for path, left in short.items()}
        numbered = any(rest[path].partition(".")[0].isdigit() for path in begun)
        if numbered or len(begun) < _COMMON * len(short) or len({*rest.values()}) < len(short):
            break
        short = rest
    return short


def _layer_rows(plan: BucketPlan, firsts: Sequence[str]) -> list[_Row]:
    names = _without_prefix(firsts)
    rows = []
    for layer, own in groupby(zip(firsts, plan.buckets, strict=True), key=itemgetter(0)):
        parts = [_Part("", bucket.nbytes, _class_of(bucket)) for _, bucket in own]
        rows.append(_Row(names[layer], counted(len(parts), "bucket"), 0, parts))
    return rows


def _bucket_rows(plan: BucketPlan, layers: Sequence[str]) -> list[_Row]:
    largest = max((bucket.nbytes for bucket in plan.buckets), default=0)
    narrow = sum(plan.leaves[leaf].nbytes < _NAMED * largest for leaf in plan.order)
    by_layer = 2 * narrow > len(plan.order)
    names = _without_prefix([plan.paths[leaf] for leaf in plan.order])
    layer_names = _without_prefix([layers[leaf] for leaf in plan.order])
    rows = []
    for number, bucket in enumerate(plan.buckets):
        parts, kind = [], _class_of(bucket)
        for layer, own in groupby(bucket.leaves, key=layers.__getitem__):
            leaves = list(own)
            sizes = [plan.leaves[leaf].nbytes for leaf in leaves]
            if by_layer and len(leaves) > 1:
                parts.append(_Part(layer_names[layer], sum(sizes), kind))
            else:
                labels = [names[plan.paths[leaf]] for leaf in leaves]
                parts.extend(map(_Part, labels, sizes, repeat(kind)))
        note = counted(len(bucket.leaves), "leaf")
        cap_bytes = 0 if bucket.sparse else bucket.cap_bytes
        rows.append(_Row(str(number), note, cap_bytes, parts))
    return rows


def _class_of(bucket: Bucket) -> str:
    return "sparse, as if dense" if bucket.sparse else f"{bucket.dtype} on {bucket.device}"


def _height_in(rows: Sequence[_Row]) -> float:
    return min(_AROUND_IN + _ROW_IN * max(len(rows), 2), _HIGHEST_IN)


def _extent(rows: Sequence[_Row]) -> int:
    largest = max((row.nbytes for row in rows), default=0)
    return max(largest, *(r.cap_bytes for r in rows if r.cap_bytes <= _LONGEST_CAP * largest), 1)


def _draw_(ax: Axes, plan: BucketPlan, rows: Sequence[_Row], title: str, extent_bytes: int) -> None:
    unit, unit_bytes = unit_of(extent_bytes)
    extent = extent_bytes / unit_bytes
    shades = _shades(rows)
    count = max(len(rows), 1)
    by_bucket = len(rows) == len(plan.buckets)
    ax.set_xlim(0.0, extent)
    ax.set_ylim(count - 0.5, -0.5)
    step = _tick_step(count, canvas.size_in(ax)[1])
    ax.set_yticks(range(0, len(rows), step), [row.label for row in rows[::step]])
    what = "bucket" if by_bucket else "layer, with a part for each bucket"
    canvas.label_(ax, title=title, x=unit, y=what, grid="x")
    canvas.explain_(ax, _legend(shades, has_caps=by_bucket))
    width_in, height_in = canvas.size_in(ax)
    x_inch = extent / max(width_in - _MARGIN_IN, _MARGIN_IN)
    ax.set_xlim(0.0, x_inch * width_in)
    ax.set_ylim(max(count, height_in / _MOST_ROW_IN) - 0.5, -0.5)
    row_in = height_in / count
    bars = []
    for number, row in enumerate(rows):
        own = list(_bars(number, row, shades, unit_bytes, _STRIPE * extent))
        bars.extend(own)
        if row_in >= _LEAST_TEXT_IN:
            _name_parts_(ax, row, own, unit_bytes, x_inch)
            _write_note_(ax, number, row, unit_bytes, x_inch)
    canvas.fill_(ax, bars, height=1.0 - _GAP if row_in >= _LEAST_GAP_IN else 1.0)
    caps = {n: row.cap_bytes / unit_bytes for n, row in enumerate(rows) if row.cap_bytes}
    near = {number: cap for number, cap in caps.items() if cap <= extent}
    edges = np.array([*near])
    ax.vlines([*near.values()], edges - 0.5, edges + 0.5, colors="black", linewidths=1.2)


def _tick_step(rows: int, height_in: float) -> int:
    steps = (digit * int(10**power) for power in count_from() for digit in (1, 2, 5))
    return next(step for step in steps if height_in * step / rows >= _LEAST_TICK_IN)


def _shades(rows: Sequence[_Row]) -> dict[str, tuple[str, str]]:
    sparse = "sparse, as if dense"
    kinds = {part.kind for row in rows for part in row.parts}
    dense = enumerate(sorted(kinds - {sparse}))
    shades = {kind: _SHADES[number % len(_SHADES)] for number, kind in dense}
    return {**shades, sparse: _SPARSE_SHADES} if sparse in kinds else shades


def _bars(
    number: int, row: _Row, shades: dict[str, tuple[str, str]], unit_bytes: int, stripe: float
) -> Iterator[canvas.Bar]:
    start, shade_start, shade = 0.0, 0.0, 0
    for part in row.parts:
        if start - shade_start >= stripe:
            shade_start, shade = start, 1 - shade
        width = part.nbytes / unit_bytes
        yield canvas.Bar(number, start, width, shades[part.kind][shade], "none")
        start += width


def _name_parts_(
    ax: Axes, row: _Row, bars: Sequence[canvas.Bar], unit_bytes: int, x_inch: float
) -> None:
    cap = row.cap_bytes / unit_bytes
    for part, bar in zip(row.parts, bars, strict=True):
        start, end = bar.start, bar.start + bar.width
        if start < cap < end:  # on the wider side of its mark
            start, end = (start, cap) if cap - start > end - cap else (cap, end)
        text = canvas.shortened(part.label, (end - start) / x_inch - 0.1)
        if text:
            canvas.write_on_(ax, (start + end) / 2.0, bar.row, text, bar.colour)


def _write_note_(ax: Axes, number: int, row: _Row, unit_bytes: int, x_inch: float) -> None:
    end, cap = row.nbytes / unit_bytes, row.cap_bytes / unit_bytes
    if end < cap < end + _MARGIN_IN * x_inch:
        end = cap  # beyond its mark
    ax.text(
        end + 0.07 * x_inch,
        number,
        row.note,
        size=canvas.SMALL_PT,
        color="#555555",
        va="center_baseline",
    ).set_in_layout(False)


def _legend(shades: dict[str, tuple[str, str]], *, has_caps: bool) -> list[Artist]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds: list[Artist] = [Patch(color=pair[0], label=name) for name, pair in shades.items()]
    cap = Line2D([], [], color="black", linewidth=1.2, label="cap")
    return [*kinds, cap] if has_caps else kinds
