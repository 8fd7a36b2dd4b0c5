"""Sums along a tree; see [Note: one association] in `core/schedule/sum_tree.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fddp.core.schedule.sum_tree import partial_sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

#: dtypes that are summed in float32 and rounded once
_NARROW = frozenset({torch.float16, torch.bfloat16})


def sum_along_tree_(rows: Sequence[Tensor], additions: Sequence[int]) -> list[Tensor]:
    """Sum tensors along a tree; overwrites `rows`. See [Note: one association].

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
