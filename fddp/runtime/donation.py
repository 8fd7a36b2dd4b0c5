"""Gives the memory of results back before their last reference is gone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fddp.errors import TreeMismatchError
from fddp.native.buffer_pool import BufferPool, invalidate
from fddp.runtime.program import Program
from fddp.tree.foreign import is_foreign
from fddp.tree.pytree import check_paths

_TEXT = (
    "this gradient was donated to its GradSync, which writes other values where it lay; clone what "
    "is still needed before sync.donate(grads)"
)


def donate(program: Program, pool: BufferPool, grads: Any) -> None:
    """Takes the tree of a step's results back; see `GradSync.donate`.

    Raises:
        TreeMismatchError: the tree has other leaves, or one that is no result. Nothing is taken.
    """
    leaves, treedef = program.trees.flatten(grads)
    check_paths(treedef, program.paths, "donated gradients")
    taken: dict[int, Tensor] = {}  # by storage: one result may stand for several leaves
    # Shards of several pieces, or of none, were put together in memory of their own.
    may_lie_elsewhere = program.schedule.result == "sharded_mean"
    for number, bucket in enumerate(program.plan.buckets):
        for leaf in () if bucket.sparse else bucket.leaves:
            grad = leaves[leaf]
            if grad is None:
                continue
            if is_foreign(grad):
                raise TreeMismatchError(
                    f"leaf {program.paths[leaf]!r} (bucket {number}) of the donated gradients is a "
                    f"JAX array, whose memory can't be taken away from JAX; drop the arrays: their "
                    f"bucket is used again once nothing refers to them"
                )
            if isinstance(grad, Tensor) and pool.is_view(grad):
                taken[grad.untyped_storage()._cdata] = grad
            elif not (isinstance(grad, Tensor) and may_lie_elsewhere):
                raise TreeMismatchError(
                    f"leaf {program.paths[leaf]!r} (bucket {number}) of the donated gradients is "
                    f"no result of this GradSync, or has been donated before; pass the tree that a "
                    f"step returned, as it is"
                )
    invalidate(taken.values(), _TEXT)
