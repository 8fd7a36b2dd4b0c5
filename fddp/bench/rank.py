"""What each rank of the benchmark does."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import fddp
from fddp.bench.contestants import FLAT, LOCAL_FUNCTION, LOCAL_MODULE, Contestant, contestants
from fddp.bench.measure import Series, measure
from fddp.bench.models import WORKLOADS, Workload
from fddp.bench.report import Entry, ModelResult, Report, SmallResult
from fddp.progress import Stages

_WARM_UP = 4  # steps; DDP and fddp rebuild their buckets after the first
_SMALL_BYTES = (4, 65536, 1048576)


class Options(NamedTuple):
    """What the command line gives.

    Attributes:
        models: names from `WORKLOADS`.
        rounds: number of rounds.
        steps: number of steps that count, in each contestant's turn of a round.
    """

    models: tuple[str, ...]
    rounds: int
    steps: int


def run_rank(options: Options) -> Report | None:
    """Measures all of it; a collective call. Rank 0 gets the report."""
    with Stages(shown=dist.get_rank() == 0) as stages:
        models = {name: _model(WORKLOADS[name], options, stages) for name in options.models}
        stages.begin("one small tensor", len(_SMALL_BYTES) * options.rounds)
        small = tuple(_small(nbytes, options, stages.advance) for nbytes in _SMALL_BYTES)
    if dist.get_rank() != 0:
        return None
    return Report(dist.get_world_size(), options.rounds, options.steps, models, small)


def _model(workload: Workload, options: Options, stages: Stages) -> ModelResult:
    stages.begin(workload.title, options.rounds)
    batch = workload.batch(dist.get_rank())
    field = contestants(workload, batch)
    for contestant in field:
        for _ in range(_WARM_UP):
            contestant.step()
    check_gradients(field)
    series = measure(
        {contestant.name: contestant.step for contestant in field},
        options.rounds,
        options.steps,
        stages.advance,
    )
    entries = tuple(Entry(c.name, c.form, c.is_ddp, series[c.name]) for c in field)
    parameters = [parameter.numel() for parameter in workload.build().parameters()]
    return ModelResult(workload.title, len(parameters), sum(parameters), entries)


def check_gradients(field: list[Contestant]) -> None:
    """Whether all that synchronise gave the same gradients in their last step.

    Raises:
        RuntimeError: one gave others; the time it takes for them means nothing.
    """
    expected = next(c for c in field if c.name == FLAT).gradients()
    for contestant in field:
        if contestant.name in (LOCAL_MODULE, LOCAL_FUNCTION):
            continue
        found = contestant.gradients()
        if len(found) != len(expected) or not all(map(_close, found, expected)):
            raise RuntimeError(
                f"{contestant.name!r} gave other gradients than {FLAT!r}: not worth timing"
            )


def _close(a: Tensor, b: Tensor) -> bool:
    """Up to the rounding of float32 in sums over a batch."""
    return a.shape == b.shape and bool((a - b).norm() <= 1e-4 * b.norm())


def _small(nbytes: int, options: Options, after_round: Callable[[], None]) -> SmallResult:
    """What fddp adds to an all-reduce: its control word and bookkeeping."""
    tensor = torch.zeros(nbytes // 4)
    control = torch.zeros(8, dtype=torch.float64)

    def bare() -> None:
        dist.all_reduce(tensor)

    def pair() -> None:
        works = [dist.all_reduce(t, async_op=True) for t in (tensor, control)]
        for work in works:
            work.wait()

    with fddp.GradSync([tensor]) as sync:
        sync([tensor])  # rebuilds its plan
        series: dict[str, Series] = measure(
            {"bare": bare, "pair": pair, "fddp": lambda: sync([tensor])},
            options.rounds,
            5 * options.steps,
            after_round,
        )
    return SmallResult(nbytes, series["bare"], series["pair"], series["fddp"])
