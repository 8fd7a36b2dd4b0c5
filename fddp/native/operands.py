"""Typed interface of the compiled checks of an operator's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from torch import Tensor

from fddp.native import extension


class Operands(Protocol):
    """Signature of the leaves that a program was prepared for."""

    def matches(self, leaves: list[Any]) -> bool:
        """Return True if the leaves are dense tensors of the same shapes, dtypes and devices, and
        None where None was."""


def operands(leaves: Sequence[Tensor | None]) -> Operands:
    """Record the signature of leaves.

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
    """Return the position of the first tensor without memory of its own, or -1: wrappers of
    transforms and tracers, and subclasses with a dispatch of their own.

    >>> import torch
    >>> first_without_memory([torch.ones(2), None])
    -1
    >>> torch.func.vmap(lambda x: x * first_without_memory([x]))(torch.ones(2))
    tensor([0., 0.])
    """
    return cast(int, extension.load().first_without_memory(leaves))


def have_derivatives(leaves: Sequence[Any], *, graphs: bool) -> bool:
    """Return True if a leaf has a forward-mode tangent or, with `graphs`, requires a gradient.

    >>> import torch
    >>> have_derivatives([torch.ones(2), None], graphs=True)
    False
    >>> have_derivatives([torch.ones(2, requires_grad=True)], graphs=True)
    True
    """
    return cast(bool, extension.load().have_derivatives(leaves, graphs))
