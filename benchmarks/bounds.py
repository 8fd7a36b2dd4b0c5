"""Figures that are held against a bound, and their table: `python -m benchmarks.bounds FILE...`.

Each benchmark writes its figures into its JSON; this reads such files, and prints one table of what
they hold.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Ratio

WIDTH = 120  # columns of what is printed where that is no terminal


@dataclass(frozen=True)
class Figure:
    """A measured number and the bound that it should keep.

    Attributes:
        what: the two quantities compared.
        case: the model, size or the like.
        value: the median over rounds.
        low, high: the lowest and highest round.
        bound: limit of the value.
        sense: at which side of the bound.

    Example:
        >>> Figure("step / DDP", "mlp", 0.9, 0.8, 1.1, 1.0, "at most").reached
        True
    """

    what: str
    case: str
    value: float
    low: float
    high: float
    bound: float
    sense: Literal["at most", "at least"]

    @property
    def reached(self) -> bool:
        """True if the median is within the bound."""
        return self.value <= self.bound if self.sense == "at most" else self.value >= self.bound


def at_most(bound: float, what: str, case: str, value: Ratio) -> Figure:
    """A figure that should not be higher."""
    return Figure(what, case, *value, bound, "at most")


def at_least(bound: float, what: str, case: str, value: Ratio) -> Figure:
    """A figure that should not be lower."""
    return Figure(what, case, *value, bound, "at least")


def to_values(figures: Iterable[Figure]) -> list[dict[str, Any]]:
    """Return the figures as JSON values."""
    return [{**asdict(figure), "reached": figure.reached} for figure in figures]


def from_values(values: Iterable[dict[str, Any]]) -> list[Figure]:
    """Restore figures from `to_values`."""
    return [Figure(**{k: v for k, v in value.items() if k != "reached"}) for value in values]


def figures_table(figures: Sequence[Figure]) -> Table:
    """Return a table of the figures for terminals."""
    table = Table(
        title="Figures and their bounds",
        caption="median of rounds (lowest-highest)",
        box=box.SIMPLE_HEAVY,
        pad_edge=False,
    )
    for heading in ("what", "case"):
        table.add_column(heading)  # these may take several lines
    for heading in ("measured", "bound", "reached"):
        table.add_column(heading, justify="right", no_wrap=True)
    previous = ""
    for figure in figures:
        table.add_row(
            figure.what if figure.what != previous else "",
            figure.case,
            Ratio(figure.value, figure.low, figure.high).text(),
            f"{'<=' if figure.sense == 'at most' else '>='} {figure.bound:g}",
            "yes" if figure.reached else "no",
        )
        previous = figure.what
    return table


def console() -> Console:
    """Prints tables, which are wider than what is taken for a terminal where there is none."""
    found = Console(highlight=False)
    has_width = found.is_terminal and not found.is_dumb_terminal
    return found if has_width else Console(highlight=False, width=WIDTH, force_terminal=False)


def main(paths: Sequence[str]) -> None:
    """Prints the figures of all files; those that do not exist are named."""
    figures: list[Figure] = []
    for path in map(Path, paths):
        if path.exists():
            figures += from_values(json.loads(path.read_text())["figures"])
        else:
            print(f"{path} is missing: its benchmark did not run to its end", file=sys.stderr)
    console().print(figures_table(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
