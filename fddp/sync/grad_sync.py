"""`GradSync`: averages trees of gradients over the ranks of a group."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fddp.core.plan.defaults import CAP_MB, FIRST_MB
from fddp.core.plan.plan import BucketPlan
from fddp.core.protocol.calls import Method
from fddp.core.schedule.schedule import Result, Schedule
from fddp.errors import InternalError
from fddp.hooks.hook import Hook
from fddp.runtime.contributions import ShardContributions, TreeContributions
from fddp.runtime.inputs import (
    check_no_derivatives,
    check_no_transform,
    check_writable,
    checked_weight,
    matched_leaves,
    matched_shards,
    outside_transforms,
)
from fddp.runtime.nonfinite import Policy
from fddp.runtime.results import shards_of
from fddp.runtime.step_info import make_info
from fddp.runtime.untraced import untraced
from fddp.sync.autotune import TuneReport, tune
from fddp.sync.engine import Engine
from fddp.sync.hook_states import checked_states, init_states
from fddp.sync.rebuild import join_engine, rebuild_engine
from fddp.sync.request import Reduction, Request
from fddp.sync.value_and_grad import INSTEAD_IN_A_GRAPH, ValueAndGrad
from fddp.telemetry.flight.dump import dump_failures
from fddp.transport import Group, TransportName
from fddp.transport.mesh import Mesh, resolve_mesh
from fddp.tree.foreign import ForeignTreeDef
from fddp.tree.pytree import TreeDef

if TYPE_CHECKING:
    from typing_extensions import Self


class GradSync:
    """Averages trees of gradients over the ranks of a group, by buckets, during backward.

    Building one is a collective call: ranks compare their leaves, caps and options, and agree on
    rank 0's order of leaves. Each has a communicator of its own, so that several do not mix.
    A plan that it made itself is rebuilt once, in the order in which rank 0's gradients arrived in
    the first backward pass.

    Args:
        params_or_plan: a tree of tensors (its shapes, dtypes and layouts matter, not its values),
            a `BucketPlan`, which is used as it is and never rebuilt, or a `Schedule`, which is
            checked and carried out as it is.
        group: a `torch.distributed` group or one-dimensional `DeviceMesh`, or the group that
            `fddp.loopback` hands out; None for the default group.
        mesh: the axes of the ranks, for algorithms that go along them: a `Topology` laid over
            `group`, or a torch `DeviceMesh`, which brings its own group.
        algorithm: how buckets are reduced, as in `make_schedule`: "all_reduce", "hierarchical", or
            "reduce_scatter", which leaves each rank its shard. Plans under the last are never
            rebuilt by themselves, because shards would change.
        bucket_cap_mb: MiB at which a bucket is closed, or a list of them, whose last one repeats.
        first_bucket_mb: MiB at which the first bucket is closed.
        sparse: paths of leaves whose gradients are sparse (`Embedding(sparse=True)`).
        reduce_dtype: `torch.float32` or `torch.float64`, in which float16 and bfloat16 gradients
            are then summed; None sums each in its own dtype.
        select: tells by path which leaves to average; the others keep this rank's own gradient.
        transport: "auto", "shm", "c10d" or "loopback"; see `SyncInfo.transport_reason`.
        timeout_s: seconds that any operation may take; None for the group's own limit.
        hook: how each bucket is summed over ranks, of `fddp.hooks`; None sums it as it is. It takes
            the place of the all-reduces of the schedule: with "hierarchical" that is the one along
            the outermost axis. Plans are not rebuilt by themselves where a hook keeps state.
        deterministic: whether each sum over ranks has one association, fixed by the axes of the
            ranks alone, in float32 or wider: within the innermost axis in rank order, then across.
            The bits of the mean then depend neither on bucket caps, plan, algorithm or transport
            nor on the order in which gradients arrive. Costs one collective more for each bucket,
            and the memory of the gradients, which are kept until the step is known to be whole.
        nonfinite: what becomes of a step in which a rank's gradient, or a sum, is NaN or infinite.
            "propagate" returns the results as they are. "skip" leaves the step out on all ranks:
            each leaf of the result is None, `SyncInfo.skipped` is True, and neither states of hooks
            nor, under `reduce_`, the caller's tensors are changed. "raise" is a `NonFiniteError` on
            every rank, which names ranks and leaves. Leaves that stay local are not looked at.

    Raises:
        PlanMismatchError: ranks differ in what must be alike; on every rank.
        ScheduleError: a schedule that was passed in does not give the result that it states.
        NoGradientError: no leaf has a gradient, or none is selected.
        SyncTimeoutError: a rank did not come.
        ValueError, TypeError: an argument that makes no sense; `PlanMismatchError` elsewhere.

    Example:
        >>> import fddp, torch
        >>> def average(group):
        ...     params = {"w": torch.zeros(2)}
        ...     with fddp.GradSync(params, group=group) as sync:
        ...         return sync({"w": torch.full((2,), 1.0 + group.rank)})["w"]
        >>> fddp.loopback(2, average)
        [tensor([1.5000, 1.5000]), tensor([1.5000, 1.5000])]
    """

    _title = "GradSync"

    def __init__(
        self,
        params_or_plan: Any,
        *,
        group: Group | None = None,
        mesh: Mesh | None = None,
        algorithm: Reduction = "all_reduce",
        bucket_cap_mb: float | Sequence[float] = CAP_MB,
        first_bucket_mb: float = FIRST_MB,
        sparse: Collection[str] = (),
        reduce_dtype: torch.dtype | None = None,
        select: Callable[[str], bool] | None = None,
        transport: TransportName = "auto",
        timeout_s: float | None = None,
        hook: Hook[Any] | None = None,
        deterministic: bool = False,
        nonfinite: Policy = "propagate",
    ) -> None:
        request = Request(
            source=params_or_plan,
            bucket_cap_mb=bucket_cap_mb,
            first_bucket_mb=first_bucket_mb,
            sparse=sparse,
            select=select,
            reduce_dtype=reduce_dtype,
            algorithm=algorithm,
            span=resolve_mesh(group, mesh),
            transport=transport,
            timeout_s=timeout_s,
            hook=hook,
            deterministic=deterministic,
            nonfinite=nonfinite,
            title=self._title,
        )
        with outside_transforms(), dump_failures():
            self._engine = Engine(request)

    @property
    def plan(self) -> BucketPlan:
        """The bucket plan in force."""
        return self._engine.program.plan

    @property
    def schedule(self) -> Schedule:
        """The schedule in force: what every step carries out."""
        return self._engine.program.schedule

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._engine.transport.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self._engine.transport.world_size

    @property
    def transport(self) -> str:
        """Name of the transport."""
        return self._engine.transport.name

    def __repr__(self) -> str:
        return (
            f"GradSync({len(self.plan.reduced)} leaves in {len(self.plan.buckets)} buckets, "
            f"rank {self.rank} of {self.world_size} over {self.transport})"
        )

    @untraced(INSTEAD_IN_A_GRAPH)
    def __call__(self, grads: Any, *, weight: float = 1.0, with_info: bool = False) -> Any:
        """The weighted mean over ranks of a tree of gradients; a collective call.

        Args:
            grads: tree with the plan's leaves; None where there is no gradient. Not written.
            weight: this rank's weight, for instance its number of samples; 0 contributes nothing.
            with_info: also return a `SyncInfo`.

        Returns:
            A new tree of the same structure, or `(tree, info)`. A leaf is None only where no rank
            has a gradient for it; in a step that is left out under `nonfinite="skip"` all are.

        Raises:
            TreeMismatchError: the tree has other leaves than the plan.
            WeightError: a weight is negative or not finite, or all weights are 0.
            NonFiniteError: a gradient or a sum is not finite, under `nonfinite="raise"`.
            TransformError: a `torch.func` transform or a tracer is active; a gradient has a tangent
                of forward mode, or was computed in a loss function from what that is differentiated
                by. Derivatives would end here; `fddp.pmean` has some.
            PeerError: another rank raised one of these.
            ValueError: the algorithm leaves shards, see `reduce_scatter`; or the hook keeps state,
                see `update`.
        """
        call = _CallSignature("replicated_mean", Method.CALL, Method.REDUCE_SCATTER)
        mean, *rest = self._sync_tree(call, grads, weight, with_info)
        return (mean, *rest) if with_info else mean

    @untraced(INSTEAD_IN_A_GRAPH)
    def update(
        self, grads: Any, state: Any, *, weight: float = 1.0, with_info: bool = False
    ) -> tuple[Any, ...]:
        """Like calling, with the state of the communication hook; a collective call.

        Args:
            grads, weight, with_info: as for a call.
            state: what `init_state` or the step before gave. Not written: after a step that failed
                it is as good as before.

        Returns:
            `(tree, state)` or `(tree, state, info)`, with the state for the next step. A step with
            a gradient that is not finite leaves the state as it was.

        Raises:
            TreeMismatchError: as for a call, or the state is not one of this hook for this plan.

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
        call = _CallSignature("replicated_mean", Method.UPDATE, Method.REDUCE_SCATTER)
        mean, new_state, *infos = self._sync_tree(call, grads, weight, with_info, state)
        return mean, new_state, *infos

    def init_state(self) -> tuple[Any, ...]:
        """The communication hook's state before the first step.

        Returns:
            For each bucket of the plan a tree of tensors and numbers, which may differ from rank to
            rank; () where there is no hook that keeps state. `torch.save` saves it.
        """
        return init_states(self._engine)

    @untraced(INSTEAD_IN_A_GRAPH)
    def reduce_(self, grads: Any, *, weight: float = 1.0, with_info: bool = False) -> Any:
        """Like calling, but writes the means into the tensors of `grads`.

        Returns:
            A tree of the same structure with the same tensors, and new ones where this rank had
            None and another rank a gradient; `(tree, info)` with `with_info`. In a step that is
            left out under `nonfinite="skip"` all leaves are None, and the tensors of `grads` hold
            this rank's own gradients as before.

        Raises:
            TreeMismatchError: as for a call, or a tensor whose elements share memory (an expanded
                one) and so can't be written.
        """
        call = _CallSignature(
            "replicated_mean", Method.REDUCE, Method.REDUCE_SCATTER, in_place=True
        )
        mean, *rest = self._sync_tree(call, grads, weight, with_info)
        return (mean, *rest) if with_info else mean

    @untraced(INSTEAD_IN_A_GRAPH)
    def reduce_scatter(self, grads: Any, *, weight: float = 1.0, with_info: bool = False) -> Any:
        """This rank's shard of the weighted mean over ranks; a collective call.

        Args:
            grads: tree with the plan's leaves; None where there is no gradient. Not written.
            weight: this rank's weight; 0 contributes nothing.
            with_info: also return a `SyncInfo`, whose `grad_norm` is that of this rank's shard.

        Returns:
            A tree of the same structure, or `(tree, info)`. Each leaf is the flat run of its
            elements that this rank owns, shape `(n,)` with n from 0 to the leaf's size, in the
            order of memory; None where no rank has a gradient. Leaves that are not reduced are
            whole. See [Note: shards].

        Raises:
            As a call of the `GradSync`; ValueError if its algorithm is not "reduce_scatter".

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
        call = _CallSignature("sharded_mean", Method.REDUCE_SCATTER, Method.CALL)
        mean, *rest = self._sync_tree(call, grads, weight, with_info)
        return (mean, *rest) if with_info else mean

    @untraced(INSTEAD_IN_A_GRAPH)
    def all_gather(self, shards: Any) -> Any:
        """Whole leaves from every rank's shards, the same on all ranks; a collective call.

        Args:
            shards: tree of shards as `reduce_scatter` and `shard` return them, of parameters for
                instance. Not written.

        Returns:
            A tree of the same structure with whole leaves, in the plan's shapes and dtypes.

        Raises:
            TreeMismatchError: a shard has another size or dtype than this rank owns.
            PeerError: another rank raised one.
            ValueError: the algorithm is not "reduce_scatter".
        """
        call = _CallSignature("sharded_mean", Method.ALL_GATHER, Method.CALL)
        fits = call.result == self.schedule.result
        engine = self._engine
        step = engine.open_gather() if fits else engine.open(call.method, with_stats=False)
        treedef: TreeDef | None = None
        try:
            call.check(self.schedule)
            own, treedef = matched_shards(shards, step.program)
            check_no_derivatives(own, step.program, "shards", graphs=False)
            step.begin(ShardContributions(own), own)
        except BaseException as error:
            step.fail(error)
        outcome = self._engine.finish(step)
        if treedef is None:
            raise InternalError("a step without a tree went through")
        return treedef.unflatten(outcome.leaves)

    def shard(self, tree: Any) -> Any:
        """This rank's shards of a tree that all ranks have alike; no communication.

        Args:
            tree: tree with the plan's leaves, the parameters for instance. Not written.

        Returns:
            A tree of the same structure, as `reduce_scatter` returns; copies.

        Raises:
            TreeMismatchError: the tree has other leaves than the plan.
            ValueError: the algorithm is not "reduce_scatter".
        """
        _check_fit("shard(tree)", "sharded_mean", "the tree itself", self.schedule)
        leaves, treedef = matched_leaves(tree, self._engine.program, "tree")
        return treedef.unflatten(shards_of(self._engine.program, leaves))

    def value_and_grad(
        self,
        fn: Callable[..., Any],
        argnums: int | tuple[int, ...] = 0,
        *,
        has_aux: bool = False,
        with_info: bool = False,
        weight_fn: Callable[..., float] | None = None,
    ) -> ValueAndGrad:
        """Turns a loss function into one that returns its value and synchronised gradients.

        Args:
            fn: `fn(*args, **kwargs) -> loss`, a real scalar tensor, or `(loss, aux)`.
            argnums: position of the parameters among the arguments; with several, the parameters
                are the tuple of those arguments.
            has_aux: whether `fn` returns a pair.
            with_info: whether to return a `SyncInfo` as well.
            weight_fn: gives this rank's weight from the same arguments as `fn`, for instance its
                number of samples or tokens; the gradients are then the weighted mean.

        Returns:
            A callable; see `ValueAndGrad`. With the algorithm "reduce_scatter" the gradients are
            shards, as `reduce_scatter` returns them.
        """
        return ValueAndGrad(self._engine, fn, argnums, has_aux, with_info, weight_fn)

    def tune(
        self, step: Callable[..., object], *args: Any, rounds: int = 5, **kwargs: Any
    ) -> TuneReport:
        """Looks for a faster bucket plan, and goes on with it if it is one; a collective call.

        Measures the links and, over a few real steps, when each leaf's gradient is ready; plans as
        `fddp.plan_optimal` does; then takes steps with the old and the new plan in turn, and keeps
        the one that was faster. Rank 0 plans for all.

        Args:
            step: takes one step of this `GradSync`, as `value_and_grad` makes them. It is called
                about `7 * rounds` times; what it returns is dropped, so it should change nothing.
            *args, **kwargs: its arguments.
            rounds: how often each plan is tried; the same on all ranks.

        Returns:
            What was expected and what was measured; print it.

        Raises:
            ValueError: the step does not synchronise, or the plan must not change: a schedule was
                passed in, or the algorithm leaves shards.
            UnevenError: within a loop of `fddp.uneven`.
            PlanMismatchError: ranks passed different rounds.
            Exception: what the step raised; the old plan is then in force.
        """
        return tune(self._engine, lambda: step(*args, **kwargs), rounds)

    def donate(self, grads: Any) -> None:
        """Takes the results of a step back, so that the next one may use their memory.

        A loop that holds one step's gradients until the next one has returned needs memory for
        two; one that donates them first needs it for one, whoever else refers to them.

        Args:
            grads: the tree that a step of this `GradSync` returned. What uses one of its leaves
                that lie in buckets, or a view of it, raises a RuntimeError from now on; arrays of
                NumPy or DLPack over them must be gone. Other leaves (sparse ones, local ones,
                shards of several pieces) stay as they are.

        Raises:
            TreeMismatchError: a leaf is no result of this `GradSync`, or has been donated before.
                Nothing is taken then.

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

    def rebuild(self, group: Group | None = None, *, mesh: Mesh | None = None) -> Self:
        """A `GradSync` like this one on another group; a collective call on the ranks of the group.

        For the ranks that are left when others were lost, for ranks that parted, and for groups
        that grow or shrink in order; ranks that have none of their own call `join` meanwhile. Plan,
        caps, options, the agreed unit of weight, what backward is known to bring and the number of
        the next step are kept, and with the plan the state of the hook, which callers pass on as
        before. This one is closed once the new one works; if that fails, it stays as it was.

        Ranks that failed in one step may differ by it in what they have, then all take the plan of
        the rank that has finished more; `fddp.reconcile` does the same for parameters and state.

        Args:
            group: as for the constructor; None for the default group, for instance after it was
                destroyed and made anew.
            mesh: the axes of the ranks, as for the constructor; None keeps a single axis whatever
                its size, and several axes if the number of ranks is the same.

        Returns:
            The new one. Callables that `value_and_grad` of this one made raise `ClosedError`, which
            says so; make them anew.

        Raises:
            PlanMismatchError: a rank has another plan or other options, which the text names, or
                can't go on; on every rank.
            ValueError: on this rank, which is named on the others: the mesh has another number of
                ranks; the algorithm leaves shards, whose owners would change; or the schedule was
                passed in, for another number of ranks.
            ReentryError: called within one of its steps: in the loss function or in backward.
            ClosedError: it has been rebuilt before; go on with what that returned.
            TypeError: `group` is no group, so that the others can't be told: they wait for this
                rank until their time is over.
            RankLostError, SyncTimeoutError: a rank of the group did not come.

        Example:
            >>> import fddp, torch
            >>> def train(group):
            ...     sync = fddp.GradSync({"w": torch.zeros(2)}, group=group)
            ...     sync.close()  # or a rank was lost: then the group is that of those left
            ...     with sync.rebuild(group) as sync:
            ...         return sync({"w": torch.full((2,), 1.0 + group.rank)})["w"].tolist()
            >>> fddp.loopback(2, train)
            [[1.5, 1.5], [1.5, 1.5]]
        """
        with outside_transforms():
            engine = rebuild_engine(self._engine, resolve_mesh(group, mesh))
        other = copy.copy(self)
        other._engine = engine
        return other

    @classmethod
    def join(
        cls,
        group: Group | None = None,
        *,
        params: Any = None,
        mesh: Mesh | None = None,
        hook: Hook[Any] | None = None,
        transport: TransportName = "auto",
        timeout_s: float | None = None,
    ) -> Self:
        """A `GradSync` for a rank that comes late, made of the others'; a collective call.

        The other ranks of the group call `rebuild` of theirs. Plan, options, the unit of weight and
        the number of the next step come from them; parameters and states by `fddp.reconcile`.

        Args:
            group: as for the constructor.
            params: this rank's parameters. Needed only where ranks differ in leaves that are not
                reduced, or where these are arrays of JAX.
            mesh: as the other ranks passed it.
            hook: the same as on the other ranks; code does not travel.
            transport: as the other ranks asked for it at construction.
            timeout_s: as for the constructor.

        Raises:
            PlanMismatchError: no rank has a `GradSync` to go on with; or as from `rebuild`.
            ValueError, TypeError: an argument that makes no sense; `PlanMismatchError` elsewhere.
            RankLostError, SyncTimeoutError: a rank of the group did not come.

        Example:
            >>> import fddp, torch
            >>> def train(group):
            ...     if group.rank == 2:
            ...         sync = fddp.GradSync.join(group)
            ...     else:
            ...         sync = known[group.rank].rebuild(group)
            ...     with sync:
            ...         return sync({"w": torch.full((2,), 1.0 + group.rank)})["w"].tolist()
            >>> known = fddp.loopback(2, lambda g: fddp.GradSync({"w": torch.zeros(2)}, group=g))
            >>> fddp.loopback(3, train)
            [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
        """
        self = cls.__new__(cls)
        with outside_transforms():
            self._engine = join_engine(
                resolve_mesh(group, mesh), params, hook, transport, timeout_s
            )
        return self

    def close(self) -> None:
        """Frees the communicator and all memory; a second call does nothing."""
        self._engine.close("close() was called")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sync_tree(
        self, call: _CallSignature, grads: Any, weight: float, with_info: bool, state: Any = None
    ) -> tuple[Any, ...]:
        """The tree of results, the new state if one was given, and the info if it is wanted."""
        start_s = time.perf_counter()
        step = self._engine.open(call.method, with_stats=with_info)
        program = step.program
        treedef: TreeDef | None = None
        own: Sequence[Tensor | None] = ()
        try:
            call.check(self.schedule)
            step.hook_states = checked_states(self._engine, state, "update(grads, state)")
            own, treedef = matched_leaves(grads, program, "gradients")
            if isinstance(treedef, ForeignTreeDef):
                # JAX has differentiated already what other ranks differentiate in their step.
                step.method = Method.NOTHING
            check_no_derivatives(own, program, "gradients", graphs=True)
            if call.in_place:
                check_writable(own, treedef, program)
            step.begin(TreeContributions(program, own, checked_weight(weight)), own)
        except BaseException as error:
            step.fail(error)
        outcome = self._engine.finish(step)
        if treedef is None:
            raise InternalError("a step without a tree went through")
        leaves = _written(own, outcome.leaves) if call.in_place else outcome.leaves
        states = () if state is None else (step.hook_states,)
        infos = (make_info(step, outcome, (start_s, start_s)),) if with_info else ()
        return treedef.unflatten(leaves), *states, *infos


