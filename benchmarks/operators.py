"""Cost of operators relative to a `GradSync`: `python -m benchmarks.operators`.

Two ranks average a tree of 300 leaves, once by `sync(grads)` and once by `fddp.pmean(grads)`. The
operator tells the others first what it is about to do, which takes a small collective of its own;
where `sync` sends its control word, it sends nothing. What follows is the same, so that the ratio
falls with the size of the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from rich.table import Table

import fddp
from benchmarks.bounds import Figure, at_most
from benchmarks.measure import Series, holding_results, measure, ratio, rounds_s
from benchmarks.scripts import numbers_table, options, publish
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
    args = options(__doc__, rounds=9).parse_args()
    results = launch(2, run_rank, args.rounds)[0]
    publish([_table(results)], figures(results), {"cases": rounds_s(results)}, args.json)


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
        steps: dict[str, Callable[[], object]] = {
            SYNC: lambda: sync(grads),
            PMEAN: lambda: fddp.pmean(grads, ranks),
        }
        return measure(holding_results(steps), rounds, _STEPS, stages.advance)


def _table(results: Mapping[str, Mapping[str, Series]]) -> Table:
    table = numbers_table(
        "Averaging a tree on two ranks: ms", (SYNC, PMEAN), caption="median of rounds"
    )
    for title, series in results.items():
        times = [f"{series[name].median_s * 1e3:.3f}" for name in (SYNC, PMEAN)]
        table.add_row(title, *times)
    return table


if __name__ == "__main__":
    main()
