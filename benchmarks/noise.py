"""Cost of measuring gradient noise: `python -m benchmarks.noise`.

Steps with info on two ranks, by a `GradSync` with `noise=True` and by one without, in turns. Where
their buffers lie in memory makes as much of a difference as the squares. So both are made anew in
each round, in the other order.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch.distributed as dist
from rich.table import Table

import fddp
from benchmarks.bounds import Figure, at_most
from benchmarks.measure import Series, holding_results, measure, ratio, rounds_s
from benchmarks.models import WORKLOADS, Workload
from benchmarks.scripts import numbers_table, options, publish
from fddp.cli.launch import launch
from fddp.cli.progress import Stages

_MODELS = tuple(WORKLOADS[name] for name in ("mlp", "transformer"))
_TURNS, _WARM_UP = 12, 4
_INFO, _NOISE = "with info", "with noise"
_BOUND = 1.01


def main() -> None:
    """Measures and prints; about two minutes."""
    args = options(__doc__, rounds=12).parse_args()
    results = launch(2, run_rank, args.rounds)[0]
    publish([_table(results)], figures(results), {"rounds_s": rounds_s(results)}, args.json)


def run_rank(rounds: int, models: Sequence[Workload] = _MODELS) -> dict[str, dict[str, Series]]:
    """Times by model and contestant."""
    results = {}
    with Stages(shown=dist.get_rank() == 0) as stages:
        for about in models:
            stages.begin(about.title, rounds)
            times: dict[str, list[float]] = {_INFO: [], _NOISE: []}
            for number in range(rounds):
                names = (_INFO, _NOISE) if number % 2 else (_NOISE, _INFO)
                for name, own in _round(about, names).items():
                    times[name].append(median(own.rounds_s))
                stages.advance()
            results[about.title] = {name: Series(tuple(own)) for name, own in times.items()}
    return results


def _round(about: Workload, names: Sequence[str]) -> dict[str, Series]:
    """Times of both, made in this order."""
    function, batch = about.to_function(about.build()), about.batch(dist.get_rank())
    syncs = {name: fddp.GradSync(function.params, noise=name == _NOISE or None) for name in names}

    def step_of(sync: fddp.GradSync) -> Any:
        step = sync.value_and_grad(function.loss_fn, with_info=True)
        return lambda: step(function.params, batch)

    steps = holding_results({name: step_of(sync) for name, sync in syncs.items()})
    for step in steps.values():
        for _ in range(_WARM_UP):
            step()
    times = measure(steps, _TURNS, 1, lambda: None)
    for sync in syncs.values():
        sync.close()
    return times


def figures(results: dict[str, dict[str, Series]]) -> list[Figure]:
    """Figures with a bound."""
    return [
        at_most(_BOUND, "step with noise / with info", title, ratio(own[_NOISE], own[_INFO]))
        for title, own in results.items()
    ]


def _table(results: dict[str, dict[str, Series]]) -> Table:
    table = numbers_table(
        "Two ranks, ms a step",
        (_INFO, _NOISE, "ratio"),
        caption="median of rounds; ratio: lowest-highest round",
    )
    for title, own in results.items():
        both = (f"{own[name].median_s * 1e3:.1f}" for name in (_INFO, _NOISE))
        table.add_row(title, *both, ratio(own[_NOISE], own[_INFO]).text(3))
    return table


if __name__ == "__main__":
    main()
