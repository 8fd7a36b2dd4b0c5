"""Fast flattening of trees whose structure was seen before.

A training loop passes the same containers in every step. The last tree is remembered in compiled
form and compared entry by entry. Any other tree is flattened by `fddp.tree.pytree`.
"""

from __future__ import annotations

from typing import Any, cast

from fddp.native import extension
from fddp.tree.pytree import TreeDef, flatten, insertion_order

# Remembering a tree costs more than flattening it; after this many changes it is given up.
_MOST_MEMORIES = 32


class KnownTrees:
    """Flattens trees as `fddp.tree.pytree.flatten` does, and repeats of the last tree much faster.

    Repeats have the same dicts, lists and tuples, filled in the same order, around tensors and
    None. Trees with other containers are not remembered.

    Example:
        >>> import torch
        >>> trees = KnownTrees()
        >>> trees.flatten({"b": torch.ones(1), "a": None})[1].paths
        ('a', 'b')
        >>> trees.flatten({"b": None, "a": torch.ones(1)})[0]
        [tensor([1.]), None]
    """

    def __init__(self) -> None:
        self._known: Any = None  # compiled; None before the first tree
        self._treedef: TreeDef | None = None
        self._memories = 0

    def flatten(self, tree: Any) -> tuple[list[Any], TreeDef]:
        """Flatten a tree; see `fddp.tree.pytree.flatten`."""
        if self._known is not None and self._treedef is not None:
            found = cast("list[Any] | None", self._known.flatten(tree))
            if found is not None:
                return found, self._treedef
        leaves, treedef = flatten(tree)
        is_new = treedef != self._treedef or self._known is None or self._known.is_cacheable
        if is_new and self._memories < _MOST_MEMORIES:
            self._memories += 1
            self._known = extension.load().CachedTree(tree, insertion_order(tree, treedef))
            self._treedef = treedef
        return leaves, treedef
