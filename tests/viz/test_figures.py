"""Figures show what they say: read from the artists, and rendered once."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

import fddp
from fddp.core.plan.plan import BucketPlan, LeafSpec, plan_leaves
from fddp.core.sim.cost import CostModel
from fddp.core.timeline import BucketTimes, Span, StepTimes, Timeline
from fddp.viz import (
    canvas,
    compare_plans,
    plot_caps,
    plot_periodic,
    plot_plan,
    plot_timeline,
)
from tests.support.programs import run_python

MIB = 2**20


def make_plan(*mib: float, caps_mib: tuple[float, ...] = (1.0,)) -> BucketPlan:
    """A plan of leaves of these sizes, in their order."""
    leaves = [
        LeafSpec(f"layers.{number:02d}.weight", (int(size * MIB / 4),), "float32")
        for number, size in enumerate(mib)
    ]
    caps_bytes = [int(cap * MIB) for cap in caps_mib]
    return plan_leaves(leaves, order=range(len(leaves)), caps_bytes=caps_bytes)


def boxes(ax: Axes) -> list[tuple[float, float, float]]:
    """Row, start and end of each bar."""
    found = []
    for collection in ax.collections:
        if isinstance(collection, PolyCollection):
            for path in collection.get_paths():
                box = path.get_extents()
                found.append(((box.y0 + box.y1) / 2.0, box.x0, box.x1))
    return found


def texts(ax: Axes) -> set[str]:
    return {text.get_text() for text in ax.texts} - {""}


def legend(ax: Axes) -> list[str]:
    found = ax.get_legend()
    assert found is not None
    return [text.get_text() for text in found.get_texts()]


def render(figure: Figure) -> bytes:
    """PNG; warnings of the layout are errors."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def test_a_bar_ends_where_the_average_is_applied() -> None:
    tree = {"layers": [torch.zeros(4) for _ in range(4)]}
    schedule = fddp.periodic.streaming_diloco(tree, 10, fragments=2, delay=2)
    figure = plot_periodic(schedule, 14)
    ax = figure.axes[0]
    assert sorted(boxes(ax)) == [pytest.approx(box) for box in [(0, 4.0, 6.0), (1, 9.0, 11.0)]]
    starts, applied = ax.lines
    assert [*starts.get_xdata(), *applied.get_xdata()] == [4, 9, 6, 11]
    assert legend(ax) == ["start", "apply"]
    assert render(figure)


# Plans


def test_a_bar_holds_its_leaves_from_end_to_end() -> None:
    ax = plot_plan(make_plan(2.0, 0.5, 0.5, 0.25)).axes[0]
    assert boxes(ax) == [
        pytest.approx(box) for box in [(0, 0.0, 2.0), (1, 0.0, 0.5), (1, 0.5, 1.0), (2, 0.0, 0.25)]
    ]
    (bars,) = (one for one in ax.collections if isinstance(one, PolyCollection))
    first, second = (tuple(colour) for colour in bars.get_facecolor()[1:3])
    assert first != second, "neighbours differ in shade"
    bottom, top = ax.get_ylim()
    assert top < 0 < 2 < bottom  # the first bucket is at the top
    assert {"1 leaf", "2 leaves"} <= texts(ax)
    assert ax.get_title() == "3 buckets, 4 of 4 leaves, 3.25 MiB, cap 1 MiB"


def test_large_leaves_are_named_within_their_bars() -> None:
    figure = plot_plan(make_plan(0.9, 0.05, 0.05, 3.0))
    ax = figure.axes[0]
    assert "layers.03.weight" in texts(ax)
    assert not any("02" in text for text in texts(ax))
    figure.draw_without_rendering()
    for text in ax.texts:
        shown = text.get_window_extent()
        frame = figure.bbox
        assert frame.x0 <= shown.x0 < shown.x1 <= frame.x1
        if "weight" in text.get_text():
            in_data = shown.transformed(ax.transData.inverted())
            row = round(text.get_position()[1])
            assert any(
                round(at) == row and start <= in_data.x0 and in_data.x1 <= end
                for at, start, end in boxes(ax)
            )


def test_caps_are_marked_where_they_are_near() -> None:
    def marks(plan: BucketPlan) -> list[float]:
        found = plot_plan(plan).axes[0].collections
        lines = (one for one in found if type(one) is LineCollection)
        return [line.get_segments()[0][0][0] for line in lines]

    assert marks(make_plan(1.0, 2.0, 2.0, caps_mib=(0.5, 1.5))) == [0.5, 1.5, 1.5]
    assert marks(make_plan(1.0, caps_mib=(25.0,))) == []


