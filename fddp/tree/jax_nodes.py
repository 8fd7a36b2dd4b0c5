"""One-level flattening of containers registered with `jax.tree_util`: modules of Equinox, states
and variables of Flax, and users' own.

JAX is never imported here: unless it already is, nothing can be registered with it.
"""

from __future__ import annotations

import sys
from typing import Any


def is_node(value: Any) -> bool:
    """Return True if JAX treats a value as a container. `None` is a leaf here.

    >>> is_node(0.5)
    False
    """
    tree_util = sys.modules.get("jax.tree_util")
    return tree_util is not None and value is not None and not tree_util.all_leaves([value])


def flatten_node(node: Any) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]]:
    """Return the children of a container, its structure, and the entry of each child."""
    tree_util = sys.modules["jax.tree_util"]
    pairs, treedef = tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)
    entries = tuple(_entry(path) for path, _ in pairs)
    return tuple(child for _, child in pairs), treedef, entries


def unflatten_node(treedef: Any, children: Any) -> Any:
    """Build the container around other children."""
    return treedef.unflatten(children)


def _entry(path: tuple[Any, ...]) -> Any:
    """Return the user's name for a child: an attribute, a key or an index."""
    (key,) = path
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)
