"""Differences between ranks as text: the ranks, their values, and the leaf that they belong to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from fddp.core.protocol.messages import Schema, optional
from fddp.core.text import counted, leaf_text
from fddp.errors import FddpError, PlanMismatchError

LEAVES: Schema = [(str, [int], str, optional([int]), str, bool)]
"""Schema of leaves in a message: the JSON of a `LeafSpec` each."""

_LONGEST = 56  # characters shown of a value
_BEFORE = 8  # of these, characters before the first difference
_MOST_RANKS = 8  # ranks named in one group, and groups named


def check_equal(
    subject: str,
    values: Sequence[object],
    way_out: str,
    error: type[FddpError] = PlanMismatchError,
    ranks: Sequence[int] | None = None,
) -> None:
    """Check that all ranks have the same value.

    Args:
        subject: name of the value, for the error.
        values: each rank's value, by rank.
        way_out: advice to the caller, for the error.
        error: type of the error.
        ranks: the ranks that are compared, in the order of `values`; all ranks by default.

    Raises:
        FddpError: two values differ; of type `error`.

    Example:
        >>> check_equal("every", [3, 3, 2], "pass the same every on all ranks")
        Traceback (most recent call last):
        fddp.errors.PlanMismatchError: every is 3 on rank 0 and 2 on rank 2; pass the same every on
        all ranks
    """
    ranks = range(len(values)) if ranks is None else ranks
    for rank, value in zip(ranks, values, strict=True):
        if value != values[0]:
            raise error(f"{subject} is {format_pair(ranks[0], values[0], rank, value)}; {way_out}")


def leaf_difference(one: int, first: Sequence[Any], two: int, second: Sequence[Any]) -> str | None:
    """Text with the first difference between the leaves of two ranks; None if they are equal.

    Args:
        one, two: the ranks.
        first, second: leaves of each of them, as `LEAVES` or `LeafSpec`.

    Example:
        >>> w, b = ["w", [2], "float32", None, "cpu", False], ["b", [], "none", None, "none", False]
        >>> leaf_difference(0, [w], 3, [b])
        "rank 0 has leaf 'w' of shape (2,), float32 on cpu where rank 3 has leaf 'b', which is None"
        >>> leaf_difference(0, [w], 3, [])
        "rank 0 has 1 leaf and rank 3 has 0; only rank 0 has leaf 'w' of shape (2,), float32 on
        cpu"
    """
    for mine, theirs in zip_longest(first, second):
        if mine is None or theirs is None:
            counts = f"{counted(len(first), 'leaf')} and rank {two} has {len(second)}"
            only = f"only rank {one if mine else two} has {_leaf(mine or theirs)}"
            return f"rank {one} has {counts}; {only}"
        if mine != theirs:
            return f"rank {one} has {_leaf(mine)} where rank {two} has {_leaf(theirs)}"
    return None


def _leaf(leaf: Sequence[Any]) -> str:
    path, shape, dtype, strides, device, sparse = leaf
    if dtype == "none":
        return f"{leaf_text(path)}, which is None"
    text = f"{leaf_text(path)} of shape {tuple(shape)}, {dtype} on {device}"
    text += f" with strides {tuple(strides)}" if strides else ""
    return f"{text}, declared sparse" if sparse else text


def ranks_by_value(column: Sequence[int]) -> list[list[int]]:
    """Group ranks by value: the largest group first, and the lower ranks first of equal groups.

    Args:
        column: a number for each rank that identifies its value.

    Example:
        >>> ranks_by_value([7, 5, 7, 7, 5, 9])
        [[0, 2, 3], [1, 4], [5]]
    """
    counts = Counter(column)
    values = sorted(counts, key=lambda value: (-counts[value], column.index(value)))
    return [[rank for rank, other in enumerate(column) if other == value] for value in values]


def minority_ranks(groups: list[list[int]]) -> tuple[int, ...]:
    """Ranks outside of the largest group. All ranks if all groups have the same size.

    Example:
        >>> minority_ranks([[0, 2, 3], [1], [4]]), minority_ranks([[0], [1]])
        ((1, 4), (0, 1))
    """
    if len({len(group) for group in groups}) == 1:
        return tuple(sorted(rank for group in groups for rank in group))
    return tuple(rank for group in groups[1:] for rank in group)


def format_digests(groups: list[list[int]], column: Sequence[int]) -> str:
    """Text with the digest of each group.

    Example:
        >>> format_digests([[0, 2], [1]], [7, 255, 7])
        'ranks 0 and 2 have digest 0000000000000007, rank 1 has digest 00000000000000ff'
    """
    parts = [
        f"{format_ranks(group)} {'has' if len(group) == 1 else 'have'} digest "
        f"{column[group[0]]:016x}"
        for group in groups
    ]
    rest = len(parts) - _MOST_RANKS
    return ", ".join(parts[:_MOST_RANKS]) + (f" and {rest} more digests" if rest > 0 else "")


def format_values(groups: list[list[int]], values: Sequence[str]) -> str:
    """Text with the values of two ranks of different groups, abbreviated.

    Args:
        groups: ranks by value.
        values: full text of each rank's value, by rank.

    Example:
        >>> format_values([[0, 2], [1]], ["3.0", "4.0", "3.0"])
        '3.0 on rank 0 and 4.0 on rank 1'
    """
    one, *rest = (group[0] for group in groups)
    # With three groups, the second may differ from the first only in a later element.
    apart = (rank for rank in rest if values[rank] != values[one])
    two = next(apart, rest[0])
    mine, theirs = _cut(values[one], values[two])
    return format_pair(one, mine, two, theirs)


def format_pair(one: int, mine: object, two: int, theirs: object) -> str:
    """Text with the values of two ranks, in full.

    Example:
        >>> format_pair(0, "float32", 3, "float64")
        'float32 on rank 0 and float64 on rank 3'
    """
    return f"{mine} on rank {one} and {theirs} on rank {two}"


def format_ranks(ranks: list[int]) -> str:
    """Text that lists ranks, at most eight.

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


def _cut(one: str, two: str) -> tuple[str, str]:
    """Abbreviate two different texts. Both keep the first difference.

    >>> _cut("12", "13")
    ('12', '13')
    >>> _cut("a" * 70 + "b", "a" * 70 + "c")
    ('...aaaaaaaab', '...aaaaaaaac')
    """
    pairs = enumerate(zip(one, two, strict=False))
    apart = next((i for i, (a, b) in pairs if a != b), min(len(one), len(two)))
    start = 0 if max(len(one), len(two)) <= _LONGEST else max(0, apart - _BEFORE)
    return _from(one, start), _from(two, start)


def _from(text: str, start: int) -> str:
    stop = start + _LONGEST
    return "..." * (start > 0) + text[start:stop] + "..." * (len(text) > stop)
