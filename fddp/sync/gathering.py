"""Parameters that are gathered while the caller goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fddp.errors import InternalError
from fddp.runtime.contributions import ShardContributions
from fddp.runtime.gather_step import GatherStep
from fddp.runtime.inputs import check_no_derivatives, matched_shards
from fddp.runtime.pending_leaf import pending
from fddp.runtime.program import Program
from fddp.sync.engine import Engine
from fddp.tree.foreign import ForeignTreeDef
from fddp.tree.pytree import TreeDef


class Gathering:
    """Parameters that are being gathered from the shards of all ranks.

    Made by `GradSync.start_all_gather`. It takes the place of the parameters in the next call of
    `value_and_grad`, whose loss function then waits for each leaf before its first use. `wait`
    returns the parameters themselves, for anything else that reads them. The `GradSync` waits for
    an all-gather in flight before its next collective, and before it is closed or rebuilt.

    Example:
        >>> import fddp, torch
        >>> def train(group):
        ...     params = {"w": torch.ones(4), "b": torch.zeros(())}
        ...     with fddp.GradSync(params, group=group, algorithm="reduce_scatter") as sync:
        ...         step = sync.value_and_grad(lambda p, x: (p["w"] * x).sum() + p["b"])
        ...         own = sync.shard(params)
        ...         for _ in range(2):
        ...             loss, grads = step(params, torch.ones(4) + group.rank)
        ...             own = fddp.tree_map(lambda p, g: p - 0.1 * g, own, grads)
        ...             params = sync.start_all_gather(own)
        ...         return params.wait()["b"].item()
        >>> fddp.loopback(2, train)
        [-0.20000000298023224, -0.20000000298023224]
    """

    def __init__(self, engine: Engine, shards: Any) -> None:
        """Start to gather. Engines wait for one another's all-gathers by `engine.in_flight`."""
        self._engine = engine
        self._lock = threading.RLock()
        self._error: BaseException | None = None
        self._treedef: TreeDef | None = None
        self._leaves: Sequence[Tensor | None] | None = None  # once they have arrived
        step = engine.open_gather(ahead=True)
        if not isinstance(step, GatherStep):
            raise InternalError("an all-gather was opened that can't be awaited by bucket")
        self._step = step
        own: Sequence[Tensor | None] = ()
        try:
            own, self._treedef = matched_shards(shards, step.program)
            own = _apart(own, step.program)
            check_no_derivatives([*own], step.program, "shards", graphs=False)
            step.begin(ShardContributions(own), own)
        except BaseException as error:
            step.fail(error)
        step.start()
        self._own = own
        self._destinations = step.destinations()
        engine.in_flight = self._settle

    @property
    def is_done(self) -> bool:
        """True if all parameters have arrived and `wait` has nothing to do."""
        return self._leaves is not None

    def wait(self) -> Any:
        """Wait for all parameters, and return them.

        Returns:
            A tree with the structure of the shards and whole leaves, as of `GradSync.all_gather`.

        Raises:
            TreeMismatchError: a shard has another size or dtype than this rank owns.
            PeerError: another rank raised one.
            RankLostError, SyncTimeoutError: a rank was lost, or did not gather.
        """
        self._settle()
        if self._treedef is None or self._leaves is None:
            raise InternalError("an all-gather succeeded without a tree")
        return self._treedef.unflatten(self._leaves)

    def is_in_flight(self, engine: Engine) -> bool:
        """Return True if the leaves of this engine have not all arrived, and none is missing or an
        array of another library."""
        return (
            self._engine is engine
            and self._leaves is None
            and self._error is None
            and self._treedef is not None
            and not isinstance(self._treedef, ForeignTreeDef)
            and all(self._own[leaf] is not None for leaf in self._step.program.plan.reduced)
        )

    def leaves(self) -> tuple[list[Tensor | None], TreeDef]:
        """Return the leaves in canonical order, whose elements may be in flight, and the structure
        of the tree."""
        assert self._treedef is not None
        bucket_of = self._step.program.plan.bucket_of
        pairs = enumerate(zip(self._own, self._destinations, strict=True))
        leaves = [into if leaf in bucket_of else own for leaf, (own, into) in pairs]
        return leaves, self._treedef

    def pending(self, leaves: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the leaves with what stands for those that have not arrived; see
        [Note: pending leaves]."""
        bucket_of, step = self._step.program.plan.bucket_of, self._step
        found = list(leaves)
        for position, leaf in enumerate(leaves):
            bucket = bucket_of.get(position)
            if leaf is not None and bucket is not None and not step.has_arrived(bucket):
                found[position] = pending(leaf, partial(self.arrive, bucket))
        return found

    def arrive(self, bucket: int) -> None:
        """Wait for a bucket.

        Raises:
            Exception: as `wait`.
        """
        if self._leaves is not None or (self._error is None and self._step.has_arrived(bucket)):
            return
        with self._lock:
            if self._error is None:
                with self._engine.transport.step_scope(None):
                    self._step.arrive(bucket)
            if self._error is not None or self._step.is_broken:
                self._settle()

    def _settle(self) -> None:
        """Wait for all buckets; a second call does nothing, or raises again."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._leaves is not None:
                return
            self._engine.in_flight = None
            try:
                with self._engine.transport.step_scope(None):
                    self._leaves = self._engine.finish(self._step).leaves
            except BaseException as error:
                self._error = error
                raise
            finally:
                self._destinations.clear()

    def __repr__(self) -> str:
        if self._error is not None:
            state = "failed"
        else:
            buckets = range(len(self._step.program.plan.buckets))
            done = len(buckets) if self.is_done else sum(map(self._step.has_arrived, buckets))
            state = f"{done} of {len(buckets)} buckets have arrived"
        return f"Gathering({state})"


def _apart(shards: Sequence[Tensor | None], program: Program) -> list[Tensor | None]:
    """Copy leaves in no bucket, which are not sent, so that the caller may write its own."""
    bucket_of = program.plan.bucket_of
    return [
        shard if shard is None or leaf in bucket_of else shard.detach().clone()
        for leaf, shard in enumerate(shards)
    ]
