"""Trees of arrays of other libraries, converted at the border.

[Note: arrays of other libraries]
Inside fddp every leaf is a tensor or None. If a caller's tree holds arrays of another library,
`adapted` replaces them by tensors over the same memory right after flattening, and returns a tree
definition that converts results back to arrays on unflattening. One `GradSync` therefore serves all
libraries, and ranks of one job may use different ones. Trees of tensors skip the conversion.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from fddp.core.plan.plan import BucketPlan, rebucket
from fddp.tree.pytree import TreeDef

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class ForeignTreeDef(TreeDef):
    """Structure of a tree of arrays of another library.

    Attributes:
        library: name of the library, for errors.
        restore: converts the tensors of all leaves to arrays.
    """

    library: str = field(compare=False)
    restore: Callable[[Sequence[Tensor | None]], list[Any]] = field(compare=False, repr=False)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Build the tree around arrays over the memory of these tensors, in canonical order."""
        return super().unflatten(self.restore(leaves))


def aligned(plan: BucketPlan) -> BucketPlan:
    """Return the plan with leaves whose size is a multiple of 64 bytes first in each bucket.

    Their results then start at multiples of 64 bytes, which XLA requires to use memory without a
    copy. No torch backward produces these gradients, so their ready order is irrelevant.

    Example:
        >>> import torch
        >>> from fddp import plan_buckets
        >>> plan = plan_buckets({"weight": torch.ones(16), "bias": torch.ones(10)})
        >>> plan.buckets[0].leaves, aligned(plan).buckets[0].leaves
        ((0, 1), (1, 0))
    """
    odd = {leaf for leaf in plan.order if plan.leaves[leaf].nbytes % _ALIGNMENT_BYTES}
    return rebucket(plan, sorted(plan.order, key=odd.__contains__))


def is_foreign(leaf: Any) -> bool:
    """Return True if a leaf is a JAX array or tracer, the only supported foreign arrays.

    Example:
        >>> is_foreign(None)
        False
    """
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(leaf, jax.Array)


def holds_foreign(leaves: Sequence[Any]) -> bool:
    """Return True if any leaf of a tree is a foreign array."""
    if "jax" not in sys.modules:
        return False
    # One check per type: trees are large and have few types.
    return any(map(is_foreign, dict(zip(map(type, leaves), leaves, strict=True)).values()))


def adapted(
    leaves: list[Any], treedef: TreeDef, what: str, *, always: bool = False
) -> tuple[list[Any], TreeDef]:
    """Replace arrays of other libraries by tensors; see [Note: arrays of other libraries].

    Args:
        leaves, treedef: result of `fddp.tree.pytree.flatten`.
        what: name of the tree for errors, such as "gradients".
        always: True to return arrays as results even if all leaves are None.

    Returns:
        Leaves and tree definition; unchanged if no leaf is a foreign array.

    Raises:
        TransformError: a leaf is a tracer.
        TreeMismatchError: torch lacks a leaf's dtype, or a leaf is not in this process's memory.
    """
    if not always and not holds_foreign(leaves):
        return leaves, treedef
    from fddp.tree.jax_arrays import homes_of, to_arrays, to_tensors

    tensors = to_tensors(leaves, treedef.paths, what)
    restore = partial(to_arrays, homes=homes_of(leaves))
    return tensors, ForeignTreeDef(treedef._treespec, treedef._structure, "JAX", restore)
