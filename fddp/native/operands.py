"""Signature of the leaves of an operator's arguments, which compiled code compares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from fddp.native import extension

if TYPE_CHECKING:
    from fddp._C import Operands


def operands(leaves: Sequence[Tensor | None]) -> Operands:
    """Record the signature of leaves.

    >>> import torch
    >>> like = operands([torch.ones(2), None])
    >>> like.matches([torch.zeros(2), None]), like.matches([torch.zeros(3), None])
    (True, False)
    """
    return extension.compiled.Operands(
        [() if leaf is None else leaf.shape for leaf in leaves],
        [None if leaf is None else leaf.dtype for leaf in leaves],
        [None if leaf is None else leaf.device for leaf in leaves],
    )
