"""Trees of arrays that are not torch's, at the edge: tensors go in, and arrays come out.

[Note: arrays of other libraries]
Inside of fddp a leaf is a tensor or None. Where a caller's tree holds arrays of another library,
its leaves are replaced by tensors over the same memory right after the tree was taken apart, and
results are replaced by arrays when it is put together again: `adapted` gives a tree definition that
does so. So there is one `GradSync` for all libraries, ranks of one job may differ in theirs, and
trees of tensors cost what they did: only a leaf that is no tensor leads here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fddp.core.plan.plan import BucketPlan, rebucket
from fddp.tree.pytree import TreeDef

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class ForeignTreeDef(TreeDef):
    """A tree of arrays of another library, without its leaves.

    Attributes:
        library: its name, for errors.
        restore: arrays for the tensors of all leaves.
    """

    library: str = field(compare=False)
    restore: Callable[[Sequence[Tensor | None]], list[Any]] = field(compare=False, repr=False)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """The tree around arrays over the memory of these tensors, in canonical order."""
        return super().unflatten(self.restore(leaves))


def aligned(plan: BucketPlan) -> BucketPlan:
    """The plan in which leaves of whole multiples of 64 bytes come first, so that their results
    start at such multiples, as XLA demands of memory that it is to use as it is. No backward pass
    of torch's makes these gradients, to which the order would matter.

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
    """Whether a leaf is an array of another library that fddp takes: of JAX, or a tracer of it.

    Example:
        >>> is_foreign(None)
        False
    """
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(leaf, jax.Array)


def holds_foreign(leaves: Sequence[Any]) -> bool:
    """Whether there are such arrays among the leaves of a tree."""
    if "jax" not in sys.modules:
        return False
    # Trees are large, and of few kinds.
    return any(map(is_foreign, dict(zip(map(type, leaves), leaves, strict=True)).values()))


def adapted(
    leaves: list[Any], treedef: TreeDef, what: str, *, always: bool = False
) -> tuple[list[Any], TreeDef]:
    """Tensors in place of arrays of other libraries; see [Note: arrays of other libraries].

    Args:
        leaves, treedef: what `fddp.tree.pytree.flatten` gave.
        what: the tree in words, for errors: "gradients".
        always: whether results are to be arrays even where all leaves are None.

    Returns:
        The same two where no leaf is such an array.

    Raises:
        TransformError: a leaf is a tracer.
        TreeMismatchError: a leaf has a dtype that torch lacks, or is not in this process's memory.
    """
    if not always and not holds_foreign(leaves):
        return leaves, treedef
    from fddp.tree.jax_arrays import homes_of, to_arrays, to_tensors

    tensors = to_tensors(leaves, treedef.paths, what)
    homes = homes_of(leaves)

    def restore(results: Sequence[Tensor | None]) -> list[Any]:
        return to_arrays(results, homes)

    return tensors, ForeignTreeDef(treedef._treespec, treedef._structure, "JAX", restore)
