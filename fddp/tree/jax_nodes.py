"""Containers that are registered with `jax.tree_util`, taken apart by one level: modules of
Equinox, states and variables of Flax, and users' own.

Nothing here imports JAX: where it is not imported, nobody has registered anything.
"""

from __future__ import annotations

import sys
from typing import Any


def is_node(value: Any) -> bool:
    """Whether JAX takes a value apart. `None` is a leaf here.

    >>> is_node(0.5)
    False
    """
    tree_util = sys.modules.get("jax.tree_util")
    return tree_util is not None and value is not None and not tree_util.all_leaves([value])


def flatten_node(node: Any) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]]:
    """The children of a container, what it is without them, and the entry that leads to each."""
    tree_util = sys.modules["jax.tree_util"]
    pairs, treedef = tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)
    entries = tuple(_entry(path) for path, _ in pairs)
    return tuple(child for _, child in pairs), treedef, entries


def unflatten_node(treedef: Any, children: Any) -> Any:
    """The container around other children."""
    return treedef.unflatten(children)


def _entry(path: tuple[Any, ...]) -> Any:
    """What users call a child: the name of an attribute, a key or a number."""
    (key,) = path
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)
