"""The benchmark's figures, as tables and as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table

from benchmarks.bounds import Figure, at_most, figures_table, to_values
from benchmarks.competitors import FDDP, LOCAL_FUNCTION, LOCAL_MODULE, OVER_GLOO, twin
from benchmarks.measure import Ratio, Series, added_ratio, difference, ratio
from benchmarks.passes import PASSES
from benchmarks.scripts import numbers_table
from fddp.core.text import counted

_ADDED_FUNCTION = 0.20
_ADDED_WRAPPER = 0.25
_BUSY_LOAD = 1.0  # starting the ranks makes some, too


@dataclass(frozen=True)
class Entry:
    """A contestant and its times.

    Attributes:
        name: of the contestant.
        form: "module" or "function".
        is_ddp: True for a mode of torch's DDP.
        transport: transport of its gradients.
        series: its steps.
    """

    name: str
    form: str
    is_ddp: bool
    transport: str
    series: Series

    @property
    def is_local(self) -> bool:
        """True if it computes without communication."""
        return self.name in (LOCAL_MODULE, LOCAL_FUNCTION)

    @property
    def is_wrapper(self) -> bool:
        """True for fddp's wrapper."""
        return twin(self.name) is not None


@dataclass(frozen=True)
class ModelResult:
    """One model's figures.

    Attributes:
        title: of the model.
        tensors: number of its parameter tensors.
        elements: number of their elements, of float32.
        steps: number of steps that counted, in each contestant's turn of a round.
        entries: one for each contestant.
        passes: memory traffic of a synchronisation alone.
    """

    title: str
    tensors: int
    elements: int
    steps: int
    entries: tuple[Entry, ...]
    passes: Series

    @property
    def best_ddp(self) -> Entry:
        """The mode of DDP with the lowest median."""
        return min((e for e in self.entries if e.is_ddp), key=lambda e: e.series.median_s)

    def versus_best(self, entry: Entry) -> Ratio:
        """An entry's step against the best DDP mode's, round by round."""
        return ratio(entry.series, self.best_ddp.series)

    def versus_twin(self, wrapper: Entry) -> Ratio:
        """fddp's wrapper against DDP in the same mode, round by round."""
        return ratio(wrapper.series, self.entry(twin(wrapper.name)).series)

    def added(self, entry: Entry) -> Series:
        """Its steps beyond the same round's local step of the same form."""
        local = LOCAL_MODULE if entry.form == "module" else LOCAL_FUNCTION
        return difference(entry.series, self.entry(local).series)

    def added_versus_best(self, entry: Entry) -> Ratio:
        """Overhead over the local step, relative to that of the best DDP mode, round by round.

        Infinite in a round in which the DDP mode had no overhead, which is noise.
        """
        return self.to_best_added(self.added(entry))

    def to_best_added(self, series: Series) -> Ratio:
        """Times relative to the overhead of the best DDP mode, round by round."""
        return added_ratio(series, self.added(self.best_ddp))

    def entry(self, name: str | None) -> Entry:
        """The contestant of that name."""
        return next(entry for entry in self.entries if entry.name == name)


@dataclass(frozen=True)
class SmallResult:
    """One small tensor.

    Attributes:
        nbytes: its size.
        transport: what fddp takes by itself.
        bare: a blocking all-reduce over gloo.
        over_gloo: `sync([tensor])` over gloo.
        fddp: the same over the transport that it takes by itself.
    """

    nbytes: int
    transport: str
    bare: Series
    over_gloo: Series
    fddp: Series


@dataclass(frozen=True)
class Report:
    """All that was measured.

    Attributes:
        ranks: number of ranks, of one thread each.
        rounds: number of rounds.
        load: average of the minute before.
        models: by name.
        small: by size.
        quick: True if too few steps were timed for a judgement.
    """

    ranks: int
    rounds: int
    load: float
    models: dict[str, ModelResult]
    small: tuple[SmallResult, ...]
    quick: bool = False


def figures(report: Report) -> list[Figure]:
    """Figures with a bound; none of a quick run. With more ranks than cores, only the step has
    one."""
    if report.quick:
        return []
    crowded = report.ranks > (os.cpu_count() or 1)
    found = _crowded(report) if crowded else _added(report) + _over_gloo(report)
    return sorted(found, key=lambda figure: figure.what)


def _added(report: Report) -> list[Figure]:
    found = []
    for name, model in report.models.items():
        for entry in model.entries:
            if entry.name == FDDP:
                bound, what = _ADDED_FUNCTION, "added, function / best DDP"
            elif entry.is_wrapper and not entry.name.endswith(OVER_GLOO):
                bound, what = _ADDED_WRAPPER, "added, wrapper / best DDP"
            else:
                continue
            value = model.added_versus_best(entry)
            found.append(at_most(bound, what, _case(name, entry), value))
    return found


def _over_gloo(report: Report) -> list[Figure]:
    return [
        at_most(
            1.0,
            f"step over gloo, {'wrapper' if entry.is_wrapper else 'function'} / best DDP",
            _case(name, entry),
            model.versus_best(entry),
        )
        for name, model in report.models.items()
        for entry in model.entries
        if entry.name.endswith(OVER_GLOO)
    ]


