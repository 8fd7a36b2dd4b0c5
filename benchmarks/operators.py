"""Cost of operators relative to a `GradSync`: `python -m benchmarks.operators`.

Two ranks average a tree of 300 leaves, once by `sync(grads)` and once by `fddp.pmean(grads)`. The
operator tells the others first what it is about to do, which takes a small collective of its own;
where `sync` sends its control word, it sends nothing. What follows is the same, so that the ratio
falls with the size of the tree.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

import fddp
from benchmarks.bounds import Figure, at_most, console, figures_table, to_values
from benchmarks.measure import Series, measure, ratio
from fddp.cli.launch import launch
from fddp.cli.progress import Stages
from fddp.transport import TransportName

_LEAVES = 300
_SIDES = (8, 32, 128)  # of square leaves: 0.07, 1.2 and 18.8 MiB in all
_TRANSPORTS: tuple[TransportName, ...] = ("shm", "c10d")
_STEPS = 20
_BOUND = 1.15

SYNC, PMEAN = "sync(grads)", "pmean(grads)"

Results = dict[str, dict[str, Series]]


def main() -> None:
    """Measures and prints; about half a minute."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there too")
    args = parser.parse_args()
    results = launch(2, run_rank, args.rounds)[0]
    console().print(_table(results))
    console().print(figures_table(figures(results)))
    if args.json is not None:
        args.json.write_text(_to_json(results))


def run_rank(rounds: int, sides: tuple[int, ...] = _SIDES) -> Results:
    """All trees over all transports, by title."""
    results: Results = {}
    with Stages(shown=torch.distributed.get_rank() == 0) as stages:
        for transport in _TRANSPORTS:
            for side in sides:
                title = f"{_LEAVES} leaves of {side} x {side}, {transport}"
                stages.begin(title, rounds)
                results[title] = _measured(transport, side, rounds, stages)
    return results


def figures(results: Mapping[str, Mapping[str, Series]]) -> list[Figure]:
    """Figures with a bound."""
    return [
        at_most(_BOUND, "pmean(grads) / sync(grads)", title, ratio(series[PMEAN], series[SYNC]))
        for title, series in results.items()
    ]


def _measured(
    transport: TransportName, side: int, rounds: int, stages: Stages
) -> dict[str, Series]:
    grads = {f"leaf{i:03}": torch.randn(side, side) for i in range(_LEAVES)}
    with (
        fddp.GradSync(grads, transport=transport) as sync,
        fddp.Communicator(transport=transport) as ranks,
    ):
        held: dict[str, Any] = {}  # as a training loop holds gradients until it has the next

        def keep(name: str, mean: Any) -> None:
            held[name] = mean

        steps = {
            SYNC: lambda: keep(SYNC, sync(grads)),
            PMEAN: lambda: keep(PMEAN, fddp.pmean(grads, ranks)),
        }
        return measure(steps, rounds, _STEPS, stages.advance)


def _table(results: Mapping[str, Mapping[str, Series]]) -> Table:
    table = Table(
        title="Averaging a tree on two ranks: ms",
        caption="median of rounds",
        box=box.SIMPLE_HEAVY,
        pad_edge=False,
    )
    table.add_column("")
    for name in (SYNC, PMEAN):
        table.add_column(name, justify="right")
    for title, series in results.items():
        times = [f"{series[name].median_s * 1e3:.3f}" for name in (SYNC, PMEAN)]
        table.add_row(title, *times)
    return table


def _to_json(results: Results) -> str:
    values = {
        title: {name: times.rounds_s for name, times in series.items()}
        for title, series in results.items()
    }
    return json.dumps({"cases": values, "figures": to_values(figures(results))}, indent=2)


if __name__ == "__main__":
    main()
