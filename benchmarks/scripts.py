"""Command line, tables and JSON of the scripts that measure."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.bounds import Figure, console, figures_table, to_values


def options(description: str | None, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return a parser of `--json`, and of `--rounds` if their default number is given."""
    parser = argparse.ArgumentParser(description=description)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, metavar="N")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there too")
    return parser


def numbers_table(title: str, headings: Iterable[str], *, caption: str | None = None) -> Table:
    """Return a table of names, in a first column without a heading, and of numbers."""
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAVY, pad_edge=False)
    table.add_column("")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def publish(
    tables: Iterable[Table],
    figures: Sequence[Figure],
    values: Mapping[str, Any],
    path: Path | None,
) -> None:
    """Print tables, and figures if there are any; write values and figures to `path` as JSON."""
    show = console().print
    for table in tables:
        show(table)
    if figures:
        show(figures_table(figures))
    if path is not None:
        path.write_text(json.dumps({**values, "figures": to_values(figures)}, indent=2))
