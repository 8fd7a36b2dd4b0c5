"""Cost of trees of JAX arrays relative to trees of tensors: `python -m benchmarks.jax_trees`.

Two ranks average a tree of 300 leaves, once of tensors and once of arrays of the same sizes. Each
array costs the same few microseconds whatever its size, for a handle on the way in and an array on
the way out, so that the ratio is one of sizes. The bound is for the largest tree, of about as many
parameters as a small language model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
        return f"{self.leaves} leaves of {self.side} x {self.side}, {self.transport}"


Results = dict[str, dict[str, Series]]


def main() -> None:
    """Measures and prints; about a minute."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there too")
    args = parser.parse_args()
    results = launch(2, run_rank, args.rounds)[0]
    console().print(_table(results))
    console().print(figures_table(figures(results)))
    if args.json is not None:
        args.json.write_text(_to_json(results))


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
        held: dict[str, Any] = {}  # as a training loop holds gradients until it has the next

        def keep(name: str, mean: Any) -> None:
            held[name] = mean

        steps = {
            TENSORS: lambda: keep(TENSORS, of_tensors(tensors)),
            ARRAYS: lambda: keep(ARRAYS, of_arrays(arrays)),
            JAX_ALONE: lambda: keep(
                JAX_ALONE, to_arrays(to_tensors(leaves, list(arrays), ""), homes)
            ),
            JITTED: lambda: keep(JITTED, jax.block_until_ready(reduce(arrays))),
        }
        return measure(steps, rounds, _STEPS, stages.advance)


def _table(results: Mapping[str, Mapping[str, Series]]) -> Table:
    table = Table(
        title="Averaging a tree on two ranks: ms",
        caption="median of rounds; JAX alone: arrays to tensors and back, nothing averaged",
        box=box.SIMPLE_HEAVY,
        pad_edge=False,
    )
    table.add_column("")
    for name in _CONTESTANTS:
        table.add_column(name, justify="right")
    for name in ("arrays / tensors", "us a leaf"):
        table.add_column(name, justify="right", no_wrap=True)
    for title, series in results.items():
        against = ratio(series[ARRAYS], series[TENSORS])
        added_s = series[ARRAYS].median_s - series[TENSORS].median_s
        table.add_row(
            title,
            *(f"{series[name].median_s * 1e3:.2f}" for name in _CONTESTANTS),
            f"{against.median:.2f} ({against.low:.2f}-{against.high:.2f})",
            f"{added_s * 1e6 / _LEAVES:.1f}",
        )
    return table


def _to_json(results: Mapping[str, Mapping[str, Series]]) -> str:
    values = {
        title: {name: each.rounds_s for name, each in series.items()}
        for title, series in results.items()
    }
    return json.dumps({"results": values, "figures": to_values(figures(results))}, indent=1)


if __name__ == "__main__":
    main()
