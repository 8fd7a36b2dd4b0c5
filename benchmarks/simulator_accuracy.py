"""Error of simulated step times: `python -m benchmarks.simulator_accuracy`.

For each model, plans from one bucket for each tensor to one bucket for all are timed on two ranks
over gloo, in turn, and simulated from measured costs and ready times. What a rank does alone after
its last gradient, which a simulation leaves out, is measured on one rank and added. The order of
the simulated times is held against the measured order, and that against itself: the first half of
the rounds against the second.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fddp
from benchmarks.measure import Series, measure
from benchmarks.models import Workload, stack
from benchmarks.scripts import options
from fddp.cli.launch import launch
from fddp.cli.progress import Stages
from fddp.core.plan.plan import plan_leaves

_ROUNDS = 10
_STEPS = 3
_PROFILED = 7
#: layers in a bucket; 0 for a bucket for each tensor. Most are small, where step times differ by
#: more than they vary: up to some tens of buckets all plans take about the same.
_LAYERS_IN_BUCKET = (0, 1, 2, 3, 5, 8, 20, 10**6)
_MODELS = (
    stack("1000 layers of 24x24", layers=1000, width=24, rows=16),
    stack("400 layers of 48x48", layers=400, width=48, rows=16),
)


@dataclass(frozen=True)
class Case:
    """One plan of one model.

    Attributes:
        buckets: number of its buckets.
        simulated_s: seconds of a step: simulated, and what a rank does alone afterwards.
        measured: steps of the slower rank.
    """

    buckets: int
    simulated_s: float
    measured: Series


def main() -> None:
    """Measures and prints; some minutes."""
    args = options(__doc__).parse_args()
    results = launch(2, run_rank)[0]
    for title, cost, cases in results:
        console = Console(highlight=False)
        console.print(_table(title, cases))
        console.print(cost)
        console.print(_verdict(cases))
    if args.json is not None:
        args.json.write_text(_to_json(results))


def run_rank() -> list[tuple[str, str, list[Case]]]:
    """All models; a collective call. The same on all ranks."""
    results = []
    with Stages(shown=dist.get_rank() == 0) as stages:
        for workload in _MODELS:
            stages.begin(workload.title, _ROUNDS)
            cost = fddp.CostModel.fit(fddp.measure_cost(transport="c10d"))
            results.append((workload.title, repr(cost), _cases(workload, cost, stages)))
    return results


def _cases(workload: Workload, cost: fddp.CostModel, stages: Stages) -> list[Case]:
    functional = workload.to_function(workload.build())
    params, loss_fn = functional.params, functional.loss_fn
    batch = workload.batch(dist.get_rank())
    base = fddp.plan_buckets(params)
    layer_bytes = sum(leaf.nbytes for leaf in base.leaves) // (len(base.leaves) // 2)
    plans = [
        plan_leaves(base.leaves, order=base.order, caps_bytes=[max(1, layers * layer_bytes)])
        for layers in _LAYERS_IN_BUCKET
    ]
    ready_s, _ = profile(fddp.GradSync(plans[-1], transport="c10d"), params, loss_fn, batch)
    (alone_s,) = fddp.loopback(
        1, lambda group: profile(fddp.GradSync(plans[-1], group=group), params, loss_fn, batch)[1]
    )
    steps = {}
    with ExitStack() as open_syncs:
        for plan in plans:
            sync = open_syncs.enter_context(fddp.GradSync(plan, transport="c10d"))
            steps[str(len(plan.buckets))] = step = _step(sync, params, loss_fn, batch)
            for _ in range(2):
                step()
        series = measure(steps, _ROUNDS, _STEPS, stages.advance)
    topology = fddp.Topology(world=dist.get_world_size())
    return [
        Case(
            len(plan.buckets),
            fddp.simulate(fddp.make_schedule(plan, topology), cost, ready_s).step_s + alone_s,
            series[str(len(plan.buckets))],
        )
        for plan in plans
    ]


def _step(
    sync: fddp.GradSync, params: Any, loss_fn: Callable[[Any, Tensor], Tensor], batch: Tensor
) -> Callable[[], object]:
    step = sync.value_and_grad(loss_fn)
    return lambda: step(params, batch)


def profile(
    sync: fddp.GradSync, params: Any, loss_fn: Callable[[Any, Tensor], Tensor], batch: Tensor
) -> tuple[list[float], float]:
    """Ready times by leaf, from the start of a step, and the time from the last one to its end.

    Ready times are those of the slower rank, undisturbed by communication, because the plan's only
    bucket leaves after backward.
    """
    ready_s, rest_s = [], []
    with sync:
        step = sync.value_and_grad(loss_fn, with_info=True)
        for _ in range(_PROFILED):
            start_s = time.perf_counter()
            _, _, info = step(params, batch)
            end_s = time.perf_counter()
            leaves_s = torch.tensor(info.timeline.leaves_s, dtype=torch.float64)
            ready_s.append(leaves_s - start_s)
            rest_s.append(end_s - float(leaves_s.max()))
    times_s = torch.stack(ready_s).median(dim=0).values
    dist.all_reduce(times_s, dist.ReduceOp.MAX)
    return times_s.tolist(), statistics.median(rest_s)


def _table(title: str, cases: Sequence[Case]) -> Table:
    table = Table(title=title, caption="ms a step; measured: median of rounds (lowest-highest)")
    for heading in ("buckets", "simulated", "measured", "", "simulated / measured"):
        table.add_column(heading, justify="right")
    for case in cases:
        rounds_ms = [time_s * 1e3 for time_s in case.measured.rounds_s]
        table.add_row(
            str(case.buckets),
            f"{case.simulated_s * 1e3:.1f}",
            f"{case.measured.median_s * 1e3:.1f}",
            f"({min(rounds_ms):.1f}-{max(rounds_ms):.1f})",
            f"{case.simulated_s / case.measured.median_s:.2f}",
        )
    return table


def _verdict(cases: Sequence[Case]) -> str:
    simulated_s = [case.simulated_s for case in cases]
    measured_s = [case.measured.median_s for case in cases]
    half = len(cases[0].measured.rounds_s) // 2
    first_s = [statistics.median(case.measured.rounds_s[:half]) for case in cases]
    second_s = [statistics.median(case.measured.rounds_s[half:]) for case in cases]
    errors = [abs(s / m - 1.0) for s, m in zip(simulated_s, measured_s, strict=True)]
    return (
        f"rank correlation (Spearman) of simulated and measured: "
        f"{spearman(simulated_s, measured_s):.2f}; of the first half of the rounds and the second: "
        f"{spearman(first_s, second_s):.2f}; error of a simulated time, median: "
        f"{statistics.median(errors):.0%}"
    )


def _to_json(results: Sequence[tuple[str, str, list[Case]]]) -> str:
    values = [
        {
            "title": title,
            "cost": cost,
            "cases": [
                {
                    "buckets": case.buckets,
                    "simulated_s": case.simulated_s,
                    "rounds_s": case.measured.rounds_s,
                }
                for case in cases
            ],
            "verdict": _verdict(cases),
        }
        for title, cost, cases in results
    ]
    return json.dumps({"models": values}, indent=2)


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation of values without ties.

    Example:
        >>> round(spearman([1.0, 2.0, 3.0], [10.0, 30.0, 20.0]), 3)
        0.5
    """
    one, other = (np.argsort(np.argsort(values)) for values in (first, second))
    return float(np.corrcoef(one, other)[0, 1])


if __name__ == "__main__":
    main()
