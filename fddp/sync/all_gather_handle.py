"""Whole leaves that are being gathered from the shards of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fddp.core.protocol.calls import Method
from fddp.errors import InternalError
from fddp.runtime.contributions import ShardContributions
from fddp.runtime.inputs import check_no_derivatives, check_no_transform, matched_shards
from fddp.runtime.step import Step
from fddp.sync.engine import Engine
from fddp.tree.pytree import TreeDef


class AllGatherHandle:
    """Whole leaves that are being gathered from the shards of all ranks.

    Made by `GradSync.start_all_gather`. The `GradSync` finishes an all-gather in flight before its
    next step, and before it is closed or rebuilt.

    Example:
        >>> import fddp, torch
        >>> def train(group):
        ...     params = {"w": torch.ones(4)}
        ...     with fddp.GradSync(params, group=group, algorithm="reduce_scatter") as sync:
        ...         own = sync.shard(params)
        ...         grads = sync.reduce_scatter({"w": torch.ones(4) + group.rank})
        ...         own = fddp.tree_map(lambda p, g: p - 0.1 * g, own, grads)
        ...         handle = sync.start_all_gather(own)
        ...         # Load the next batch here, or write logs.
        ...         return handle.wait()["w"].tolist()
        >>> fddp.loopback(2, train)[0]
        [0.8500000238418579, 0.8500000238418579, 0.8500000238418579, 0.8500000238418579]
    """

    def __init__(self, engine: Engine, shards: Any) -> None:
        """Open the step of the all-gather; `start` launches its collectives."""
        self._engine = engine
        self._treedef: TreeDef | None = None
        self._leaves: Sequence[Tensor | None] = ()
        self._error: BaseException | None = None
        step = engine.open_gather()
        self._step: Step | None = step  # None once it has ended
        try:
            check_no_transform(Method.ALL_GATHER.text)
            own, self._treedef = matched_shards(shards, step.program)
            check_no_derivatives(own, step.program, "shards", graphs=False)
            step.begin(ShardContributions(own), own)
        except BaseException as error:
            step.fail(error)

    def start(self) -> None:
        """Launch the collectives that need not wait for others. Never raises: `wait` does."""
        if self._step is not None:
            self._engine.in_flight = self._finish
            self._step.start()

    @property
    def is_done(self) -> bool:
        """True if the all-gather has ended, so that `wait` does not block."""
        return self._step is None

    def wait(self) -> Any:
        """Wait for all leaves and return them. Further calls return the same tensors.

        Returns:
            A tree with the structure of the shards and whole leaves, as of `GradSync.all_gather`.

        Raises:
            TreeMismatchError: a shard has another size or dtype than this rank owns.
            TransformError: a `torch.func` transform or a tracer was active at the start.
            PeerError: another rank raised one of these.
            RankLostError, SyncTimeoutError: a rank was lost, or did not gather.
        """
        self._finish()
        if self._error is not None:
            raise self._error
        if self._treedef is None:
            raise InternalError("an all-gather succeeded without a tree")
        return self._treedef.unflatten(self._leaves)

    def _finish(self) -> None:
        """End the step, and keep its results or its error for `wait`."""
        step, self._step = self._step, None
        if step is None:
            return
        self._engine.in_flight = None
        try:
            self._leaves = self._engine.finish(step).leaves
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise

    def __repr__(self) -> str:
        return f"AllGatherHandle(is_done={self.is_done})"
