"""Number of gradients of each leaf that a bucket waits for.

The prediction uses the autograd graph and the previous step. A wrong prediction costs overlap or a
second reduction, never correctness: a missing gradient counts as zero at the end of backward, and a
late one is repaired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Observations of one backward pass."""

    visible: Sequence[bool]  # for each leaf, True if the graph behind the loss led to it
    counts: Sequence[int]  # for each leaf, the number of gradients that arrived
    as_expected: bool = False  # True if `counts` matched the prediction
    opaque: bool = False  # as in `expected_counts`


def expected_counts(
    visible: Sequence[bool], *, opaque: bool, previous: Arrivals | None
) -> list[int]:
    """Return the number of gradients to wait for, by leaf.

    Args:
        visible: for each leaf, True if the graph behind the loss leads to it.
        opaque: True if the graph has nodes that may run nested backward passes (re-entrant
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
    if visible == previous.visible:  # fast path of the usual step
        if opaque:
            return list(previous.counts)
        if 0 not in previous.counts:
            return list(map(int, visible))
    seen = zip(visible, previous.visible, previous.counts, strict=True)
    if opaque:
        # A leaf that was not visible before had no count to learn from.
        return [max(count, int(now and not before)) for now, before, count in seen]
    # A visible leaf without a gradient last time is on a path that yields none.
    return [int(now and not (before and count == 0)) for now, before, count in seen]
