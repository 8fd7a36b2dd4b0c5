"""The compiled comparison of what an operator is given with what it was prepared for, typed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from torch import Tensor

from fddp.native import extension


class Operands(Protocol):
    """Leaves as they were when a program was made for them."""

    def matches(self, leaves: list[Any]) -> bool:
        """Return True if the leaves are dense tensors of the same shapes, dtypes and devices, and
        None where None was."""


def operands(leaves: Sequence[Tensor | None]) -> Operands:
    """What later leaves must be like.

    >>> import torch
    >>> like = operands([torch.ones(2), None])
    >>> like.matches([torch.zeros(2), None]), like.matches([torch.zeros(3), None])
    (True, False)
    """
    return cast(
        Operands,
        extension.load().Operands(
            [() if leaf is None else leaf.shape for leaf in leaves],
            [None if leaf is None else leaf.dtype for leaf in leaves],
            [None if leaf is None else leaf.device for leaf in leaves],
        ),
    )


def first_without_memory(leaves: Sequence[Any]) -> int:
    """Position of the first of these that stands for a tensor without being one in memory, or -1:
    what transforms and tracers hand round, and subclasses that dispatch by themselves.

    >>> import torch
    >>> first_without_memory([torch.ones(2), None])
    -1
    >>> torch.func.vmap(lambda x: x * first_without_memory([x]))(torch.ones(2))
    tensor([0., 0.])
    """
    return cast(int, extension.load().first_without_memory(leaves))


def have_derivatives(leaves: Sequence[Any], *, graphs: bool) -> bool:
    """Whether any of these has a tangent of forward mode or, with `graphs`, asks for a gradient.

    >>> import torch
    >>> have_derivatives([torch.ones(2), None], graphs=True)
    False
    >>> have_derivatives([torch.ones(2, requires_grad=True)], graphs=True)
    True
    """
    return cast(bool, extension.load().have_derivatives(leaves, graphs))
