"""Program of each rank of the benchmark."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import fddp
from benchmarks.competitors import FLAT, LOCAL_FUNCTION, LOCAL_MODULE, Contestant, contestants
from benchmarks.measure import Series, measure
from benchmarks.models import WORKLOADS, Workload
from benchmarks.passes import PASSES, memory_passes
from benchmarks.report import Entry, ModelResult, Report, SmallResult
from fddp.cli.progress import Stages
from fddp.transport import open_transport

WARM_UP = 4  # steps; DDP and fddp rebuild their buckets after the first
_SMALL_BYTES = (4, 65536, 1048576)
_SMALL_CALLS = 50


class Options(NamedTuple):
    """Command-line arguments.

    Attributes:
        models: names from `WORKLOADS`.
        rounds: number of rounds.
        quick: True for one timed step per turn instead of the workload's number.
    """

    models: tuple[str, ...]
    rounds: int
    quick: bool


def run_rank(options: Options) -> Report | None:
    """Measures all of it; a collective call. Rank 0 gets the report."""
    load, _, _ = os.getloadavg()
    with Stages(shown=dist.get_rank() == 0) as stages:
        models = {name: _model(WORKLOADS[name], options, stages) for name in options.models}
        stages.begin("one small tensor", len(_SMALL_BYTES) * options.rounds)
        small = tuple(_small(nbytes, options, stages.advance) for nbytes in _SMALL_BYTES)
    if dist.get_rank() != 0:
        return None
    return Report(dist.get_world_size(), options.rounds, load, models, small, options.quick)


def _model(workload: Workload, options: Options, stages: Stages) -> ModelResult:
    stages.begin(workload.title, options.rounds)
    batch = workload.batch(dist.get_rank())
    field = contestants(workload, batch)
    for contestant in field:
        for _ in range(WARM_UP):
            contestant.step()
    check_gradients(field)
    steps = 1 if options.quick else workload.steps
    gradients = [torch.ones(p.shape) for p in workload.build().parameters()]
    with open_transport(None, "auto", 60.0, "benchmark") as transport:
        passes = memory_passes(gradients, transport)
        steps_by_name = {c.name: c.step for c in field}
        series = measure(steps_by_name | {PASSES: passes}, options.rounds, steps, stages.advance)
    entries = tuple(Entry(c.name, c.form, c.is_ddp, c.transport, series[c.name]) for c in field)
    for contestant in field:
        contestant.close()
    numels = [gradient.numel() for gradient in gradients]
    return ModelResult(workload.title, len(numels), sum(numels), steps, entries, series[PASSES])


def check_gradients(field: list[Contestant], reference: str = FLAT) -> None:
    """Compare the gradients of all contestants that synchronise, from their last step.

    Raises:
        RuntimeError: one gave others; the time it takes for them means nothing.
    """
    expected = next(c for c in field if c.name == reference).gradients()
    for contestant in field:
        if contestant.name in (LOCAL_MODULE, LOCAL_FUNCTION):
            continue
        found = contestant.gradients()
        if len(found) != len(expected) or not all(map(_close, found, expected)):
            raise RuntimeError(
                f"{contestant.name!r} gave other gradients than {reference!r}: not worth timing"
            )


def _close(a: Tensor, b: Tensor) -> bool:
    """Up to the rounding of float32 in sums over a batch."""
    return a.shape == b.shape and bool((a - b).norm() <= 1e-4 * b.norm())


def _small(nbytes: int, options: Options, after_round: Callable[[], None]) -> SmallResult:
    """Overhead of fddp over an all-reduce: the control word and bookkeeping."""
    tensor = torch.zeros(nbytes // 4)
    with fddp.GradSync([tensor]) as sync, fddp.GradSync([tensor], transport="c10d") as over_gloo:
        steps = {
            "bare": lambda: dist.all_reduce(tensor),
            "gloo": lambda: over_gloo([tensor]),
            "fddp": lambda: sync([tensor]),
        }
        steps["gloo"](), steps["fddp"]()  # the first call rebuilds the plan
        calls = 1 if options.quick else _SMALL_CALLS
        series: dict[str, Series] = measure(steps, options.rounds, calls, after_round)
        transport = sync.transport
    return SmallResult(nbytes, transport, series["bare"], series["gloo"], series["fddp"])
