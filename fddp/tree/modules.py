"""Modules as trees of their parameters."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from fddp.core.text import counted
from fddp.errors import NoGradientError


def named_params(tree: Any, *, frozen: bool = False) -> Any:
    """Return a module's parameters by name, in order of registration; any other value unchanged.

    Args:
        tree: an `nn.Module`, or a tree.
        frozen: True to include the parameters without `requires_grad`.

    Raises:
        NoGradientError: no parameter has `requires_grad`, without `frozen`.

    Example:
        >>> import torch
        >>> sorted(named_params(torch.nn.Linear(2, 3)))
        ['bias', 'weight']
        >>> named_params({"w": 1})
        {'w': 1}
    """
    if not isinstance(tree, Module):
        return tree
    every = dict(tree.named_parameters())
    if frozen:
        return every
    trained = {name: param for name, param in every.items() if param.requires_grad}
    if not trained:
        raise NoGradientError(
            f"the {type(tree).__name__} has {counted(len(every), 'parameter')}, and none with "
            f"requires_grad; set it, or pass a tree of tensors"
        )
    return trained
