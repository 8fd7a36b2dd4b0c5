"""Rows of a table of options in which every pair of values of two options occurs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
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
    # By the pairs that a row had when it was last looked at, of which it can only lose some.
    queue = [(-len(pairs), index, row) for index, (row, pairs) in enumerate(rows.items())]
    heapify(queue)
    while missing:
        before, index, best = queue[0]
        now = -len(rows[best] & missing)
        if now > before:
            heapreplace(queue, (now, index, best))
            continue
        missing -= rows[best]
        chosen.append(best)
    return chosen
