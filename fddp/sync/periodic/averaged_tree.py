"""The tree of which parts are averaged: its leaves by path."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fddp.core.plan.leaf import LeafSpec
from fddp.errors import NoGradientError, TreeMismatchError
from fddp.tree.describe import leaf_specs
from fddp.tree.modules import named_params
from fddp.tree.pytree import check_paths, flatten, insertion_order


@dataclass(frozen=True)
class AveragedTree:
    """Leaves of a tree, and which of them are averaged: those of a floating or complex dtype.

    Attributes:
        paths: paths of all leaves, in canonical order.
        specs: the averaged leaves, in canonical order.
        averaged: their paths, in the order of the tree's containers.
    """

    paths: tuple[str, ...]
    specs: tuple[LeafSpec, ...]
    averaged: tuple[str, ...]

    @classmethod
    def of(cls, tree: Any) -> AveragedTree:
        """Describe a tree, or the parameters of a module.

        Raises:
            NoGradientError: no leaf has a floating or complex dtype.
            TypeError: a leaf is no array.
        """
        tree = named_params(tree)
        leaves, treedef = flatten(tree)
        specs = leaf_specs(treedef.paths, leaves)
        reducible = {spec.path for spec in specs if spec.reducible}
        if not reducible:
            raise NoGradientError(
                f"there is nothing to average: none of the {len(specs)} leaves has a floating or "
                f"complex dtype"
            )
        order = (treedef.paths[leaf] for leaf in insertion_order(tree, treedef))
        return cls(
            treedef.paths,
            tuple(spec for spec in specs if spec.reducible),
            tuple(path for path in order if path in reducible),
        )

    def leaves(self, tree: Any) -> dict[str, Any]:
        """Return the leaves of a tree by path.

        Raises:
            TreeMismatchError: it has other paths.
        """
        leaves, treedef = flatten(named_params(tree))
        check_paths(treedef, self.paths, "the tree of parameters")
        return dict(zip(self.paths, leaves, strict=True))

    def part(self, tree: Any, paths: Iterable[str]) -> dict[str, Any]:
        """Return the averaged leaves of some paths, in the order of the tree's containers.

        Raises:
            TreeMismatchError: the tree has other paths, or one of these leaves is None.
        """
        leaves, wanted = self.leaves(tree), {*paths}
        for spec in self.specs:
            if spec.path in wanted and leaves[spec.path] is None:
                raise TreeMismatchError(
                    f"leaf {spec.path!r} to average is None where the averager expects "
                    f"{spec.dtype} of shape {spec.shape}; pass all parameters"
                )
        return {path: leaves[path] for path in self.averaged if path in wanted}

    def replaced(self, tree: Any, changed: dict[str, Any]) -> Any:
        """Return the tree with other leaves at some paths."""
        leaves, treedef = flatten(named_params(tree))
        pairs = zip(self.paths, leaves, strict=True)
        return treedef.unflatten([changed.get(path, leaf) for path, leaf in pairs])
