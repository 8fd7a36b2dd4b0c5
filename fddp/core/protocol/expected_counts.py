"""How many gradients of each leaf a bucket waits for, from the graph and from the step before.

A wrong guess never costs correctness: a gradient that was waited for in vain joins as zero at the
end of backward, and one that comes too late is repaired. It costs overlap or a second reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Arrivals(NamedTuple):
    """What one backward pass showed, by leaf.

    Attributes:
        visible: whether the graph behind the loss led to the leaf.
        counts: how many gradients arrived.
        as_expected: True if these are the counts that were expected.
        opaque: as in `expected_counts`.
    """

    visible: Sequence[bool]
    counts: Sequence[int]
    as_expected: bool = False
    opaque: bool = False


def expected_counts(
    visible: Sequence[bool], *, opaque: bool, previous: Arrivals | None
) -> list[int]:
    """Gradients to wait for, by leaf.

    Args:
        visible: whether the graph behind the loss leads to each leaf.
        opaque: whether the graph has nodes that may run backward passes of their own (re-entrant
            checkpointing does), so that leaves can receive gradients that the graph does not show.
        previous: the last backward pass, or None before the first.

    Example:
        >>> expected_counts([True, False], opaque=False, previous=None)
        [1, 0]
        >>> expected_counts([True, False], opaque=True, previous=None)
        [1, 1]
        >>> expected_counts([True, False], opaque=True, previous=Arrivals([True, False], [1, 3]))
        [1, 3]
    """
    if previous is None:
        return [1] * len(visible) if opaque else [int(v) for v in visible]
    if visible == previous.visible:  # the usual step, in which nothing is to be weighed
        if opaque:
            return list(previous.counts)
        if 0 not in previous.counts:
            return list(map(int, visible))
    seen = zip(visible, previous.visible, previous.counts, strict=True)
    if opaque:
        # A leaf that has just come into view can't have shown a count before.
        return [max(count, int(now and not before)) for now, before, count in seen]
    # A leaf in view that received nothing last time hangs on a path without a gradient.
    return [int(now and not (before and count == 0)) for now, before, count in seen]
