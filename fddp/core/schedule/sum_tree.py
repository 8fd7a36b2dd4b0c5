"""Associations of sums over ranks, as values.

[Note: one association]
Floating-point sums depend on their association. It is written as the number of additions after each
summand, as on a stack: a summand is pushed, and each addition replaces the two newest sums by
theirs. (0, 1, 0, 2) is (a + b) + (c + d).

With `deterministic`, each rank has one summand, and six ranks along axes of sizes (2, 3) sum them
as ((r0 + r1) + r2) + ((r3 + r4) + r5): within the innermost axis in rank order, then across. This
is the result of successive reduce-scatters along the axes, innermost first, as long as intermediate
results are not rounded. With `virtual_ranks`, a rank may have several; see [Note: virtual ranks] in
`virtual.py`. The bits are the same for every algorithm and transport.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple


class SumTree(NamedTuple):
    """Association of one or more sums over the summands of several ranks.

    Attributes:
        summands: number of summands of each rank.
        additions: number of additions after each summand, in rank order; see
            [Note: one association].
    """

    summands: tuple[int, ...]
    additions: tuple[int, ...]

    @classmethod
    def along(cls, sizes: Sequence[int]) -> SumTree:
        """Return the association along axes of these sizes, outermost first, of ranks with one
        summand each: within the innermost axis in rank order, then across.

        Example:
            >>> SumTree.along((2, 3)).additions
            (0, 1, 1, 0, 1, 2)
        """
        times = [0]
        for size in reversed(sizes):
            times = times + [*times[:-1], times[-1] + 1] * (size - 1)
        return cls((1,) * len(times), tuple(times))

    @property
    def sums(self) -> int:
        """Number of sums that are left after all additions."""
        return len(self.additions) - sum(self.additions)

    @property
    def width(self) -> int:
        """Largest number of summands of a rank, or the number of sums if that is larger."""
        return max(*self.summands, self.sums)

    @property
    def digest(self) -> int:
        """FNV-1a of both lists in 64 bits, as in `csrc/shm/sums.cpp`; ranks compare it."""
        found = 14695981039346656037
        for number in (*self.summands, *self.additions):
            found = (found ^ number) * 1099511628211 % 2**64
        return found


class Divided(NamedTuple):
    """A sum over ranks, divided into runs of neighbouring ranks.

    Attributes:
        within: for each run, the additions among its summands.
        across: the other additions, in which a run is one rank with the sums that it has left.
    """

    within: tuple[SumTree, ...]
    across: SumTree


def divided(tree: SumTree, size: int) -> Divided:
    """Divide a sum into those within runs of `size` ranks, and the sum of theirs.

    Example:
        >>> divided(SumTree((1, 1, 1, 1), (0, 1, 0, 2)), 2).across
        SumTree(summands=(1, 1), additions=(0, 1))
        >>> divided(SumTree((1, 1, 1), (0, 0, 2)), 1).across
        SumTree(summands=(1, 1, 1), additions=(0, 0, 2))
    """
    within: list[tuple[SumTree, int]] = []
    across: list[int] = []
    additions = iter(tree.additions)
    for first in range(0, len(tree.summands), size):
        summands = tree.summands[first : first + size]
        own: list[int] = []
        height = 0  # sums of the run on the stack, without those that were added to sums before
        before = len(across)
        for times in islice(additions, sum(summands)):
            own.append(min(times, height))
            height += 1 - own[-1]
            if times > own[-1]:
                # The run's only sum on the stack is added to sums of the runs before.
                across.append(times - own[-1])
                height = 0
        across += [0] * height
        within.append((SumTree(summands, tuple(own)), len(across) - before))
    return Divided(
        tuple(run for run, _ in within),
        SumTree(tuple(left for _, left in within), tuple(across)),
    )


def tree_additions(count: int) -> tuple[int, ...]:
    """Return the number of additions after each of `count` summands, in the tree over all.

    Example:
        >>> tree_additions(4), tree_additions(5)
        ((0, 1, 0, 2), (0, 1, 0, 2, 1))
    """
    # As the carries of a binary counter; the last summand closes all open nodes.
    inner = [((number + 1) & -(number + 1)).bit_length() - 1 for number in range(count - 1)]
    return (*inner, (count - 1).bit_count())


def partial_sums(summands: Iterable[Any], additions: Sequence[int], add: Any) -> list[Any]:
    """Return the sums that an association leaves; `add(left, right)` adds two summands or sums.

    Example:
        >>> partial_sums("abcd", (0, 1, 0, 0), lambda a, b: f"({a}{b})")
        ['(ab)', 'c', 'd']
    """
    stack: list[Any] = []
    for summand, times in zip(summands, additions, strict=True):
        stack.append(summand)
        for _ in range(times):
            right = stack.pop()
            stack.append(add(stack.pop(), right))
    return stack


def fold(summands: Iterable[Any], additions: Sequence[int], add: Any) -> Any:
    """Return the sum in an association that leaves one; see `partial_sums`.

    Example:
        >>> fold("abcd", (0, 1, 0, 2), lambda a, b: f"({a}{b})")
        '((ab)(cd))'
    """
    (total,) = partial_sums(summands, additions, add)
    return total
