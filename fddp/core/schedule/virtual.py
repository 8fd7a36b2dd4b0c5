"""Virtual ranks: one association of a sum, whatever the number of ranks.

[Note: virtual ranks]
The global batch is cut into a fixed number of parts, one for each virtual rank, and each rank
carries a contiguous run of virtual ranks. The sum over virtual ranks is one binary tree that
depends on their number alone: a node of n virtual ranks has as its left half the largest power of
two below n, and as its right half the others. A rank sums the largest complete subtrees of its run;
these *spans* travel, and are added in the order of the tree. Every number of ranks therefore has
the same additions, on the same numbers, and only the place of an addition changes.

Sums along one axis of a topology after the other have the same additions. Ranks along the inner
axes carry a run of virtual ranks, because ranks are numbered in row-major order. They add what can
be added within it, and the sums that are left travel along the next axis. These are as many as one
rank with this run would send. Sparse sums are gathered on all ranks, which add them in this order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from fddp.core.schedule.sum_tree import SumTree, divided, fold, partial_sums, tree_additions
from fddp.core.text import counted

MOST_VIRTUAL_RANKS = 2**16


class Span(NamedTuple):
    """Virtual ranks `start` to `stop` - 1, whose sum is a node of the tree."""

    start: int
    stop: int


@dataclass(frozen=True)
class VirtualRanks:
    """Virtual ranks on the ranks of a group, and the association of their sum.

    Construction validates types only; `check_schedule` proves that the sum is that of the tree.

    Attributes:
        count: number of virtual ranks.
        spans: for each rank, the spans of virtual ranks that it sums, in ascending order.
        additions: number of additions after each span, in rank order; see [Note: one association].

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

    def stage(self, block: int, parts: int) -> tuple[SumTree, ...]:
        """Return the associations of sums along some axes, for each group of ranks in rank order.

        Args:
            block: number of ranks along the axes that are summed already, innermost first.
            parts: number of ranks along these axes, of which each has the sums of its block.

        Example:
            >>> virtual = VirtualRanks.over(8, world_size=6)
            >>> within, across = virtual.stage(1, 3), virtual.stage(3, 2)
            >>> [(tree.summands, tree.sums) for tree in within]
            [((1, 1, 1), 1), ((1, 1, 1), 1)]
            >>> across
            (SumTree(summands=(1, 1), additions=(0, 1)),)
        """
        found = self._stages.get((block, parts))
        if found is None:
            tree = self.tree if block == 1 else divided(self.tree, block).across
            found = self._stages[block, parts] = divided(tree, parts).within
        return found

    @cached_property
    def _stages(self) -> dict[tuple[int, int], tuple[SumTree, ...]]:
        return {}

    def roots(self, block: int) -> tuple[tuple[Span, ...], ...]:
        """Return the spans whose sums are left within each block of `block` neighbouring ranks.

        Example:
            >>> VirtualRanks.over(8, world_size=6).roots(3)
            ((Span(start=0, stop=4),), (Span(start=4, stop=8),))
            >>> [len(own) for own in VirtualRanks.over(8, world_size=6).roots(2)]
            [1, 2, 2]
        """
        found = []
        for number, tree in enumerate(self.stage(1, block)):
            own = self.spans[number * block : (number + 1) * block]
            found.append(tuple(partial_sums(chain.from_iterable(own), tree.additions, join)))
        return tuple(found)

    def __str__(self) -> str:
        """The sum as text, and the share of each rank in lines of their own."""
        terms = [f"v{number}" for number in range(self.count)]
        total = fold(terms, tree_additions(self.count), lambda a, b: f"({a} + {b})")
        lines = [total[1:-1] if self.count > 1 else total]
        for rank, (run, own) in enumerate(zip(self.runs, self.spans, strict=True)):
            lines.append(f"rank {rank}: v{run[0]} to v{run[-1]}, sends {_listed(own)}")
        return "\n".join(lines)

    def describe_blocks(self, block: int, along: str) -> str:
        """Describe the sums that blocks of `block` ranks send along an axis, in a line for each.

        Example:
            >>> print(VirtualRanks.over(6, world_size=6).describe_blocks(3, "host"))
            ranks 0 to 2: v0 to v2, send v0:2, v2:3 along host
            ranks 3 to 5: v3 to v5, send v3:4, v4:6 along host
        """
        lines = []
        for number, own in enumerate(self.roots(block)):
            first, last = number * block, (number + 1) * block - 1
            lines.append(
                f"ranks {first} to {last}: v{own[0].start} to v{own[-1].stop - 1}, send "
                f"{_listed(own)} along {along}"
            )
        return "\n".join(lines)


def join(left: Span, right: Span) -> Span:
    """Return the span of two neighbours."""
    return Span(left.start, right.stop)


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
            joined = join(stack[-2], stack[-1])
            if halves(joined, count) != (stack[-2], stack[-1]):
                break
            stack[-2:] = [joined]
        times.append(before - len(stack))
    return tuple(times)


def _listed(spans: Iterable[Span]) -> str:
    return ", ".join(f"v{span.start}:{span.stop}" for span in spans)


def _is_span(value: object) -> bool:
    return isinstance(value, Span) and all(type(edge) is int for edge in value)
