"""Shared parts of the examples: starting ranks, comparing trees, and a table of results."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import fddp
from fddp.cli.common import Check as Check
from fddp.cli.common import Printer, add_ranks
from fddp.cli.launch import launch
from fddp.tree.pytree import flatten

_MAX_RANKS = 8

#: What rounding may do to a parameter (float64, of the order of 1): ranks sum in another order than
#: one process, which changes last bits (1e-16), and training carries that on. A rank left out, a
#: local gradient or a wrong weight shows at 1e-4 and above.
ROUNDING = 1e-10


@dataclass(frozen=True)
class Report:
    """Results of an example.

    Attributes:
        title: name of the example.
        rows: figures that are shown: a name, a value, and a remark each.
        checks: checks by the name of their row.
        curves: numbers by name, to plot, of an example whose module has a function `plot` of them.
    """

    title: str
    rows: Sequence[tuple[str, str, str]]
    checks: Mapping[str, Check]
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True if all checks passed."""
        return all(check.passed for check in self.checks.values())


def difference(tree: Any, other: Any) -> float:
    """The largest absolute difference between two trees of the same structure.

    Example:
        >>> difference({"a": torch.ones(2), "b": torch.zeros(1)}, {"a": torch.ones(2), "b": 3.0})
        3.0
    """
    pairs = zip(flatten(tree)[0], flatten(other)[0], strict=True)
    return max(float(abs(leaf - wanted).max()) for leaf, wanted in pairs)


def difference_between_ranks(tree: Any) -> float:
    """The largest absolute difference of a leaf from rank 0's on any rank; a collective call."""
    own = torch.tensor(difference(tree, fddp.broadcast(tree, src=0)), dtype=torch.float64)
    return float(fddp.pmax(own))


def main(name: str, arguments: Sequence[str] | None = None, *, backend: str = "gloo") -> int:
    """Runs `examples.<name>.example()` on each rank, and prints rank 0's report.

    Under torchrun the ranks are torchrun's; otherwise this starts processes of its own. The default
    group has the given backend.

    Returns:
        The exit code: 0 if all checks passed, 1 if one did not or a rank failed, 2 where a library
        is missing.
    """
    try:
        module = importlib.import_module(f"examples.{name}")
        importlib.import_module("rich")
    except ModuleNotFoundError as error:
        print(f"{name} needs {error.name}: pip install fddp[examples]", file=sys.stderr)
        return 2
    example = module.example
    parser = argparse.ArgumentParser(f"python -m examples.{name}", description=example.__doc__)
    add_ranks(parser, _MAX_RANKS)
    if hasattr(module, "plot"):
        parser.add_argument("--figure", metavar="PATH", help="write a figure there")
    options = parser.parse_args(arguments)
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
        report, rank = example(), dist.get_rank()
        dist.destroy_process_group()
    else:
        try:
            report, rank = launch(options.ranks, example, backend=backend)[0], 0
        except ChildFailedError:
            print(f"{parser.prog}: a rank failed; its error is above", file=sys.stderr)
            return 1
    if rank == 0:
        show(report)
        if getattr(options, "figure", None):
            module.plot(report.curves).savefig(options.figure)
    return 0 if report.passed else 1


def show(report: Report) -> None:
    """Prints a report as a table, 80 columns wide at most. Needs rich."""
    from rich import box
    from rich.table import Table

    table = Table(title=report.title, box=box.SIMPLE_HEAVY, show_header=False)
    for row in report.rows:
        table.add_row(*row)
    for name, check in report.checks.items():
        table.add_row(name, f"{check.value:.1e}" if check.value else "0", str(check))
    Printer().show(table)
