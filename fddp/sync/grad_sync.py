"""`GradSync`: averages trees of gradients over the ranks of a group."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor

from fddp.core.entrance import entrance, suggest_keywords
from fddp.core.plan.defaults import CAP_MB, FIRST_MB
from fddp.core.text import counted
from fddp.hooks.choosing import HookOrAuto, named_hook
from fddp.runtime.agreement import ReportTime
from fddp.runtime.inputs import outside_transforms
from fddp.runtime.nonfinite import Policy
from fddp.sync.autotune import TuneReport, tune
from fddp.sync.engine import Engine
from fddp.sync.rebuild import ABSENT, join_engine, rebuild_engine
from fddp.sync.request import NoiseGroups, Reduction, Request
from fddp.sync.tree_sync import TreeSync
from fddp.sync.value_and_grad import ValueAndGrad
from fddp.sync.virtual_value_and_grad import VirtualValueAndGrad
from fddp.telemetry.flight.dump import dump_failures
from fddp.transport import Group, TransportName
from fddp.transport.mesh import Mesh, resolve_mesh
from fddp.tree.modules import named_params

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class GradSync(TreeSync):
    """Averages trees of gradients over the ranks of a group, by buckets, during backward.

    Construction is a collective call: ranks compare their leaves, caps and options, and use rank
    0's order of leaves. Each instance has its own communicator. A plan made by the constructor is
    rebuilt once, in the order in which rank 0's gradients arrived in the first backward pass.

    Args:
        params_or_plan: a tree or `nn.Module`, of which only shapes, dtypes and layouts are used; a
            `BucketPlan`, which is never rebuilt; or a `Schedule`, which is checked.
        group: a `torch.distributed` group or one-dimensional `DeviceMesh`, or one of
            `fddp.loopback`; None for the default group.
        mesh: axes of the ranks, for algorithms along axes: a `Topology` of `group`, or a torch
            `DeviceMesh`, which has its own group.
        algorithm: algorithm of the reductions, as in `make_schedule`: "all_reduce", "hierarchical",
            or "reduce_scatter", which gives each rank its shard. Under the last, plans are not
            rebuilt, because shards would change.
        bucket_cap_mb: MiB at which a bucket is closed, or a list of them, whose last one repeats.
        first_bucket_mb: MiB at which the first bucket is closed.
        sparse: paths of leaves whose gradients are sparse (`Embedding(sparse=True)`).
        reduce_dtype: `torch.float32` or `torch.float64` to sum float16 and bfloat16 gradients in
            this dtype; None to sum each in its own.
        select: predicate on paths of the leaves to average; the others keep this rank's gradient.
        transport: "auto", "shm", "c10d" or "loopback"; see `SyncInfo.transport_reason`.
        timeout_s: seconds that any operation may take; None for the limit of the group.
        hook: communication hook of `fddp.hooks` that replaces the all-reduces of the schedule; with
            "hierarchical", those along the outermost axis; with "reduce_scatter", the
            reduce-scatters along it (`int8` and `int4`, also with `error_feedback`). "auto" is
            `fddp.hooks.auto()`. Plans are not rebuilt under a hook that keeps state.
        deterministic: True to fix the association of each sum over ranks by the axes alone, in
            float32 or wider: in rank order within the innermost axis, then across. The bits of the
            mean then do not depend on bucket caps, plan, algorithm, transport, or the order of
            gradients. Costs one more collective for each bucket, and the memory of the gradients,
            which are kept until no repair can be needed.
        virtual_ranks: number of virtual ranks, at least that of ranks, or None. Each rank carries a
            run of them, and a step takes one input for each (`virtual_batches`). The mean over
            virtual ranks then has the same bits on any number of ranks. Implies `deterministic`.
        nonfinite: policy for steps in which a rank's gradient or a sum is NaN or infinite.
            "propagate" returns the results. "skip" skips the step on all ranks: each leaf of the
            result is None, `SyncInfo.skipped` is True, and states of hooks and, under `reduce_`,
            the caller's tensors are unchanged. "raise" raises a `NonFiniteError` with ranks and
            leaves on every rank. Local leaves are not checked. With `report="next"` no step waits
            for a decision: "skip" makes every leaf zero in place of None, also in the tensors of
            `reduce_`; "raise" raises the error as others are, with leaves alone; see `found_inf`.
        report: "now", or "next" to return results before the report of all ranks is read, so that
            no step waits for other hosts. The report is read before the next step, by `check`, and
            by `close`, which raise its errors; up to one step's results are used before. Every rank
            has to contribute all leaves with weight 1: anything else is an error, and there are no
            repairs. Not with a hook.
        noise: True to measure squared norms of the gradients of all ranks, from which
            `fddp.numerics.next_noise_scale` estimates the gradient noise scale; or a function from
            the path of a leaf to the name of a group, to measure them by group. Steps that return a
            `SyncInfo`, on all ranks, have them in `SyncInfo.squared_norms`; others measure nothing.
            Not with shards, sparse leaves, a hook of torch's DDP, or `report="next"`. Under a hook
            that compresses, the error of the mean counts as part of it.

    Attributes:
        title: name of the class, which ranks compare at construction; subclasses have their own.

    Raises:
        PlanMismatchError: leaves or options differ between ranks; on every rank.
        ScheduleError: a passed schedule does not give the result that it states.
        NoGradientError: no leaf has a gradient, or none is selected.
        SyncTimeoutError: a rank did not call the constructor in time.
        ValueError, TypeError: an invalid argument; `PlanMismatchError` on the other ranks.

    Example:
        >>> import fddp, torch
        >>> def average(group):
        ...     params = {"w": torch.zeros(2)}
        ...     with fddp.GradSync(params, group=group) as sync:
        ...         return sync({"w": torch.full((2,), 1.0 + group.rank)})["w"]
        >>> fddp.loopback(2, average)
        [tensor([1.5000, 1.5000]), tensor([1.5000, 1.5000])]
    """

    title = "GradSync"

    @entrance
    @suggest_keywords
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
        hook: HookOrAuto = None,
        deterministic: bool = False,
        virtual_ranks: int | None = None,
        nonfinite: Policy = "propagate",
        report: ReportTime = "now",
        noise: NoiseGroups = None,
    ) -> None:
        request = Request(
            source=named_params(params_or_plan),
            bucket_cap_mb=bucket_cap_mb,
            first_bucket_mb=first_bucket_mb,
            sparse=sparse,
            select=select,
            reduce_dtype=reduce_dtype,
            algorithm=algorithm,
            span=resolve_mesh(group, mesh),
            transport=transport,
            timeout_s=timeout_s,
            hook=named_hook(hook),
            deterministic=deterministic,
            virtual_ranks=virtual_ranks,
            nonfinite=nonfinite,
            report=report,
            noise=noise,
            title=self.title,
        )
        with outside_transforms(), dump_failures():
            self._engine = Engine(request)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._engine.transport.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self._engine.transport.world_size

    @property
    def group(self) -> Group:
        """The group, for other calls on the same ranks.

        Raises:
            ClosedError: this `GradSync` is closed, or the group no longer exists.
        """
        self._engine.check_usable()
        return self._engine.group

    @property
    def transport(self) -> str:
        """Name of the transport."""
        return self._engine.transport.name

    def __repr__(self) -> str:
        what = counted(len(self.plan.reduced), "leaf"), counted(len(self.plan.buckets), "bucket")
        where = f"rank {self.rank} of {self.world_size} over {self.transport}"
        return f"GradSync({' in '.join(what)}, {where})"

    @entrance
    def value_and_grad(
        self,
        fn: Callable[..., Any],
        argnums: int | tuple[int, ...] = 0,
        *,
        has_aux: bool = False,
        with_info: bool = False,
        weight_fn: Callable[..., float] | None = None,
    ) -> ValueAndGrad:
        """Turn a loss function into one that returns its value and synchronised gradients.

        Args:
            fn: `fn(*args, **kwargs) -> loss`, a real scalar tensor, or `(loss, aux)`.
            argnums: position of the parameters among the arguments; with several, the parameters
                are the tuple of those arguments.
            has_aux: True if `fn` returns a pair.
            with_info: True to also return a `SyncInfo`.
            weight_fn: returns this rank's weight, such as its number of samples, from the arguments
                of `fn`; the gradients are then the weighted mean.

        Returns:
            A callable; see `ValueAndGrad`, and `VirtualValueAndGrad` for virtual ranks. With the
            algorithm "reduce_scatter" it returns shards of gradients, as `reduce_scatter`.
        """
        is_virtual = self._engine.schedule.virtual is not None
        kind = VirtualValueAndGrad if is_virtual else ValueAndGrad
        return kind(self._engine, fn, argnums, has_aux, with_info, weight_fn)

    @entrance
    def tune(
        self, step: Callable[..., object], *args: Any, rounds: int = 5, **kwargs: Any
    ) -> TuneReport:
        """Search for a faster bucket plan, and use it from now on; a collective call.

        Rank 0 makes a plan as `fddp.plan_optimal`, from measurements of the links and of real
        steps. Steps with the old and the new plan then take turns, and the faster plan is kept.

        Args:
            step: function that takes one step of this `GradSync`, made by `value_and_grad`. It is
                called about `7 * rounds` times, and should have no side effects.
            *args, **kwargs: arguments of `step`.
            rounds: number of trials of each plan; the same on all ranks.

        Returns:
            A report of expected and measured times; print it.

        Raises:
            ValueError: the step does not synchronise, or the plan can't change because a schedule
                was passed or the algorithm gives shards.
            UnevenError: the call is within a loop of `fddp.uneven`.
            PlanMismatchError: ranks passed different rounds.
            Exception: any error of the step; the old plan is then in force.
        """
        return tune(self._engine, lambda: step(*args, **kwargs), rounds)

    @overload
    def rebuild(self, group: Group | None = None, *, mesh: Mesh | None = None) -> Self: ...

    @overload
    def rebuild(
        self, group: Group | None = None, *, mesh: Mesh | None = None, state: T
    ) -> tuple[Self, T]: ...

    @entrance
    def rebuild(
        self, group: Group | None = None, *, mesh: Mesh | None = None, state: Any = ABSENT
    ) -> Any:
        """Return a `GradSync` like this one on the ranks that are left; a collective call of them.

        To be used after ranks were lost, after ranks have diverged by a step, and when a group
        grows or shrinks; new ranks call `join`. Plan, options, step number and expected
        gradients are kept, and states of hooks stay valid. This instance is closed on
        success, and unchanged on failure.

        If ranks have finished different numbers of steps, all use the plan and `state` of the
        newest rank.

        Args:
            group: as for the constructor. None for the ranks of this one's group that are left: all
                but those whose process has ended, and those that have closed their `GradSync` and
                do not make this call within two seconds. `group` of the result is then a new group
                if any rank of the first one is missing, with the backends of this one's. If this
                one's group was destroyed, None is the default group.
            mesh: as for the constructor; None keeps a single axis of any size, and several axes if
                the number of ranks is the same.
            state: this rank's state after its last finished step, as `tree` of `fddp.reconcile`:
                parameters, optimizer state and whatever else a step changes.

        Returns:
            The new instance; with `state`, a pair of it and the newest rank's state. Callables of
            this one's `value_and_grad` raise `ClosedError` afterwards; make new ones. `ranks` of
            `RankLostError` and `SyncTimeoutError` keep the numbers of the first group.

        Raises:
            PlanMismatchError: plans or options differ, or another rank can't be rebuilt.
            ValueError: this rank can't be rebuilt: the mesh has another number of ranks, shards
                would change their owners, or a passed schedule is for other ranks.
            ReentryError: the call is within a step: in the loss function or in backward.
            ClosedError: this instance was rebuilt before; use the result.
            TypeError: `group` is no group. The other ranks time out.
            RankLostError: another rank was lost during the call, or the others went on without this
                one. After a loss, call again.
            SyncTimeoutError: a rank did not make the call.

        Example:
            >>> import fddp, torch
            >>> def train(group):
            ...     sync = fddp.GradSync({"w": torch.zeros(2)}, group=group)
            ...     sync.close()  # or a rank was lost
            ...     sync, state = sync.rebuild(state={"w": torch.zeros(2), "step": 3})
            ...     with sync:
            ...         return sync({"w": torch.full((2,), 1.0 + group.rank)})["w"].tolist()
            >>> fddp.loopback(2, train)
            [[1.5, 1.5], [1.5, 1.5]]
        """
        self._engine.finish_in_flight()
        with outside_transforms():
            span = resolve_mesh(group, mesh)
            engine, newest = rebuild_engine(self._engine, span, state)
        other = copy.copy(self)
        other._engine = engine
        return other if state is ABSENT else (other, newest)

    @classmethod
    @entrance
    def join(
        cls,
        group: Group | None = None,
        *,
        params: Any = None,
        mesh: Mesh | None = None,
        hook: HookOrAuto = None,
        transport: TransportName = "auto",
        timeout_s: float | None = None,
        state: Any = ABSENT,
    ) -> Any:
        """Return a `GradSync` on a new rank, while the others call `rebuild`; a collective call.

        Plan, options and step number come from the other ranks; use
        `fddp.reconcile` for parameters and states.

        Args:
            group, timeout_s: as for the constructor.
            params: this rank's parameters. Needed only if ranks differ in leaves that are not
                reduced, or if leaves are JAX arrays.
            mesh: as on the other ranks.
            hook: as on the other ranks.
            transport: as the other ranks requested it at construction.
            state: None where the others pass their state to `rebuild`; the result is then a pair of
                the `GradSync` and the newest rank's state.

        Raises:
            PlanMismatchError: no rank has a `GradSync`; or as for `rebuild`.
            ValueError, TypeError: an invalid argument; `PlanMismatchError` on the other ranks.
            RankLostError, SyncTimeoutError: a rank of the group did not make the call.

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
            self._engine, newest = join_engine(
                resolve_mesh(group, mesh), params, named_hook(hook), transport, timeout_s, state
            )
        return self if state is ABSENT else (self, newest)

    @entrance
    def check(self) -> None:
        """Read the report of the last step, under `report="next"`; otherwise do nothing.

        To be called before results leave the process, as in a checkpoint. Waits until all ranks
        have sent their gradients.

        Raises:
            PeerError, DesyncError: as of the step, whose number the error has.
            RankLostError, SyncTimeoutError: a rank was lost, or did not take the step.

        Example:
            >>> import fddp, torch
            >>> def train(group):
            ...     params = {"w": torch.zeros(2)}
            ...     with fddp.GradSync(params, group=group, report="next") as sync:
            ...         mean = sync({"w": torch.full((2,), 1.0 + group.rank)})
            ...         sync.check()
            ...         return mean["w"].tolist()
            >>> fddp.loopback(2, train)
            [[1.5, 1.5], [1.5, 1.5]]
        """
        self._engine.finish_in_flight()
        self._engine.check()

    @property
    def found_inf(self) -> Tensor | None:
        """Flag of non-finite results of the last step, under `report="next"` and a `nonfinite`
        other than "propagate"; otherwise None.

        Shape (), float32, on the device of the results: 1.0 if a result of any rank is NaN or
        infinite, else 0.0. The same on all ranks. Fused optimizers of torch take it, and leave out
        the update without a wait of the host.

        Example:
            >>> import fddp, torch
            >>> def train(group):
            ...     w = torch.ones(2, requires_grad=True)
            ...     optimizer = torch.optim.Adam([w], fused=True)
            ...     options = {"report": "next", "nonfinite": "skip"}
            ...     with fddp.GradSync({"w": w}, group=group, **options) as sync:
            ...         w.grad = sync({"w": torch.tensor([1.0, float("nan")])})["w"]
            ...         optimizer.found_inf = sync.found_inf
            ...         optimizer.step()
            ...     return w.grad.tolist(), w.tolist()
            >>> fddp.loopback(1, train)
            [([0.0, 0.0], [1.0, 1.0])]
        """
        return self._engine.found_inf

    @entrance
    def close(self) -> None:
        """Free the communicator and all memory; a second call does nothing. Waits for a step in
        flight, and reads a report that `report="next"` has left, with the errors of `check`."""
        try:
            self._engine.finish_in_flight()
            self._engine.check()
        finally:
            self._engine.close("close() was called")

    def __enter__(self) -> Self:
        return self

    @entrance
    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            # Other ranks may not have started it, or may not read the report.
            self._engine.note_in_flight(None)
            self._engine.forget_report()
        self.close()
