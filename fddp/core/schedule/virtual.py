"""Virtual ranks: one association of a sum, whatever the number of ranks.

[Note: virtual ranks]
The global batch is cut into a fixed number of parts, one for each virtual rank, and each rank
carries a contiguous run of virtual ranks. The sum over virtual ranks is one binary tree that
depends on their number alone: a node of n virtual ranks has as its left half the largest power of
two below n, and as its right half the others. A rank sums the largest complete subtrees of its run;
these *spans* travel, and are added in the order of the tree. Every number of ranks therefore has
the same additions, on the same numbers, and only the place of an addition changes.

An association is written as the number of additions after each summand, as on a stack: a summand is
pushed, and each addition replaces the two newest sums by theirs. For 4 virtual ranks these are
(0, 1, 0, 2), which is (v0 + v1) + (v2 + v3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from fddp.core.text import counted

MOST_VIRTUAL_RANKS = 2**16


class Span(NamedTuple):
    """Virtual ranks `start` to `stop` - 1, whose sum is a node of the tree."""

    start: int
    stop: int


class SumTree(NamedTuple):
    """Association of a sum over the summands of several ranks.

    Attributes:
        summands: number of summands of each rank.
        additions: number of additions after each summand, in rank order; see
            [Note: virtual ranks].
    """

    summands: tuple[int, ...]
    additions: tuple[int, ...]

    @property
    def width(self) -> int:
        """Largest number of summands of a rank."""
        return max(self.summands)


@dataclass(frozen=True)
class VirtualRanks:
    """Virtual ranks on the ranks of a group, and the association of their sum.

    Construction validates types only; `check_schedule` proves that the sum is that of the tree.

    Attributes:
        count: number of virtual ranks.
        spans: for each rank, the spans of virtual ranks that it sums, in ascending order.
        additions: number of additions after each span, in rank order; see [Note: virtual ranks].

    Raises:
        ValueError: a field has the wrong type.

    Example:
        >>> print(VirtualRanks.over(8, world_size=3))
        ((v0 + v1) + (v2 + v3)) + ((v4 + v5) + (v6 + v7))
        rank 0: v0 to v1, sends v0:2
        rank 1: v2 to v4, sends v2:4, v4:5
        rank 2: v5 to v7, sends v5:6, v6:8
        >>> VirtualRanks.over(8, world_size=2).sent
        (1, 1)
    """

    count: int
    spans: tuple[tuple[Span, ...], ...]
    additions: tuple[int, ...]

    def __post_init__(self) -> None:
        if type(self.count) is not int or not 1 <= self.count <= MOST_VIRTUAL_RANKS:
            raise ValueError(
                f"virtual_ranks must be an int from 1 to {MOST_VIRTUAL_RANKS}, got {self.count!r}"
            )
        are_spans = isinstance(self.spans, tuple) and all(
            isinstance(own, tuple) and own and all(_is_span(span) for span in own)
            for own in self.spans
        )
        if not are_spans or not self.spans:
            raise ValueError(
                f"spans must be a tuple of one or more spans for each rank, got {self.spans!r}"
            )
        if not isinstance(self.additions, tuple) or {*map(type, self.additions)} != {int}:
            raise ValueError(f"additions must be a tuple of ints, got {self.additions!r}")

    @classmethod
    def over(cls, count: int, world_size: int) -> VirtualRanks:
        """Distribute virtual ranks over ranks, in runs whose lengths differ by at most one.

        Raises:
            ValueError: there are more ranks than virtual ranks, or an argument is below 1.
        """
        if type(count) is not int or not 1 <= count <= MOST_VIRTUAL_RANKS:
            raise ValueError(
                f"virtual_ranks must be an int from 1 to {MOST_VIRTUAL_RANKS}, got {count!r}"
            )
        if not 1 <= world_size <= count:
            raise ValueError(
                f"{counted(count, 'virtual rank')} can be carried by 1 to {count} ranks, got "
                f"{world_size}; pass virtual_ranks={max(1, world_size)} or more"
            )
        edges = [rank * count // world_size for rank in range(world_size + 1)]
        spans = tuple(
            tuple(_spans(edges[rank], edges[rank + 1], count)) for rank in range(world_size)
        )
        joined = [span for own in spans for span in own]
        return cls(count, spans, _additions(joined, count))

    @classmethod
    def from_document(cls, document: Any) -> VirtualRanks:
        """Restore a value from the fields of its JSON document: count, spans, additions."""
        count, spans, additions = document
        return cls(
            count,
            tuple(tuple(Span(*span) for span in own) for own in spans),
            tuple(additions),
        )

    @property
    def document(self) -> tuple[object, ...]:
        """Fields for JSON."""
        return self.count, self.spans, self.additions

    @cached_property
    def runs(self) -> tuple[range, ...]:
        """For each rank, the virtual ranks that it carries."""
        return tuple(range(own[0].start, own[-1].stop) for own in self.spans)

    @cached_property
    def sent(self) -> tuple[int, ...]:
        """For each rank, the number of partial sums that it sends, each of the whole bucket."""
        return tuple(map(len, self.spans))

    @cached_property
    def tree(self) -> SumTree:
        """Association of the sum over the spans of all ranks."""
        return SumTree(self.sent, self.additions)

    def __str__(self) -> str:
        """The sum as text, and the share of each rank in lines of their own."""
        terms = [f"v{number}" for number in range(self.count)]
        total = fold(terms, tree_additions(self.count), lambda a, b: f"({a} + {b})")
        lines = [total[1:-1] if self.count > 1 else total]
        for rank, (run, own) in enumerate(zip(self.runs, self.spans, strict=True)):
            sums = ", ".join(f"v{span.start}:{span.stop}" for span in own)
            lines.append(f"rank {rank}: v{run[0]} to v{run[-1]}, sends {sums}")
        return "\n".join(lines)


def tree_additions(count: int) -> tuple[int, ...]:
    """Return the number of additions after each of `count` summands, in the tree over all.

    Example:
        >>> tree_additions(4), tree_additions(5)
        ((0, 1, 0, 2), (0, 1, 0, 2, 1))
    """
    # As the carries of a binary counter; the last summand closes all open nodes.
    inner = [((number + 1) & -(number + 1)).bit_length() - 1 for number in range(count - 1)]
    return (*inner, (count - 1).bit_count())


def fold(summands: Iterable[Any], additions: Sequence[int], add: Any) -> Any:
    """Return the sum in an association; `add(left, right)` adds two summands or sums.

    Example:
        >>> fold("abcd", (0, 1, 0, 2), lambda a, b: f"({a}{b})")
        '((ab)(cd))'
    """
    stack: list[Any] = []
    for summand, times in zip(summands, additions, strict=True):
        stack.append(summand)
        for _ in range(times):
            right = stack.pop()
            stack.append(add(stack.pop(), right))
    (total,) = stack
    return total


def halves(span: Span, count: int) -> tuple[Span, Span] | None:
    """Return the halves of a node of the tree over `count` virtual ranks; None if the span is no
    node, or a single virtual rank.

    Example:
        >>> halves(Span(4, 7), 7), halves(Span(4, 7), 8)
        ((Span(start=4, stop=6), Span(start=6, stop=7)), None)
    """
    start, stop = span
    width = 1 << max(0, stop - start - 1).bit_length()
    is_node = start % width == 0 and stop == min(start + width, count)
    if width == 1 or not is_node:
        return None
    middle = start + width // 2
    return Span(start, middle), Span(middle, stop)


def _spans(start: int, stop: int, count: int) -> Iterable[Span]:
    """Yield the largest nodes of the tree that make up [start, stop)."""
    while start < stop:
        width = start & -start or 1 << (count - 1).bit_length()
        while min(start + width, count) > stop:
            width //= 2
        yield Span(start, min(start + width, count))
        start += width


def _additions(spans: Sequence[Span], count: int) -> tuple[int, ...]:
    """Return the number of additions after each of the spans, which make up the tree."""
    stack: list[Span] = []
    times = []
    for span in spans:
        stack.append(span)
        before = len(stack)
        while len(stack) > 1:
            joined = Span(stack[-2].start, stack[-1].stop)
            if halves(joined, count) != (stack[-2], stack[-1]):
                break
            stack[-2:] = [joined]
        times.append(before - len(stack))
    return tuple(times)


def _is_span(value: object) -> bool:
    return isinstance(value, Span) and all(type(edge) is int for edge in value)
