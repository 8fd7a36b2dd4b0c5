"""Donation of results: their memory is reused although references to them exist."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fddp.core.text import leaf_text
from fddp.errors import TreeMismatchError
from fddp.native.buffer_pool import BufferPool, invalidate
from fddp.runtime.program import Program
from fddp.tree.foreign import is_foreign
from fddp.tree.pytree import check_paths, flatten

_TEXT = (
    "this gradient was donated to its GradSync, which reuses its memory; clone what is still "
    "needed before sync.donate(grads)"
)


def donate(program: Program, pool: BufferPool, grads: Any) -> None:
    """Donate the results of a step; see `GradSync.donate`.

    Raises:
        TreeMismatchError: the tree has other leaves, or one that is no result. No leaf is donated.
    """
    leaves, treedef = flatten(grads)
    check_paths(treedef, program.plan.paths, "donated gradients")
    taken: dict[int, Tensor] = {}  # by storage: one result may stand for several leaves
    # Shards of several pieces, and empty ones, have memory of their own.
    may_lie_elsewhere = program.schedule.result == "sharded_mean"
    for number, bucket in enumerate(program.plan.buckets):
        for leaf in () if bucket.sparse else bucket.leaves:
            grad = leaves[leaf]
            if grad is None:
                continue
            where = (
                f"{leaf_text(program.plan.paths[leaf])} (bucket {number}) of the donated gradients"
            )
            if is_foreign(grad):
                raise TreeMismatchError(
                    f"{where} is a JAX array, whose memory JAX owns; drop the arrays: their bucket "
                    f"is reused once nothing refers to them"
                )
            if isinstance(grad, Tensor) and pool.is_view(grad):
                taken[grad.untyped_storage()._cdata] = grad
            elif not (isinstance(grad, Tensor) and may_lie_elsewhere):
                raise TreeMismatchError(
                    f"{where} is no result of this GradSync, was donated before, or belongs to the "
                    f"graph that captured its step; pass the unchanged tree that a step returned"
                )
    invalidate(taken.values(), _TEXT)