def test_classes_have_colours_of_their_own() -> None:
    tree = {
        "a": np.zeros(MIB, np.float32),
        "b": np.zeros(MIB, np.float64),
        "c": np.zeros(MIB, np.float32),
    }
    ax = plot_plan(fddp.plan_buckets(tree, sparse=["c"])).axes[0]
    assert legend(ax) == ["float32 on cpu", "float64 on cpu", "sparse, as if dense", "cap"]
    (bars,) = (one for one in ax.collections if isinstance(one, PolyCollection))
    assert len({tuple(colour) for colour in bars.get_facecolor()}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        BucketPlan((), (), (1,), ()),
        make_plan(0.0),
        make_plan(*[0.01] * 40, caps_mib=(0.01,)),
        make_plan(*[0.01] * 3000, caps_mib=(0.02,)),
        plan_leaves([LeafSpec("", (3,), "float32")], order=[0], caps_bytes=[1]),
    ],
    ids=["empty", "nothing", "many", "thousands", "bare leaf"],
)
def test_random_plans_render(plan: BucketPlan) -> None:
    figure = plot_plan(plan)
    assert render(figure).startswith(b"\x89PNG")
    assert figure.get_size_inches()[1] <= 8.0
    assert len(boxes(figure.axes[0])) == len(plan.order)


@pytest.mark.slow
def test_two_plans_have_one_scale() -> None:
    small, large = make_plan(1.0, 1.0, 1.0), make_plan(1.0, 1.0, 1.0, caps_mib=(3.0,))
    figure = compare_plans(small, large, names=("small", "large"))
    left, right = figure.axes
    assert left.get_xlim() == right.get_xlim()
    assert left.get_title() == "small: 3 buckets, largest 1 MiB"
    assert right.get_title() == "large: 1 bucket, largest 3 MiB"
    assert [len(boxes(ax)) for ax in (left, right)] == [3, 3]
    render(figure)


# Timelines


def make_timeline() -> Timeline:
    tree = {name: np.zeros(MIB, np.float32) for name in "abc"}
    plan = fddp.plan_buckets(tree, bucket_cap_mb=[4.0])
    schedule = fddp.make_schedule(plan, fddp.Topology(host=2, local=2), algorithm="hierarchical")
    ready_s = {"c": 0.01, "b": 0.02, "a": 0.03}
    return fddp.simulate(schedule, CostModel(1e-3, 1e-9), ready_s)


def test_lanes_hold_the_spans_and_what_is_exposed() -> None:
    timeline = make_timeline()
    figure = plot_timeline(timeline)
    ax = figure.axes[0]
    lanes = [label.get_text() for label in ax.get_yticklabels()]
    assert lanes[0] == "compute"
    assert set(lanes[1:]) == {"local", "host", "host + local"}
    wanted = sorted(
        (lanes.index(span.lane.replace("+", " + ")), span.start_s * 1e3, span.end_s * 1e3)
        for span in timeline.spans
        if span.end_s > span.start_s
    )
    assert sorted(boxes(ax)) == [pytest.approx(box, abs=1e-9) for box in wanted]
    assert {"backward", "reduce_scatter", "all_reduce", "all_gather", "control"} < set(legend(ax))
    assert {"backward", "0", "1", "2"} <= texts(ax)
    render(figure)
    # Exposed communication is shaded.
    (shade,) = (patch for patch in ax.patches if isinstance(patch, (Rectangle, Polygon)))
    box = shade.get_extents().transformed(ax.transData.inverted())
    assert (box.x0, box.x1) == pytest.approx((30.0, timeline.step_s * 1e3))
    assert f"{timeline.exposed_s * 1e3:.2f} ms exposed" in ax.get_title()
    assert ax.get_xlim()[1] >= timeline.step_s * 1e3


def test_launches_are_marked() -> None:
    span = Span(0, "all_reduce", 0, "world", "all_reduce 0", 0.001, 0.004, 0.005)
    ax = plot_timeline(Timeline((span,), 0.002, 0.005, 3, (0.005,))).axes[0]
    render(plot_timeline(Timeline((), 0.0, 0.0, 0, (0.0,))))
    (launches,) = (line for line in ax.lines if line.get_marker() == "v" and len(line.get_xdata()))
    assert list(launches.get_xdata()) == [1.0]
    assert ax.get_title().startswith("rank 3:")


