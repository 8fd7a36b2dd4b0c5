"""Published numbers beside simulated ones, as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One number.

    Attributes:
        number: what it is, with its unit.
        published: value in the source.
        ours: value of the simulator or the planner for the same inputs.
        source: where the published value stands.
        missed: True if the deviation is larger than what counts as agreement.

    Example:
        >>> f"{Row('step, s', 0.100, 0.097, 'a paper').deviation:+.0%}"
        '-3%'
    """

    number: str
    published: float
    ours: float
    source: str
    missed: bool = False

    @property
    def deviation(self) -> float:
        """Relative deviation of ours from the published value."""
        return self.ours / self.published - 1.0


@dataclass(frozen=True)
class Result:
    """All numbers of one source.

    Attributes:
        title: name of the source.
        rows: its numbers.
        notes: inputs, and what was missed, in plain words.
        headings: of the published column and of ours.
    """

    title: str
    rows: Sequence[Row]
    notes: Sequence[str]
    headings: tuple[str, str] = ("published", "simulated")

    def table(self) -> Table:
        """Return the table; the deviation of a missed number says so."""
        table = Table(title=self.title, caption="\n".join(self.notes), box=box.SIMPLE_HEAVY)
        table.caption_justify = "left"
        table.add_column("number", no_wrap=True)
        for heading in (*self.headings, "deviation"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("source")
        for row in self.rows:
            deviation = f"{row.deviation:+.1%}" + (" missed" if row.missed else "")
            values = (f"{row.published:.4g}", f"{row.ours:.4g}", deviation)
            table.add_row(row.number, *values, row.source)
        return table

    def values(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        rows = [{**asdict(row), "deviation": row.deviation} for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": list(self.notes)}
