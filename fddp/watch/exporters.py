"""Exporters of a `Monitor`'s observations to Prometheus and TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from fddp import SyncInfo
from fddp.extend import entrance
from fddp.watch.phases import StepRecord
from fddp.watch.report import MonitorReport

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_SECONDS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)


@entrance
def step_figures(info: SyncInfo, record: StepRecord) -> dict[str, float]:
    """Return the measurements of one step of this rank by name. Names of seconds end in `_s`.

    Example:
        >>> import fddp, torch
        >>> def figures(group):
        ...     grads = {"w": torch.tensor([3.0, 4.0])}
        ...     with fddp.GradSync(grads, group=group) as sync:
        ...         _, info = sync(grads, with_info=True)
        ...         monitor = fddp.watch.Monitor(sync)
        ...         monitor.observe(info)
        ...         return step_figures(info, monitor.steps[-1])
        >>> figures = fddp.loopback(1, figures)[0]
        >>> figures["grad_norm"], figures["active_ranks"], sorted(figures)[-3:]
        (5.0, 1.0, ['sync_s', 'total_weight', 'wait_s'])
    """
    figures = {f"{phase}_s": seconds for phase, seconds in record.phases_s.items()}
    return {
        **figures,
        "hidden_fraction": info.timeline.hidden_fraction,
        "grad_norm": info.grad_norm,
        "all_finite": float(info.all_finite),
        "skipped": float(info.skipped),
        "repaired_buckets": float(len(info.repaired)),
        "active_ranks": float(info.active),
        "total_weight": float(info.total_weight),
        "held_bytes": float(info.held_bytes),
    }


@entrance
def report_figures(report: MonitorReport) -> dict[str, float]:
    """Return the numbers of a report by name: each rank's median per phase, such as
    "rank0/forward_s" and "rank0/step_s", and the delay of each straggler, "rank0/behind_s"."""
    figures: dict[str, float] = {}
    behind = {one.rank: one.behind_s for one in report.stragglers}
    for rank in report.ranks:
        stats = {**rank.phases, "step": rank.step}
        figures |= {f"rank{rank.rank}/{name}_s": of.median_s for name, of in stats.items()}
        figures[f"rank{rank.rank}/behind_s"] = behind.get(rank.rank, 0.0)
    return figures


class ScalarWriter(Protocol):
    """Writer of scalars, such as `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        """Write one scalar."""


class TensorBoard:
    """Writes each step and each report as TensorBoard scalars.

    Args:
        writer: a `SummaryWriter`, which its owner closes.
        prefix: first component of each tag.

    Raises:
        TypeError: `writer` writes no scalars.
    """

    def __init__(self, writer: ScalarWriter, *, prefix: str = "fddp") -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(f"TensorBoard takes a SummaryWriter, got {writer!r:.80}")
        self._writer = writer
        self._prefix = prefix
        self._step = 0

    def step(self, info: SyncInfo, record: StepRecord) -> None:
        """Write one step of this rank."""
        self._step = info.step
        self._write(step_figures(info, record))

    def report(self, report: MonitorReport) -> None:
        """Write a report on all ranks."""
        self._write(report_figures(report))

    def _write(self, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(f"{self._prefix}/{name}", value, self._step)


class Prometheus:
    """Updates prometheus_client metrics, labelled with this rank.

    Serving them is up to the caller: `prometheus_client.start_http_server(port)`, or
    `write_to_textfile` for a node exporter. Create one exporter per registry.

    Args:
        rank: value of the label: `Monitor.rank`, or the rank in the job.
        registry: registry of prometheus_client; None for its default.

    Raises:
        ImportError: prometheus_client is missing (`pip install fddp[watch]`).
    """

    def __init__(self, rank: int, *, registry: CollectorRegistry | None = None) -> None:
        try:
            import prometheus_client as client
        except ImportError as error:
            raise ImportError(
                "metrics for Prometheus need prometheus_client: pip install fddp[watch]"
            ) from error

        def metric(kind: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
            to = client.REGISTRY if registry is None else registry
            return kind(f"fddp_{name}", text, ["rank", *labels], registry=to, **more)

        counter, gauge = client.Counter, client.Gauge
        self._rank = str(rank)
        self._steps = metric(counter, "steps", "Synchronised steps.")
        self._skipped = metric(counter, "skipped_steps", "Steps that all ranks skipped.")
        self._repaired = metric(counter, "repaired_buckets", "Buckets reduced a second time.")
        text = "Duration of each phase of a step on this rank."
        self._phases = metric(client.Histogram, "phase_seconds", text, "phase", buckets=_SECONDS)
        self._norm = metric(gauge, "grad_norm", "L2 norm of the newest gradients.")
        text = "Share of communication overlapped with backward in the newest step."
        self._hidden = metric(gauge, "hidden_ratio", text)
        text = "Median duration of a phase on any rank, from the newest report."
        self._medians = metric(gauge, "phase_median_seconds", text, "of_rank", "phase")
        text = "Seconds per step by which a rank delays the others, from the newest report."
        self._behind = metric(gauge, "straggler_behind_seconds", text, "of_rank")

    def step(self, info: SyncInfo, record: StepRecord) -> None:
        """Record one step of this rank."""
        self._steps.labels(self._rank).inc()
        self._skipped.labels(self._rank).inc(float(info.skipped))
        self._repaired.labels(self._rank).inc(len(info.repaired))
        for phase, seconds in record.phases_s.items():
            self._phases.labels(self._rank, phase).observe(seconds)
        self._norm.labels(self._rank).set(info.grad_norm)
        self._hidden.labels(self._rank).set(info.timeline.hidden_fraction)

    def report(self, report: MonitorReport) -> None:
        """Record a report on all ranks. Ranks and phases missing from it are no longer served."""
        self._medians.clear()
        self._behind.clear()
        behind = {one.rank: one.behind_s for one in report.stragglers}
        for rank in report.ranks:
            for phase, stats in rank.phases.items():
                self._medians.labels(self._rank, str(rank.rank), phase).set(stats.median_s)
            self._behind.labels(self._rank, str(rank.rank)).set(behind.get(rank.rank, 0.0))