def test_a_measured_step_is_drawn_alike() -> None:
    times = (BucketTimes(0, 4, 11.0, 11.0, 13.0), BucketTimes(1, 4, 12.0, 12.0, 14.0))
    step = StepTimes(times, 10.0, 12.5, 14.0)
    ax = plot_timeline(step).axes[0]
    timeline_ax = plot_timeline(step.to_timeline()).axes[0]
    assert boxes(ax) == boxes(timeline_ax)
    assert ax.get_title() == timeline_ax.get_title()
    assert boxes(ax)[1:] == [pytest.approx(box) for box in [(1, 1e3, 3e3), (1, 3e3, 4e3)]]


# Caps


def test_step_times_by_cap() -> None:
    figure = plot_caps({25.0: 0.03, 1.0: 0.02}, {5.0: 0.025}, {"backward alone": 0.015})
    ax = figure.axes[0]
    simulated, measured, level = ax.lines
    assert simulated.get_xydata().tolist() == [[1.0, 20.0], [25.0, 30.0]]
    assert measured.get_xydata().tolist() == [[5.0, 25.0]]
    assert list(level.get_ydata()) == [15.0, 15.0]
    assert legend(ax) == ["simulated", "measured", "backward alone"]
    assert ax.get_xscale() == "log"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "5", "25"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("bucket cap, MiB", "step, ms")
    render(figure)


@pytest.mark.parametrize("simulated_s", [{}, {0.0: 1.0}, {-1.0: 1.0}])
def test_caps_must_be_positive(simulated_s: dict[float, float]) -> None:
    with pytest.raises(ValueError, match="caps above 0 MiB as keys, got"):
        plot_caps(simulated_s)


@pytest.mark.slow
def test_small_differences_look_small() -> None:
    low, high = plot_caps({1.0: 0.1000, 2.0: 0.1001}).axes[0].get_ylim()
    assert high - low == pytest.approx(0.116 * 100.1)


@pytest.mark.parametrize("slowest_s", [0.021, 0.03, 0.5])
def test_no_marker_of_times_is_clipped(slowest_s: float) -> None:
    figure = plot_caps({1.0: 0.02, 5.0: slowest_s}, {5.0: slowest_s}, {"backward": 0.02})
    (ax,) = figure.axes
    figure.draw_without_rendering()
    bottom, top = ax.transAxes.transform([(0.0, 0.0), (0.0, 1.0)])[:, 1]
    _, highest = ax.transData.transform((5.0, slowest_s * 1e3))
    _, lowest = ax.transData.transform((1.0, 20.0))
    assert highest + 5.0 < top
    assert lowest - 5.0 > bottom
    assert highest - lowest > 0.4 * (top - bottom)


def test_times_far_apart_have_a_logarithmic_axis() -> None:
    (ax,) = plot_caps({1.0: 0.3, 5.0: 0.02}).axes
    assert ax.get_yscale() == "log"
    low, high = ax.get_ylim()
    assert [tick for tick in ax.get_yticks() if low <= tick <= high] == [20.0, 50.0, 100.0, 200.0]
    assert {"20", "200"} <= {label.get_text() for label in ax.get_yticklabels()}


# All


def test_axes_of_the_caller_are_used_unless_they_were_removed() -> None:
    figure = Figure(figsize=(9, 8), layout="constrained")
    axes = figure.subplots(3, 1)
    assert plot_plan(make_plan(1.0, 2.0), ax=axes[0]) is figure
    assert plot_timeline(make_timeline(), ax=axes[1]) is figure
    assert plot_caps({1.0: 0.02}, ax=axes[2]) is figure
    assert figure.axes == list(axes)
    render(figure)
    figure = Figure(layout="constrained")
    ax = figure.subfigures(1, 2)[0].subplots()
    assert plot_caps({1.0: 0.02}, ax=ax) is figure
    ax.remove()
    with pytest.raises(ValueError, match="ax was removed from its figure"):
        canvas.figure_of(ax)


def test_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"figures need matplotlib: pip install fddp\[viz\]"):
        plot_plan(make_plan(1.0))


def test_pyplot_is_not_used_and_imports_are_lazy() -> None:
    script = (
        "import sys, fddp.viz\n"
        "assert 'matplotlib' not in sys.modules\n"
        "fddp.viz.plot_caps({1.0: 0.02})\n"
        "assert 'matplotlib' in sys.modules\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    run_python("-c", script)


@pytest.mark.parametrize(
    ("text", "width_in", "shown"),
    [
        ("abc", 1.0, "abc"),
        ("layers.0.attention.weight", 1.2, "…attention.weight"),
        ("layers.0.attention.weight", 1.0, ""),
        ("layers.10.weight", 0.65, "…10.weight"),
        ("abc", -1.0, ""),
    ],
)
def test_names_are_shortened(text: str, width_in: float, shown: str) -> None:
    assert canvas.shortened(text, width_in) == shown