class _CallSignature(NamedTuple):
    """How gradients are synchronised without differentiating.

    Attributes:
        result: what the schedule must leave.
        method: the call.
        instead: what serves where it leaves something else.
        in_place: whether results are written into the caller's tensors.
    """

    result: Result
    method: Method
    instead: Method
    in_place: bool = False

    def check(self, schedule: Schedule) -> None:
        """As `_check_fit`."""
        _check_fit(self.method.text, self.result, self.instead.text, schedule)


def _check_fit(call: str, result: Result, instead: str, schedule: Schedule) -> None:
    """Whether a call has a meaning here.

    Raises:
        ValueError: the schedule leaves something else.
        TransformError: a `torch.func` transform is active.
    """
    check_no_transform(call)
    if schedule.result != result:
        raise ValueError(
            f"{call} needs a GradSync whose schedule gives a {result}; this one's gives a "
            f"{schedule.result}: use {instead}, or build it with another algorithm"
        )


def _written(own: Sequence[Tensor | None], results: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The caller's tensors with the results in them, and results where it had none."""
    pairs = list(zip(own, results, strict=True))
    with torch.no_grad():
        for target, result in pairs:
            if target is not None and result is not None:
                target.copy_(result)
    return [result if target is None or result is None else target for target, result in pairs]