def _crowded(report: Report) -> list[Figure]:
    place = f"{counted(report.ranks, 'rank')} on {counted(os.cpu_count() or 1, 'core')}"
    what = f"step, {place} / best DDP"
    return [
        at_most(
            1.0,
            what,
            _case(name, entry),
            model.versus_best(entry),
        )
        for name, model in report.models.items()
        for entry in model.entries
        if (entry.name == FDDP or entry.is_wrapper) and not entry.name.endswith(OVER_GLOO)
    ]


def _case(model: str, entry: Entry) -> str:
    mode = entry.name.removesuffix(OVER_GLOO).removeprefix(FDDP).removeprefix(".DDP")
    return f"{model},{mode}" if mode else model


def tables(report: Report) -> list[Table]:
    """For people; `benchmarks.bounds.WIDTH` columns wide at most."""
    judged = figures(report)
    return [
        *map(_model_table, report.models.values()),
        _small_table(report.small),
        *([figures_table(judged)] if judged else []),
    ]


def warning(report: Report) -> str:
    """Warnings about the figures; empty if there are none."""
    if report.quick:
        return "A quick run: it shows that everything works, and judges no figure."
    if report.load < _BUSY_LOAD:
        return ""
    return (
        f"The load average was {report.load:.1f} before the first step: other programs were at "
        f"work, and these figures are about them as well."
    )


def to_json(report: Report) -> str:
    """For programs; times in seconds."""
    return json.dumps(
        {
            "environment": {
                "torch": torch.__version__,
                "python": platform.python_version(),
                "machine": platform.machine(),
                "cores": os.cpu_count(),
                "ranks": report.ranks,
                "threads_per_rank": 1,
                "load_before": report.load,
            },
            "rounds": report.rounds,
            "models": {name: _model_values(model) for name, model in report.models.items()},
            "small": [
                {
                    "nbytes": small.nbytes,
                    "transport": small.transport,
                    "all_reduce_s": small.bare.median_s,
                    "over_gloo_s": small.over_gloo.median_s,
                    "fddp_s": small.fddp.median_s,
                }
                for small in report.small
            ],
            "figures": to_values(figures(report)),
        },
        indent=2,
    )


def _model_values(model: ModelResult) -> dict[str, Any]:
    return {
        "title": model.title,
        "tensors": model.tensors,
        "elements": model.elements,
        "steps_per_round": model.steps,
        "best_ddp": model.best_ddp.name,
        "passes_s": model.passes.rounds_s,
        "contestants": {
            entry.name: {
                "form": entry.form,
                "transport": entry.transport,
                "median_s": entry.series.median_s,
                "rounds_s": entry.series.rounds_s,
                **({} if entry.is_local else _synced_values(model, entry)),
            }
            for entry in model.entries
        },
    }


def _synced_values(model: ModelResult, entry: Entry) -> dict[str, Any]:
    values: dict[str, Any] = {
        "added_s": model.added(entry).median_s,
        "step_ratio": model.versus_best(entry)._asdict(),
        "added_ratio": model.added_versus_best(entry)._asdict(),
    }
    return values | ({"same_mode_ratio": model.versus_twin(entry)} if entry.is_wrapper else {})


def _model_table(model: ModelResult) -> Table:
    best = model.best_ddp.name
    table = numbers_table(
        f"{model.title} ({model.elements / 1e6:.1f} M parameters in {model.tensors} tensors)",
        ("via", "step", "added", "step ratio", "added ratio"),
        caption="ms: median of rounds (lowest-highest); added: step less local step in its form; "
        f"{PASSES}: both passes over all gradients; ratios: round by round, to {best}",
    )
    for entry in model.entries:
        local = entry.is_local
        table.add_row(
            entry.name,
            "" if local else entry.transport,
            _ms(entry.series),
            "" if local else f"{model.added(entry).median_s * 1e3:.1f}",
            "" if local else model.versus_best(entry).text(),
            "" if local else model.added_versus_best(entry).text(),
        )
    bound = f"{model.passes.median_s * 1e3:.1f}"
    table.add_row(PASSES, "", "", bound, "", model.to_best_added(model.passes).text())
    return table


def _small_table(results: Iterable[SmallResult]) -> Table:
    table = Table(
        title="One small tensor: what sync(grads) costs beside an all-reduce",
        box=box.SIMPLE_HEAVY,
    )
    table.add_column("us")
    for heading in ("all-reduce, gloo", "sync, gloo", "sync", "via", "sync, gloo / all-reduce"):
        table.add_column(heading, justify="right")
    for small in results:
        table.add_row(
            f"{small.nbytes} bytes",
            *(f"{s.median_s * 1e6:.0f}" for s in (small.bare, small.over_gloo, small.fddp)),
            small.transport,
            ratio(small.over_gloo, small.bare).text(),
        )
    return table


def _ms(series: Series) -> str:
    rounds_ms = [time_s * 1e3 for time_s in series.rounds_s]
    return f"{series.median_s * 1e3:.3g} ({min(rounds_ms):.3g}-{max(rounds_ms):.3g})"
