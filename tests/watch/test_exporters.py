"""Exports to TensorBoard and Prometheus, read back from them; and the figure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import prometheus_client as client
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import fddp
from fddp.extend import StepTimes
from fddp.viz import plot_ranks
from fddp.watch import (
    MonitorReport,
    Prometheus,
    RankSummary,
    StepRecord,
    TensorBoard,
    report_figures,
    step_figures,
)
from tests.support.programs import run_python

STEPS = 4


def train_and_export(group: Any, *exporters: Any) -> fddp.watch.Monitor:
    params = {"w": torch.tensor([3.0, 4.0])}
    with fddp.GradSync(params, group=group) as sync:
        step = sync.value_and_grad(lambda p: p["w"].square().sum() / 2, with_info=True)
        monitor = fddp.watch.Monitor(sync, exporters=exporters)
        for _ in range(STEPS):
            monitor.observe(step(params)[2])
        monitor.report()
        return monitor


def make_report(*forward_s: float, first: int = 0, steps: int = 9) -> MonitorReport:
    times = StepTimes((), 1.0, 2.0, 3.0, begun_s=0.5)
    summaries = []
    for rank, own_s in enumerate(forward_s):
        phases_s = {"input": 0.002, "forward": own_s, "wait": 0.1 - own_s}
        numbers = range(first * rank, first * rank + steps)
        summaries.append(RankSummary.of(rank, [StepRecord(n, phases_s, times) for n in numbers]))
    return MonitorReport.of(summaries)


def test_prometheus_serves_the_observations() -> None:
    registry = client.CollectorRegistry()
    exporter = Prometheus(0, registry=registry)
    fddp.loopback(1, train_and_export, exporter)
    exporter.report(make_report(0.01, 0.06, 0.01))
    exporter.report(make_report(0.01, 0.06))  # a rank is gone
    text = client.generate_latest(registry).decode()
    lines = text.splitlines()
    assert 'fddp_steps_total{rank="0"} 4.0' in lines
    assert 'fddp_skipped_steps_total{rank="0"} 0.0' in lines
    assert 'fddp_grad_norm{rank="0"} 5.0' in lines
    assert 'fddp_phase_seconds_count{phase="backward",rank="0"} 4.0' in lines
    assert 'fddp_phase_median_seconds{of_rank="1",phase="forward",rank="0"} 0.06' in lines
    assert 'fddp_straggler_behind_seconds{of_rank="0",rank="0"} 0.0' in lines
    assert 'of_rank="2"' not in text
    behind = registry.get_sample_value(
        "fddp_straggler_behind_seconds", {"rank": "0", "of_rank": "1"}
    )
    assert behind == pytest.approx(0.05)
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert families["fddp_phase_seconds"].type == "histogram"


@pytest.mark.parametrize("bad", [3, None, object()])
def test_writers_without_scalars_are_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match="TensorBoard takes a SummaryWriter, got"):
        TensorBoard(bad)


def test_tensorboard_reads_the_observations_and_is_imported_late(
    tmp_path: Path,
) -> None:
    """In a process of its own: the libraries that tensorboard loads warn, and stay loaded."""
    script = (
        "import sys, fddp.watch, fddp.viz, torch\n"
        "assert not {'prometheus_client', 'tensorboard', 'matplotlib'} & set(sys.modules)\n"
        "from fddp.watch import TensorBoard\n"
        "from torch.utils.tensorboard import SummaryWriter\n"
        "from tests.watch.test_exporters import train_and_export\n"
        "with SummaryWriter(sys.argv[1]) as writer:\n"
        "    fddp.loopback(1, train_and_export, TensorBoard(writer))\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "read = EventAccumulator(sys.argv[1]).Reload()\n"
        "norms = [(e.step, e.value) for e in read.Scalars('fddp/grad_norm')]\n"
        "assert norms == [(n, 5.0) for n in range(4)], norms\n"
        "assert [e.step for e in read.Scalars('fddp/rank0/forward_s')] == [3]\n"
    )
    run_python("-c", script, str(tmp_path))


def test_any_writer_of_scalars_serves() -> None:
    written: list[tuple[str, float, int | None]] = []

    class Writer:
        def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
            written.append((tag, scalar_value, global_step))

    fddp.loopback(1, train_and_export, TensorBoard(Writer(), prefix="run"))
    assert ("run/grad_norm", 5.0, 0) in written
    assert ("run/rank0/behind_s", 0.0, STEPS - 1) in written
    assert all(isinstance(value, float) for _, value, _ in written)
    assert report_figures(make_report(0.01, 0.06))["rank0/step_s"] == pytest.approx(0.102)


def test_figures_of_a_step_name_the_step() -> None:
    def run(group: Any) -> dict[str, float]:
        with fddp.GradSync({"w": torch.ones(2)}, group=group, nonfinite="skip") as sync:
            _, info = sync({"w": torch.full((2,), float("nan"))}, with_info=True)
            monitor = fddp.watch.Monitor(sync)
            monitor.observe(info)
            return step_figures(info, monitor.steps[0])

    figures = fddp.loopback(2, run)[0]
    assert (figures["skipped"], figures["all_finite"]) == (1.0, 0.0)
    assert figures["active_ranks"] == figures["total_weight"] == 2.0


def test_skipped_steps_are_counted() -> None:
    registry = client.CollectorRegistry()

    def run(group: Any) -> None:
        with fddp.GradSync({"w": torch.ones(2)}, group=group, nonfinite="skip") as sync:
            monitor = fddp.watch.Monitor(sync, exporters=[Prometheus(3, registry=registry)])
            for value in (1.0, float("nan"), 2.0):
                monitor.observe(sync({"w": torch.full((2,), value)}, with_info=True)[1])

    fddp.loopback(1, run)
    assert registry.get_sample_value("fddp_steps_total", {"rank": "3"}) == 3.0
    assert registry.get_sample_value("fddp_skipped_steps_total", {"rank": "3"}) == 1.0


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"need prometheus_client: pip install fddp\[watch\]"):
        Prometheus(0)


def test_the_figure_frames_the_stragglers_phase() -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Rectangle

    ax = plot_ranks(make_report(0.01, 0.06, 0.01)).axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 1 ◂", "rank 2"]
    (bars,) = (one for one in ax.collections if isinstance(one, PolyCollection))
    assert len(bars.get_paths()) == 9
    (frame,) = (patch for patch in ax.patches if isinstance(patch, Rectangle))
    assert (frame.get_x(), frame.get_width()) == pytest.approx((2.0, 60.0))
    assert frame.get_y() + frame.get_height() / 2.0 == pytest.approx(1.0)
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "input", "forward", "wait", "holds the others up"
    ]  # fmt: skip
    assert "rank 1 holds the others up by 50.0 ms a step" in ax.get_title()


def test_the_figure_matches_the_report() -> None:
    alike, few = make_report(0.01, 0.01), make_report(0.01, 0.06, steps=8)
    parted = make_report(0.01, 0.06, first=9)
    for report, title in (
        (
            alike,
            "steps 0 to 8: no straggler: no rank takes longer for its own part than the others, "
            "beyond noise",
        ),
        (few, "steps 0 to 7: not certain: too few steps (8 of 9)"),
        (parted, parted.finding),
    ):
        ax = plot_ranks(report).axes[0]
        assert ax.get_title().replace("\n", " ") == title
        assert report.finding in title
        assert not ax.patches
    many = plot_ranks(make_report(*[0.01] * 5, *[0.06] * 4)).axes[0].get_title().splitlines()
    assert [line.count(" holds the others up by 50.0 ms") for line in many] == [1, 1, 1]
