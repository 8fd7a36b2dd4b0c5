"""Trees of a structure that was seen before, taken apart faster.

A training loop hands in the same containers step by step. The last tree's are remembered in
compiled form, and compared entry by entry; whatever is not alike goes through `fddp.tree`.
"""

from __future__ import annotations

from typing import Any, cast

from fddp.native import extension
from fddp.tree.pytree import TreeDef, flatten, insertion_order

# To remember a tree costs more than to flatten it; where trees keep changing, it is given up.
_MOST_MEMORIES = 32


class KnownTrees:
    """Flattens trees as `fddp.tree.pytree.flatten` does; a tree like the last one costs a fraction.

    Alike are trees of the same dicts, lists and tuples, filled in the same order, around tensors
    and None. Of trees with other containers nothing is remembered.

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
        """The leaves of a tree in canonical order, and the tree without them.

        Raises:
            TypeError, ValueError: as `fddp.tree.pytree.flatten`.
        """
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
