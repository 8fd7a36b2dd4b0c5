"""Ranks that have different values, in words: who has what, and where the values part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

_LONGEST = 56  # characters of a value that are shown
_BEFORE = 8  # of them before the first that differs
_MOST_RANKS = 8  # that are named of one side, and sides that are told


def ranks_by_value(column: Sequence[int]) -> list[list[int]]:
    """Ranks by what they have, most first; the lower ranks of two equally large sides first.

    Args:
        column: a number for each rank, for what it has.

    Example:
        >>> ranks_by_value([7, 5, 7, 7, 5, 9])
        [[0, 2, 3], [1, 4], [5]]
    """
    counts = Counter(column)
    values = sorted(counts, key=lambda value: (-counts[value], column.index(value)))
    return [[rank for rank, other in enumerate(column) if other == value] for value in values]


def minority_ranks(groups: list[list[int]]) -> tuple[int, ...]:
    """The ranks that differ from the largest side; all of them where no side is the largest.

    Example:
        >>> minority_ranks([[0, 2, 3], [1], [4]]), minority_ranks([[0], [1]])
        ((1, 4), (0, 1))
    """
    if len({len(group) for group in groups}) == 1:
        return tuple(sorted(rank for group in groups for rank in group))
    return tuple(rank for group in groups[1:] for rank in group)


def format_digests(groups: list[list[int]], column: Sequence[int]) -> str:
    """Which digest the ranks of each side have.

    Example:
        >>> format_digests([[0, 2], [1]], [7, 255, 7])
        'ranks 0 and 2 have digest 0000000000000007, rank 1 has digest 00000000000000ff'
    """
    parts = [
        f"{format_ranks(group)} {_have(group)} digest {column[group[0]]:016x}" for group in groups
    ]
    rest = len(parts) - _MOST_RANKS
    return ", ".join(parts[:_MOST_RANKS]) + (f" and {rest} more digests" if rest > 0 else "")


def format_values(groups: list[list[int]], values: Sequence[str]) -> str:
    """What two ranks of different sides have, in short; `values` are whole, by rank.

    Example:
        >>> format_values([[0, 2], [1]], ["3.0", "4.0", "3.0"])
        '3.0 on rank 0, 4.0 on rank 1'
    """
    one, *rest = (group[0] for group in groups)
    # Of three sides, the second may differ from the first in a later element only.
    apart = (rank for rank in rest if values[rank] != values[one])
    two = next(apart, rest[0])
    mine, theirs = _cut(values[one], values[two])
    return f"{mine} on rank {one}, {theirs} on rank {two}"


def format_ranks(ranks: list[int]) -> str:
    """Some ranks in words.

    Example:
        >>> format_ranks([3]), format_ranks([0, 1, 4]), format_ranks(list(range(100)))
        ('rank 3', 'ranks 0, 1 and 4', 'ranks 0, 1, 2, 3, 4, 5, 6 and 93 others')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _MOST_RANKS:
        shown = ", ".join(map(str, ranks[: _MOST_RANKS - 1]))
        return f"ranks {shown} and {len(ranks) - _MOST_RANKS + 1} others"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _have(group: list[int]) -> str:
    return "has" if len(group) == 1 else "have"


def _cut(one: str, two: str) -> tuple[str, str]:
    """Two texts that differ, so short that they can be shown; both have the first difference.

    >>> _cut("12", "13")
    ('12', '13')
    >>> _cut("a" * 70 + "b", "a" * 70 + "c")
    ('...aaaaaaaab', '...aaaaaaaac')
    """
    pairs = zip(one, two, strict=False)
    apart = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))
    start = 0 if max(len(one), len(two)) <= _LONGEST else max(0, apart - _BEFORE)
    return _from(one, start), _from(two, start)


def _from(text: str, start: int) -> str:
    stop = start + _LONGEST
    return "..." * (start > 0) + text[start:stop] + "..." * (len(text) > stop)
