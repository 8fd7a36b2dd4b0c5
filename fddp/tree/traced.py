"""Flattening of trees of common containers in few interpreter steps.

Under dynamo, each Python instruction costs as much as a small kernel, and optree's functions take
many. Trees with any other container are left to optree.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

Entries = tuple[Any, ...]
"""Keys, indices or field names on the way from the root of a tree to a node."""


def walk(tree: Any, leaves: list[Any], ways: list[Entries], way: Entries = ()) -> bool:
    """Append the leaves of a tree to `leaves`, in insertion order, and to `ways` the entries that
    lead to each. `way` leads to `tree`.

    Returns:
        True if all containers have known types; otherwise the lists are incomplete.

    >>> leaves, ways = [], []
    >>> walk({"b": 1.0, "a": [2.0, None]}, leaves, ways), leaves, ways
    (True, [1.0, 2.0, None], [('b',), ('a', 0), ('a', 1)])
    """
    if _is_leaf(tree):
        leaves.append(tree)
        ways.append(way)
        return True
    entries = _entries(tree)
    if entries is None:
        return False
    for entry, child in entries:
        if child is None or isinstance(child, Tensor):
            leaves.append(child)
            ways.append((*way, entry))
        elif not walk(child, leaves, ways, (*way, entry)):
            return False
    return True


def rebuilt(tree: Any, leaves: Iterator[Any]) -> Any:
    """Build the containers of `tree` around other leaves, in the order of `walk`.

    >>> rebuilt({"b": 1.0, "a": [2.0, None]}, iter("xyz"))
    {'b': 'x', 'a': ['y', 'z']}
    """
    if _is_leaf(tree):
        return next(leaves)
    kind = type(tree)
    if kind is list or kind is tuple:
        return kind([_child(child, leaves) for child in tree])
    if kind is dict:
        return {key: _child(child, leaves) for key, child in tree.items()}
    if kind is OrderedDict:
        return OrderedDict([(key, _child(child, leaves)) for key, child in tree.items()])
    if kind is defaultdict:
        filled: defaultdict[Any, Any] = defaultdict(tree.default_factory)
        for key, child in tree.items():
            filled[key] = _child(child, leaves)
        return filled
    return kind(*[_child(child, leaves) for child in tree])


def _child(child: Any, leaves: Iterator[Any]) -> Any:
    if child is None or isinstance(child, Tensor):
        return next(leaves)
    return rebuilt(child, leaves)


def _is_leaf(tree: Any) -> bool:
    return tree is None or isinstance(tree, Tensor | float | int | str)


def _entries(tree: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return a container's entries and children, or None if its type is unknown."""
    kind = type(tree)
    if kind is dict or kind is OrderedDict or kind is defaultdict:
        items: Iterable[tuple[Any, Any]] = tree.items()
        return items
    if kind is list or kind is tuple:
        return enumerate(tree)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return zip(kind._fields, tree, strict=True)
    return None
