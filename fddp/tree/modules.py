"""Modules as trees of their parameters."""

from __future__ import annotations

from typing import Any

from torch.nn import Module


def named_params(tree: Any, *, frozen: bool = False) -> Any:
    """Return a module's parameters by name, in order of registration; any other value unchanged.

    Args:
        tree: an `nn.Module`, or a tree.
        frozen: True to include the parameters without `requires_grad`.

    Example:
        >>> import torch
        >>> sorted(named_params(torch.nn.Linear(2, 3)))
        ['bias', 'weight']
        >>> named_params({"w": 1})
        {'w': 1}
    """
    if not isinstance(tree, Module):
        return tree
    return {name: param for name, param in tree.named_parameters() if frozen or param.requires_grad}
