"""The benchmark's figures, as tables and as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table

from fddp.bench.contestants import FDDP, LOCAL_FUNCTION, LOCAL_MODULE, WRAPPERS
from fddp.bench.measure import Ratio, Series, ratio


@dataclass(frozen=True)
class Entry:
    """A contestant and its times.

    Attributes:
        name: of the contestant.
        form: "module" or "function".
        is_ddp: whether it is a mode of torch's DDP.
        series: its steps.
    """

    name: str
    form: str
    is_ddp: bool
    series: Series


@dataclass(frozen=True)
class ModelResult:
    """One model's figures.

    Attributes:
        title: of the model.
        tensors: number of its parameter tensors.
        elements: number of their elements, of float32.
        entries: one for each contestant.
    """

    title: str
    tensors: int
    elements: int
    entries: tuple[Entry, ...]

    @property
    def best_ddp(self) -> Entry:
        """The mode of DDP with the lowest median."""
        return min((e for e in self.entries if e.is_ddp), key=lambda e: e.series.median_s)

    def versus_best(self, entry: Entry) -> Ratio:
        """An entry's step against the best DDP mode's, round by round."""
        return ratio(entry.series, self.best_ddp.series)

    def versus_twin(self, wrapper: str) -> Ratio:
        """fddp's wrapper against DDP in the same mode, round by round."""
        return ratio(self.entry(wrapper).series, self.entry(WRAPPERS[wrapper]).series)

    def exposed_s(self, entry: Entry) -> float:
        """Seconds a step beyond the same round's local step of the same form; the median."""
        local = self.entry(LOCAL_MODULE if entry.form == "module" else LOCAL_FUNCTION)
        pairs = zip(entry.series.rounds_s, local.series.rounds_s, strict=True)
        return statistics.median(step_s - local_s for step_s, local_s in pairs)

    @property
    def exposed_ratio(self) -> float:
        """What fddp adds to its local step, over what the best DDP mode adds to its own."""
        return self.exposed_s(self.entry(FDDP)) / self.exposed_s(self.best_ddp)

    def entry(self, name: str) -> Entry:
        """The contestant of that name."""
        return next(entry for entry in self.entries if entry.name == name)


@dataclass(frozen=True)
class SmallResult:
    """One small tensor.

    Attributes:
        nbytes: its size.
        bare: a blocking all-reduce.
        pair: the same with one of 8 float64 in flight beside it.
        fddp: `sync([tensor])`.
    """

    nbytes: int
    bare: Series
    pair: Series
    fddp: Series


@dataclass(frozen=True)
class Report:
    """All that was measured.

    Attributes:
        ranks: number of ranks, of one thread each.
        rounds: number of rounds.
        steps: number of steps that counted, in each contestant's turn of a round.
        models: by name.
        small: by size.
    """

    ranks: int
    rounds: int
    steps: int
    models: dict[str, ModelResult]
    small: tuple[SmallResult, ...]


def tables(report: Report) -> list[Table]:
    """For people; 80 columns wide at most."""
    models = report.models.values()
    return [
        *map(_model_table, models),
        _summary_table(models),
        _wrapper_table(models),
        _small_table(report.small),
    ]


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
                "backend": "gloo",
            },
            "rounds": report.rounds,
            "steps_per_round": report.steps,
            "models": {name: _model_values(model) for name, model in report.models.items()},
            "small": [
                {
                    "nbytes": small.nbytes,
                    "all_reduce_s": small.bare.median_s,
                    "two_all_reduces_s": small.pair.median_s,
                    "fddp_s": small.fddp.median_s,
                }
                for small in report.small
            ],
        },
        indent=2,
    )


def _model_values(model: ModelResult) -> dict[str, Any]:
    fddp = model.entry(FDDP)
    return {
        "title": model.title,
        "tensors": model.tensors,
        "elements": model.elements,
        "best_ddp": model.best_ddp.name,
        "step_ratio": model.versus_best(fddp)._asdict(),
        "exposed_ratio": model.exposed_ratio,
        "wrapper_ratios": {name: model.versus_twin(name)._asdict() for name in WRAPPERS},
        "contestants": {
            entry.name: {
                "form": entry.form,
                "median_s": entry.series.median_s,
                "exposed_s": model.exposed_s(entry),
                "rounds_s": entry.series.rounds_s,
            }
            for entry in model.entries
        },
    }


def _model_table(model: ModelResult) -> Table:
    table = Table(
        title=f"{model.title} ({model.elements / 1e6:.1f} M parameters in {model.tensors} tensors)",
        caption="median of rounds (lowest-highest); exposed: step less local step in its form",
        box=box.SIMPLE_HEAVY,
        pad_edge=False,
    )
    table.add_column("ms", no_wrap=True)
    for heading in ("step", "exposed", "step / best DDP"):
        table.add_column(heading, justify="right")
    for entry in model.entries:
        local = entry.name in (LOCAL_MODULE, LOCAL_FUNCTION)
        rounds_ms = [time_s * 1e3 for time_s in entry.series.rounds_s]
        table.add_row(
            entry.name,
            f"{entry.series.median_s * 1e3:.3g} ({min(rounds_ms):.3g}-{max(rounds_ms):.3g})",
            "" if local else f"{model.exposed_s(entry) * 1e3:.1f}",
            "" if local else _spread(model.versus_best(entry)),
        )
    return table


def _summary_table(models: Iterable[ModelResult]) -> Table:
    table = Table(title="fddp / the best mode of DDP", box=box.SIMPLE_HEAVY)
    for heading in ("model", "best mode"):
        table.add_column(heading)
    for heading in ("step", "exposed"):
        table.add_column(heading, justify="right")
    for model in models:
        table.add_row(
            model.title.partition(",")[0],
            model.best_ddp.name,
            _spread(model.versus_best(model.entry(FDDP))),
            f"{model.exposed_ratio:.2f}",
        )
    return table


def _wrapper_table(models: Iterable[ModelResult]) -> Table:
    table = Table(title="fddp.DistributedDataParallel / torch's, step", box=box.SIMPLE_HEAVY)
    table.add_column("model")
    for heading in ("default", "bucket view", "default / best"):
        table.add_column(heading, justify="right")
    for model in models:
        table.add_row(
            model.title.partition(",")[0],
            *(_spread(model.versus_twin(name)) for name in WRAPPERS),
            _spread(model.versus_best(model.entry(next(iter(WRAPPERS))))),
        )
    return table


def _small_table(results: Iterable[SmallResult]) -> Table:
    table = Table(
        title="One small tensor: what the control word costs",
        caption="pair: the all-reduce and one of 8 float64, in flight together",
        box=box.SIMPLE_HEAVY,
    )
    table.add_column("us")
    for heading in ("all-reduce", "pair", "fddp sync(grads)", "fddp / pair"):
        table.add_column(heading, justify="right")
    for small in results:
        table.add_row(
            f"{small.nbytes} bytes",
            *(f"{s.median_s * 1e6:.0f}" for s in (small.bare, small.pair, small.fddp)),
            _spread(ratio(small.fddp, small.pair)),
        )
    return table


def _spread(value: Ratio) -> str:
    return f"{value.median:.2f} ({value.low:.2f}-{value.high:.2f})"
