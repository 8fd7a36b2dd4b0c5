"""Cost of trees of JAX arrays relative to trees of tensors: `python -m benchmarks.jax_trees`.

Two ranks average a tree of 300 leaves, once of tensors and once of arrays of the same sizes. Each
array costs the same few microseconds whatever its size, for a handle on the way in and an array on
the way out, so that the ratio is one of sizes. The bound is for the largest tree, of about as many
parameters as a small language model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from rich.table import Table

import fddp
from benchmarks.bounds import Figure, at_most
from benchmarks.measure import Series, holding_results, measure, ratio, rounds_s
from benchmarks.scripts import numbers_table, options, publish
from fddp.cli.launch import launch
from fddp.cli.progress import Stages
from fddp.core.text import counted
from fddp.transport import TransportName

_LEAVES = 300
_SIDES = (32, 128, 256)  # of square leaves: 1.2, 18.8 and 75 MiB in all
_TRANSPORTS: tuple[TransportName, ...] = ("shm", "c10d")
_STEPS = 7
_BOUND = 1.2

TENSORS, ARRAYS, JAX_ALONE, JITTED = "tensors", "arrays", "JAX alone", "pmean in jit"
_CONTESTANTS = (TENSORS, ARRAYS, JAX_ALONE, JITTED)


class Case(NamedTuple):
    """Tree to average, and its transport."""

    leaves: int
    side: int
    transport: TransportName

    def __str__(self) -> str:
        return f"{counted(self.leaves, 'leaf')} of {self.side} x {self.side}, {self.transport}"


Results = dict[str, dict[str, Series]]


def main() -> None:
    """Measures and prints; about a minute."""
    args = options(__doc__, rounds=7).parse_args()
    results = launch(2, run_rank, args.rounds)[0]
    publish([_table(results)], figures(results), {"results": rounds_s(results)}, args.json)


def run_rank(rounds: int, sides: tuple[int, ...] = _SIDES, leaves: int = _LEAVES) -> Results:
    """All trees of so many leaves over all transports, by title."""
    results: Results = {}
    with Stages(shown=torch.distributed.get_rank() == 0) as stages:
        for transport in _TRANSPORTS:
            for side in sides:
                case = Case(leaves, side, transport)
                stages.begin(str(case), rounds)
                results[str(case)] = _measured(case, rounds, stages)
    return results


def figures(results: Mapping[str, Mapping[str, Series]]) -> list[Figure]:
    """Figures with a bound."""
    return [
        at_most(
            _BOUND,
            "sync(grads), JAX arrays / tensors",
            title,
            ratio(series[ARRAYS], series[TENSORS]),
        )
        for title, series in results.items()
        if title in {str(Case(_LEAVES, _SIDES[-1], transport)) for transport in _TRANSPORTS}
    ]


def _measured(case: Case, rounds: int, stages: Stages) -> dict[str, Series]:
    import jax
    import jax.numpy as jnp

    from fddp.jax import pmean
    from fddp.tree.jax_arrays import homes_of, to_arrays, to_tensors

    tensors = {f"leaf{i:03}": torch.randn(case.side, case.side) for i in range(case.leaves)}
    arrays = {name: jnp.asarray(leaf.numpy()) for name, leaf in tensors.items()}
    leaves, homes = list(arrays.values()), homes_of(list(arrays.values()))
    with (
        fddp.GradSync(tensors, transport=case.transport) as of_tensors,
        fddp.GradSync(arrays, transport=case.transport) as of_arrays,
        fddp.Communicator(transport=case.transport) as communicator,
    ):
        reduce = jax.jit(lambda tree: pmean(tree, communicator))
        steps: dict[str, Callable[[], object]] = {
            TENSORS: lambda: of_tensors(tensors),
            ARRAYS: lambda: of_arrays(arrays),
            JAX_ALONE: lambda: to_arrays(to_tensors(leaves, list(arrays), ""), homes),
            JITTED: lambda: jax.block_until_ready(reduce(arrays)),
        }
        return measure(holding_results(steps), rounds, _STEPS, stages.advance)


def _table(results: Mapping[str, Mapping[str, Series]]) -> Table:
    table = numbers_table(
        "Averaging a tree on two ranks: ms",
        (*_CONTESTANTS, "arrays / tensors", "us a leaf"),
        caption="median of rounds; JAX alone: arrays to tensors and back, nothing averaged",
    )
    for title, series in results.items():
        against = ratio(series[ARRAYS], series[TENSORS])
        added_s = series[ARRAYS].median_s - series[TENSORS].median_s
        table.add_row(
            title,
            *(f"{series[name].median_s * 1e3:.2f}" for name in _CONTESTANTS),
            against.text(),
            f"{added_s * 1e6 / _LEAVES:.1f}",
        )
    return table


if __name__ == "__main__":
    main()
