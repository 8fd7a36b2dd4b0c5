"""Synchronisation of existing trees: whole gradients, and shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.compiler import is_dynamo_compiling

from fddp.core.entrance import entrance
from fddp.core.plan.plan import BucketPlan
from fddp.core.protocol.calls import Method
from fddp.core.schedule.schedule import Schedule
from fddp.native.untraced import untraced, untraced_beneath
from fddp.runtime.inputs import matched_leaves
from fddp.runtime.results import shards_of
from fddp.runtime.step import Step
from fddp.sync import dynamo
from fddp.sync.dynamo import INSTEAD_IN_A_GRAPH
from fddp.sync.engine import Engine
from fddp.sync.step_handle import StepHandle, start_step
from fddp.sync.tree_step import begin_shards, begin_tree, check_fit, sync_tree
from fddp.sync.virtual_batches import VirtualBatches
from fddp.telemetry.step_info import SyncInfo
from fddp.tree.pytree import TreeDef


class TreeSync:
    """Methods of `GradSync` that synchronise existing trees."""

    _engine: Engine

    @property
    def plan(self) -> BucketPlan:
        """The bucket plan in force."""
        return self._engine.program.plan

    @property
    def schedule(self) -> Schedule:
        """The schedule in force, which every step executes."""
        return self._engine.program.schedule

    @property
    def graph_info(self) -> SyncInfo | None:
        """Information on the last step that a graph took with `with_info=True`; None before."""
        return self._engine.graph_info

    @property
    def stopping(self) -> bool:
        """True from the step on in which a rank has asked all ranks to stop: the same step on every
        rank, without a further collective. With `report="next"`, once the next call or `check` has
        read the report of that step.

        Example:
            >>> import fddp, torch
            >>> def train(group):
            ...     grads = {"w": torch.ones(2)}
            ...     with fddp.GradSync(grads, group=group) as sync:
            ...         for step in range(100):
            ...             if step == 3 and group.rank == 1:
            ...                 sync.request_stop()  # as a signal handler does
            ...             grads = sync(grads)
            ...             if sync.stopping:
            ...                 return step
            >>> fddp.loopback(2, train)
            [3, 3]
        """
        return self._engine.stopping.agreed

    def request_stop(self) -> None:
        """Ask all ranks to stop, by the control word of the next step; see `stopping`.

        Does not communicate, and may be called in a signal handler or another thread. A step that
        runs may be too far to say it. A `GradSync` that replaces this one goes on asking.
        """
        self._engine.stopping.ask()

    @entrance
    def leave(self) -> None:
        """Take one more step on this rank, and none after it.

        The next step is as any other. This instance is then closed on this rank, and the next step
        of the others raises `RankLostError` before it begins: they go on by `rebuild`, as after a
        loss, but no step has failed and nothing has to be computed again. They do not wait for this
        rank in `rebuild` of any `GradSync` on the group. A step that has begun, or is within a loop
        of `fddp.uneven`, is not the last one.

        Raises:
            ClosedError: this instance is closed.
            UnevenError: the call is within a loop of `fddp.uneven`.
            ValueError: the others could not go on: this rank keeps shards, or is a thread.
            RankLostError: the group's store does not answer.

        Example:
            >>> import fddp, torch, torch.distributed as dist
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> grads = {"w": torch.ones(2)}
            >>> sync = fddp.GradSync(grads)
            >>> sync.leave()
            >>> sync(grads)  # the last one
            {'w': tensor([1., 1.])}
            >>> sync(grads)  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            fddp.errors.ClosedError: this GradSync, ... is closed (this rank has left after ...
            >>> dist.destroy_process_group()
        """
        self._engine.finish_in_flight()
        self._engine.leave()

    @property
    def carried_ranks(self) -> range:
        """Virtual ranks that this rank carries; empty without virtual ranks."""
        return self._engine.program.carried

    @entrance
    def virtual_batches(self, batches: Callable[[int], Any] | Sequence[Any]) -> VirtualBatches:
        """Return the inputs of the virtual ranks that this rank carries, for one step.

        Args:
            batches: function of a virtual rank, which is called when the step reaches it; or a
                sequence with one input for each of `carried_ranks`. An input is a batch for a step
                of `value_and_grad`, or a tree of gradients for a call. `EXHAUSTED` stands for a
                virtual rank without input.

        Raises:
            ValueError: there are no virtual ranks, or not one input for each.
        """
        if self.schedule.virtual is None:
            raise ValueError(
                "this GradSync has no virtual ranks; build it with virtual_ranks=8, for instance"
            )
        return VirtualBatches(self.carried_ranks, batches)

    @entrance
    @untraced_beneath
    def __call__(
        self, grads: Any, *, weight: float | Sequence[float] = 1.0, with_info: bool = False
    ) -> Any:
        """Return the weighted mean over ranks of a tree of gradients; a collective call.

        `torch.compile` makes it a part of the graph, with a `GraphInfo` as the info.

        Args:
            grads: tree with the plan's leaves, None for missing gradients. Not written. With
                virtual ranks, trees made by `virtual_batches`.
            weight: this rank's weight, such as its number of samples; 0 contributes nothing.
                With virtual ranks, that of each, or one for each that this rank carries.
            with_info: True to also return a `SyncInfo`.

        Returns:
            A new tree of the same structure, or `(tree, info)`. A leaf is None only if no rank has
            a gradient for it; all are in a step skipped under `nonfinite="skip"`. A leaf keeps the
            memory of its whole bucket: `clone` one that is kept. See `SyncInfo.held_bytes`.

        Raises:
            TreeMismatchError: the tree has other leaves than the plan.
            WeightError: a weight is no number from 0 to 2**512, all weights are 0, or their mean
                does not fit the dtype of the sums.
            NonFiniteError: a gradient or a sum is not finite, under `nonfinite="raise"`.
            TransformError: a `torch.func` transform or a tracer is active; a gradient has a
                forward-mode tangent, or was computed from the parameters of a loss function that
                fddp differentiates. The result has no derivatives; use `fddp.pmean` for them.
            PeerError: another rank raised one of these.
            ValueError: the algorithm gives shards, see `reduce_scatter`; or the hook keeps state,
                see `update`.
        """
        engine = self._engine
        if is_dynamo_compiling():
            if dynamo.fits(engine, engine.graph_label):
                return dynamo.sync_tree(engine, Method.CALL, grads, weight, with_info=with_info)
            return dynamo.break_graph(self, grads, weight=weight, with_info=with_info)
        return sync_tree(engine, Method.CALL, grads, weight, with_info=with_info)

    @entrance
    @untraced(INSTEAD_IN_A_GRAPH)
    def update(
        self, grads: Any, state: Any, *, weight: float = 1.0, with_info: bool = False
    ) -> tuple[Any, ...]:
        """Return the mean as a call does, and the hook's new state; a collective call.

        Args:
            grads, weight, with_info: as for a call.
            state: state returned by `init_state` or the previous step. Not written; it remains
                valid if the step fails.

        Returns:
            `(tree, state)` or `(tree, state, info)`, with the state for the next step. The state
            does not change in a step with a non-finite gradient.

        Raises:
            TreeMismatchError: as for a call; or the state does not fit the hook and the plan.

        Example:
            >>> import fddp, torch
            >>> def two_steps(group):
            ...     grads = {"w": torch.tensor([4.0, 3.0])}
            ...     with fddp.GradSync(grads, group=group, hook=fddp.hooks.top_k(0.5)) as sync:
            ...         first, state = sync.update(grads, sync.init_state())
            ...         second, state = sync.update(grads, state)
            ...         return first["w"].tolist(), second["w"].tolist()
            >>> fddp.loopback(2, two_steps)[0]
            ([4.0, 0.0], [0.0, 6.0])
        """
        results: tuple[Any, ...] = sync_tree(
            self._engine, Method.UPDATE, grads, weight, with_info=with_info, state=state
        )
        return results

    @entrance
    def init_state(self) -> tuple[Any, ...]:
        """Return the communication hook's state before the first step.

        Returns:
            For each bucket of the plan a tree of tensors, numbers and None, which may differ
            from rank to rank; () without a hook that keeps state. `torch.save` saves it.
        """
        return self._engine.init_states()

    @entrance
    @untraced(INSTEAD_IN_A_GRAPH)
    def reduce_(self, grads: Any, *, weight: float = 1.0, with_info: bool = False) -> Any:
        """Write the weighted mean over ranks into the tensors of `grads`; a collective call.

        Returns:
            A tree of the same structure with the same tensors, and new ones for leaves that are
            None on this rank and have a gradient on another; `(tree, info)` with `with_info`. In a
            step skipped under `nonfinite="skip"` all leaves are None, and `grads` is unchanged.

        Raises:
            TreeMismatchError: as for a call; or a tensor can't be written because its elements
                share memory (an expanded one).
        """
        return sync_tree(self._engine, Method.REDUCE, grads, weight, with_info=with_info)

    @entrance
    @untraced(INSTEAD_IN_A_GRAPH)
    def reduce_scatter(self, grads: Any, *, weight: float = 1.0, with_info: bool = False) -> Any:
        """Return this rank's shard of the weighted mean over ranks; a collective call.

        Args:
            grads, weight: as for a call.
            with_info: True to also return a `SyncInfo`, with the `grad_norm` of this rank's shard.

        Returns:
            A tree of the same structure, or `(tree, info)`. Each leaf is the flat run of its
            elements that this rank owns, shape `(n,)` with n from 0 to the leaf's size, in the
            order of memory; None if no rank has a gradient. Leaves that are not reduced are whole.
            See [Note: shards].

        Raises:
            Exception: as for a call; `ValueError` if the algorithm is not "reduce_scatter".

        Example:
            >>> import fddp, torch
            >>> def halves(group):
            ...     grads = {"w": torch.tensor([1.0, 2.0, 3.0]) * (1 + group.rank)}
            ...     with fddp.GradSync(grads, group=group, algorithm="reduce_scatter") as sync:
            ...         shards = sync.reduce_scatter(grads)
            ...         return shards["w"].tolist(), sync.all_gather(shards)["w"].tolist()
            >>> fddp.loopback(2, halves)
            [([1.5, 3.0], [1.5, 3.0, 4.5]), ([4.5], [1.5, 3.0, 4.5])]
        """
        return sync_tree(self._engine, Method.REDUCE_SCATTER, grads, weight, with_info=with_info)

    @entrance
    @untraced(INSTEAD_IN_A_GRAPH)
    def all_gather(self, shards: Any) -> Any:
        """Return whole leaves from the shards of all ranks; a collective call.

        Args:
            shards: tree of shards as returned by `reduce_scatter` and `shard`. Not written.

        Returns:
            A tree of the same structure with whole leaves, in the plan's shapes and dtypes.

        Raises:
            TreeMismatchError: a shard has another size or dtype than this rank owns.
            PeerError: another rank raised one.
            ValueError: the algorithm is not "reduce_scatter".
        """
        self._check_gather(shards)
        outcome = self._engine.run(Method.ALL_GATHER, partial(begin_shards, shards=shards))
        return outcome.begin_result.unflatten(outcome.leaves)

    @entrance
    @untraced(INSTEAD_IN_A_GRAPH)
    def start_all_gather(self, shards: Any) -> StepHandle:
        """Start to gather whole leaves from the shards of all ranks; a collective call.

        Does not wait for other ranks, unless it is called in a loss function.

        Args:
            shards: as for `all_gather`. Not to be written before `wait` has returned.

        Returns:
            A handle, whose `wait()` returns the result of `all_gather(shards)`, or raises its
            error.

        Raises:
            ValueError: the algorithm is not "reduce_scatter".
        """
        self._check_gather(shards)
        return start_step(self._engine, Method.ALL_GATHER, partial(begin_shards, shards=shards))

    def _check_gather(self, shards: Any) -> None:
        """Raise an error on all ranks if the algorithm has no shards."""
        if self._engine.gathering is None:
            sync_tree(self._engine, Method.ALL_GATHER, shards, 1.0)

    @entrance
    @untraced(INSTEAD_IN_A_GRAPH)
    def start(
        self, grads: Any, *, weight: float = 1.0, state: Any = None, label: str = ""
    ) -> StepHandle:
        """Start the weighted mean over ranks of a tree; a collective call.

        Does not wait for other ranks, unless it is called in a loss function.

        Args:
            grads: as for a call; not to be written before `wait` has returned. Or a function that
                returns it, whose error is raised by `wait` on all ranks.
            weight: as for a call.
            state: as for `update`; None if the hook keeps no state.
            label: text that must be the same on all ranks, such as the number of the caller's own
                step. Ranks with other texts are out of step, and it is part of the error.

        Returns:
            A handle, whose `wait()` returns the result of a call, or raises its error.

        Example:
            >>> import fddp, torch
            >>> def average(group):
            ...     grads = {"w": torch.full((2,), 1.0 + group.rank)}
            ...     with fddp.GradSync(grads, group=group) as sync:
            ...         handle = sync.start(grads)
            ...         # Compute here.
            ...         return handle.wait()["w"].tolist()
            >>> fddp.loopback(2, average)
            [[1.5, 1.5], [1.5, 1.5]]
        """
        method = Method.CALL if state is None else Method.UPDATE

        engine = self._engine

        def begin(step: Step) -> TreeDef:
            tree = grads() if callable(grads) else grads
            return begin_tree(engine, step, method, tree, weight, state)[1]

        return start_step(engine, method, begin, label)

    @entrance
    def shard(self, tree: Any) -> Any:
        """Return this rank's shards of a tree that is equal on all ranks; no communication.

        Args:
            tree: tree with the plan's leaves, such as the parameters. Not written.

        Returns:
            A tree of copies, as returned by `reduce_scatter`.

        Raises:
            TreeMismatchError: the tree has other leaves than the plan.
            ValueError: the algorithm is not "reduce_scatter".
        """
        check_fit("shard(tree)", "sharded_mean", "the tree itself", self.schedule)
        leaves, treedef = matched_leaves(tree, self._engine.program, "tree")
        return treedef.unflatten(shards_of(self._engine.program, leaves))

    @entrance
    def donate(self, grads: Any) -> None:
        """Donate the results of a step, so that the next step can reuse their memory.

        A loop that keeps the gradients of one step until the next has returned needs memory for
        two; with donation, for one.

        Args:
            grads: tree returned by a step of this `GradSync`. Any use of its leaves that are views
                of buckets, or of views of them, raises a RuntimeError afterwards; there must be no
                NumPy or DLPack arrays over them. Other leaves (sparse or local ones, shards of
                several pieces) are not affected.

        Raises:
            TreeMismatchError: a leaf is no result of this `GradSync`, or was donated before. No
                leaf is donated then.

        Example:
            >>> import fddp, torch
            >>> def train(group):
            ...     with fddp.GradSync({"w": torch.ones(2)}, group=group) as sync:
            ...         grads = sync({"w": torch.ones(2)})
            ...         total = grads["w"].sum().item()
            ...         sync.donate(grads)
            ...         return total
            >>> fddp.loopback(1, train)
            [2.0]
        """
        self._engine.donate(grads)
