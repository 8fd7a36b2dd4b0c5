"""Rows of a table of options in which every pair of values of two options occurs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product

Row = tuple[str, ...]


def pairwise(*options: Sequence[str], valid: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Few of the valid rows, which together have every pair that valid rows have.

    >>> len(pairwise("ab", "cd", "ef"))
    4
    """
    rows = {row: {*combinations(enumerate(row), 2)} for row in product(*options) if valid(row)}
    missing = set().union(*rows.values())
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(rows[row] & missing))
        missing -= rows[best]
        chosen.append(best)
    return chosen
