"""Sums in one association, defined by the positions of ranks along the axes of a topology.

[Note: one association]
Floating-point sums depend on their association. In order (2, 3) six ranks' parts are summed as
((r0 + r1) + r2) + ((r3 + r4) + r5): within the innermost axis in rank order, then across. This is
the result of successive reduce-scatters along the axes, innermost first, as long as intermediate
results are not rounded. The bits are thus the same for every algorithm and transport.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from fddp.core.schedule.virtual import partial_sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fddp.core.schedule.virtual import SumTree

#: dtypes that are summed in float32 and rounded once
_NARROW = frozenset({torch.float16, torch.bfloat16})


def sum_in_order_(parts: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    """Sum tensors in one association; overwrites `parts`. See [Note: one association].

    Args:
        parts: tensors of one shape and dtype, by rank.
        order: sizes of the axes of the ranks, outermost first; their product is the number of
            parts.

    Returns:
        The sum, in the memory of the first part. For float16 and bfloat16: a new float32 tensor.

    Example:
        >>> parts = [torch.tensor([x]) for x in (1e8, 1.0, -1e8, 1.0)]
        >>> [sum_in_order_([p.clone() for p in parts], order).item() for order in ((4,), (2, 2))]
        [1.0, 0.0]
        >>> sum_in_order_([torch.full((1,), x).bfloat16() for x in (256.0, 1.0, 1.0)], (3,)).item()
        258.0
    """
    if parts[0].dtype in _NARROW:
        parts = [part.float() for part in parts]
    return _fold_(parts, order)


def sum_along_tree_(rows: Sequence[Tensor], additions: Sequence[int]) -> list[Tensor]:
    """Sum tensors along a tree; overwrites `rows`. See [Note: virtual ranks] in `virtual.py`.

    Args:
        rows: tensors of one shape and dtype, in rank order.
        additions: number of additions after each of them.

    Returns:
        The sums that are left, in memory of rows. For float16 and bfloat16: new float32 tensors.

    Example:
        >>> rows = [torch.tensor([x]) for x in (1e8, 1.0, -1e8)]
        >>> sum_along_tree_([row.clone() for row in rows], (0, 1, 1))
        [tensor([0.])]
        >>> sum_along_tree_(rows, (0, 1, 0))
        [tensor([100000000.]), tensor([-100000000.])]
        >>> sum_along_tree_([torch.full((1,), x).bfloat16() for x in (1.0, 256.0)], (0, 1))
        [tensor([257.])]
    """
    if rows[0].dtype in _NARROW:
        rows = [row.float() for row in rows]
    return partial_sums(rows, additions, torch.Tensor.add_)


@lru_cache(maxsize=64)
def nested_order(tree: SumTree) -> tuple[int, ...]:
    """Return the axes along which ranks with one summand each associate like a tree; () if there
    are none. Every backend sums along axes.

    Example:
        >>> from fddp.core.schedule.virtual import VirtualRanks
        >>> [nested_order(VirtualRanks.over(n, n).tree) for n in (3, 4, 5, 6)]
        [(3,), (2, 2), (), (3, 2)]
    """
    ranks, inner = len(tree.summands), 0
    if tree.width > 1:
        return ()
    while True:
        outer = ranks >> inner
        order = (outer,) * (outer > 1) + (2,) * inner or (1,)
        if _nested_additions(order) == tree.additions:
            return order
        if outer % 2:
            return ()
        inner += 1


def _nested_additions(order: Sequence[int]) -> tuple[int, ...]:
    """Return the number of additions after each summand of a sum along axes."""
    times = [0]
    for size in reversed(order):
        last = times[-1] + 1
        times = times + [*times[:-1], last] * (size - 1)
    return tuple(times)


def _fold_(parts: Sequence[Tensor], order: Sequence[int]) -> Tensor:
    if len(order) > 1:
        size = len(parts) // order[0]
        parts = [_fold_(parts[i : i + size], order[1:]) for i in range(0, len(parts), size)]
    total, *others = parts
    for part in others:
        total += part
    return total
