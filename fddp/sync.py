"""`GradSync`: averages trees of gradients over the ranks of a group."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fddp.agree import Terms, agree
from fddp.buffers import BufferPool
from fddp.contributions import TreeContributions
from fddp.control import ControlReport
from fddp.errors import ClosedError, InternalError, NoGradientError, ReentryError, UnevenError
from fddp.expect import Arrivals
from fddp.info import SyncInfo
from fddp.inputs import (
    check_no_transform,
    check_writable,
    checked_weight,
    matched_leaves,
    outside_transforms,
)
from fddp.observe import make_info
from fddp.plan import BucketPlan, rebucket
from fddp.planning import plan_buckets
from fddp.program import Program, make_program
from fddp.scaling import WeightScale
from fddp.session import Outcome, Session, Setting
from fddp.transports import Group, TransportName, open_transport
from fddp.tree import TreeDef
from fddp.uneven import Round
from fddp.value_and_grad import ValueAndGrad

if TYPE_CHECKING:
    from typing_extensions import Self

_CAP_MB = 25.0
_FIRST_MB = 1.0
_LONGEST_S = 10**7  # what the backends' clocks hold with room to spare


class GradSync:
    """Averages trees of gradients over the ranks of a group, by buckets, during backward.

    Building one is a collective call: ranks compare their leaves, caps and options, and agree on
    rank 0's order of leaves. Each has a communicator of its own, so that several do not mix.
    A plan that it made itself is rebuilt once, in the order in which rank 0's gradients arrived in
    the first backward pass.

    Args:
        params_or_plan: a tree of tensors (its shapes, dtypes and layouts matter, not its values),
            or a `BucketPlan`, which is used as it is and never rebuilt.
        group: a `torch.distributed` group or one-dimensional `DeviceMesh`, or the group that
            `fddp.loopback` hands out; None for the default group.
        bucket_cap_mb: MiB at which a bucket is closed, or a list of them, whose last one repeats.
        first_bucket_mb: MiB at which the first bucket is closed.
        sparse: paths of leaves whose gradients are sparse (`Embedding(sparse=True)`).
        reduce_dtype: `torch.float32` or `torch.float64`, in which float16 and bfloat16 gradients
            are then summed; None sums each in its own dtype.
        select: tells by path which leaves to average; the others keep this rank's own gradient.
        transport: "auto", "c10d" or "loopback".
        timeout_s: seconds that any operation may take; None for the group's own limit.

    Raises:
        PlanMismatchError: ranks differ in what must be alike; on every rank.
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

    def __init__(
        self,
        params_or_plan: Any,
        *,
        group: Group | None = None,
        bucket_cap_mb: float | Sequence[float] = _CAP_MB,
        first_bucket_mb: float = _FIRST_MB,
        sparse: Collection[str] = (),
        reduce_dtype: torch.dtype | None = None,
        select: Callable[[str], bool] | None = None,
        transport: TransportName = "auto",
        timeout_s: float | None = None,
    ) -> None:
        # What is wrong on this rank alone is told to the others before it is raised.
        usable = timeout_s is None or (
            isinstance(timeout_s, (int, float)) and 0 < timeout_s <= _LONGEST_S
        )
        self._transport = open_transport(group, "auto", timeout_s if usable else None)
        try:
            terms, failure = None, None
            try:
                if not usable:
                    raise ValueError(
                        f"timeout_s must be above 0 and at most {_LONGEST_S} seconds, "
                        f"got {timeout_s!r}"
                    )
                if transport not in ("auto", self._transport.name):
                    raise ValueError(
                        f"transport={transport!r} does not fit this group; "
                        f"pass 'auto' or {self._transport.name!r}"
                    )
                plan = _plan(params_or_plan, bucket_cap_mb, first_bucket_mb, sparse, select)
                given = isinstance(params_or_plan, BucketPlan)
                terms = Terms(plan, given, transport, _dtype_name(reduce_dtype))
            except Exception as error:
                failure = error
            agreed = agree(self._transport, terms, failure)
        except BaseException:
            self._transport.close()
            raise
        self._reduce_dtype = agreed.reduce_dtype
        self._program = self._make_program(agreed.plan, with_order=not agreed.given)
        self._pool = BufferPool()
        self._scale = WeightScale(self.world_size)
        self._step = 0
        self._round: Round | None = None
        self._arrivals: Arrivals | None = None
        self._in_backward = False
        self._closed_by = ""  # why no further step may start

    @property
    def plan(self) -> BucketPlan:
        """The bucket plan in force."""
        return self._program.plan

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._transport.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self._transport.world_size

    @property
    def transport(self) -> str:
        """Name of the transport."""
        return self._transport.name

    def __repr__(self) -> str:
        return (
            f"GradSync({len(self._program.reduced)} leaves in {len(self.plan.buckets)} buckets, "
            f"rank {self.rank} of {self.world_size} over {self.transport})"
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def __call__(self, grads: Any, *, weight: float = 1.0, with_info: bool = False) -> Any:
        """The weighted mean over ranks of a tree of gradients; a collective call.

        Args:
            grads: tree with the plan's leaves; None where there is no gradient. Not written.
            weight: this rank's weight, for instance its number of samples; 0 contributes nothing.
            with_info: also return a `SyncInfo`.

        Returns:
            A new tree of the same structure, or `(tree, info)`. A leaf is None only where no rank
            has a gradient for it.

        Raises:
            TreeMismatchError: the tree has other leaves than the plan.
            WeightError: a weight is negative or not finite, or all weights are 0.
            PeerError: another rank raised one of these.
        """
        treedef, leaves, info = self._sync_tree(grads, weight, with_info, in_place=False)
        return (treedef.unflatten(leaves), info) if with_info else treedef.unflatten(leaves)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def reduce_(self, grads: Any, *, weight: float = 1.0, with_info: bool = False) -> Any:
        """Like calling, but writes the means into the tensors of `grads`.

        Returns:
            A tree of the same structure with the same tensors, and new ones where this rank had
            None and another rank a gradient; `(tree, info)` with `with_info`.

        Raises:
            TreeMismatchError: as for a call, or a tensor whose elements share memory (an expanded
                one) and so can't be written.
        """
        treedef, leaves, info = self._sync_tree(grads, weight, with_info, in_place=True)
        return (treedef.unflatten(leaves), info) if with_info else treedef.unflatten(leaves)

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
            A callable; see `ValueAndGrad`.
        """
        return ValueAndGrad(self, fn, argnums, has_aux, with_info, weight_fn)

    def close(self) -> None:
        """Frees the communicator and all memory; a second call does nothing."""
        self._pool.clear()
        self._transport.close()
        self._closed_by = self._closed_by or "close() was called"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Sessions; `value_and_grad` and `uneven` use these too.

    def _open(self, *, with_stats: bool) -> Session:
        if self._closed_by:
            raise ClosedError(
                f"this GradSync is closed ({self._closed_by}); build a new one on a working group"
            )
        if self._in_backward:
            raise ReentryError(
                f"rank {self.rank}: a step was called while backward of another step of the same "
                f"GradSync runs, where ranks reach it at different points; call it in the loss "
                f"function itself, or use a GradSync of its own for it"
            )
        if self._round is not None and self._round.over:
            # The other ranks have left the loop: nobody would meet this one.
            self._round.synced += 1
            raise UnevenError(f"rank {self.rank} at step {self._step}: {self._round.problem()}")
        setting = Setting(
            self._program, self._transport, self._pool, self._scale, self._step, with_stats
        )
        self._step += 1
        session = Session(setting)
        if self._round is not None:
            session.has_next = self._round.has_next
            self._round.synced += 1
            if self._round.synced > 1:
                session.fail(self._round.problem())
        return session

    def _close(self, session: Session) -> Outcome:
        try:
            # Results outlive the caller's inference mode, and buffers are used again after it.
            with outside_transforms(), torch.inference_mode(False):
                outcome = session.finish()
        except BaseException as error:
            if session.orderly:
                self._take_note(session)
            else:
                self._break(error)
            raise
        report = self._take_note(session)
        if report.order and self._program.control.with_order:
            reduced = self._program.reduced
            plan = rebucket(self.plan, [reduced[slot] for slot in report.order])
            self._program = self._make_program(plan, with_order=False)
            self._pool.clear()
        return outcome

    def _take_note(self, session: Session) -> ControlReport:
        """What the control word means for later steps; the same on all ranks, also of a failure."""
        report = session.report
        if report is None:
            raise InternalError("a step ended in good order without a control word")
        if self._round is not None:
            self._round.any_next = report.has_next > 0
            self._round.over = report.has_next == 0
        if report.agreed and not report.failed and report.active:
            self._scale = session.setting.scale.next(
                report.total_weight, report.total_squared, report.active
            )
        return report

    def _break(self, error: BaseException) -> None:
        """A step was left half done: ranks no longer agree on what comes next."""
        self._closed_by = f"{type(error).__name__}: {error}"
        self._pool.clear()
        self._transport.close()

    def _make_program(self, plan: BucketPlan, *, with_order: bool) -> Program:
        return make_program(
            plan, self.world_size, reduce_dtype=self._reduce_dtype, with_order=with_order
        )

    def _sync_tree(
        self, grads: Any, weight: float, with_info: bool, *, in_place: bool
    ) -> tuple[TreeDef, list[Tensor | None], SyncInfo | None]:
        start_s = time.perf_counter()
        session = self._open(with_stats=with_info)
        program = session.setting.program
        treedef: TreeDef | None = None
        own: Sequence[Tensor | None] = ()
        try:
            check_no_transform("reduce_(grads)" if in_place else "sync(grads)")
            own, treedef = matched_leaves(grads, program, "gradients")
            if in_place:
                check_writable(own, program)
            session.begin(TreeContributions(program, own, checked_weight(weight)), own)
        except BaseException as error:
            session.fail(error)
        outcome = self._close(session)
        if treedef is None:
            raise InternalError("a step without a tree went through")
        info = make_info(session, outcome, (start_s, start_s)) if with_info else None
        leaves = _written(own, outcome.leaves) if in_place else outcome.leaves
        return treedef, leaves, info

    # Rounds of `fddp.uneven`

    def _any_has(self, mine: bool) -> bool:
        device = self._transport.control_device
        votes = torch.tensor([mine], dtype=torch.float64, device=device)
        self._transport.all_reduce(votes).wait("the vote before the first round")
        return bool(votes.item() > 0)

    def _begin_round(self, turn: Round) -> Round:
        self._round = turn
        return turn

    def _fail_round(self, error: BaseException) -> None:
        """Takes part in a round's synchronisation only to say what went wrong; raises it."""
        session = self._open(with_stats=False)
        session.fail(error)
        self._close(session)

    def _end_rounds(self) -> None:
        self._round = None


def _plan(
    params_or_plan: Any,
    bucket_cap_mb: float | Sequence[float],
    first_bucket_mb: float,
    sparse: Collection[str],
    select: Callable[[str], bool] | None,
) -> BucketPlan:
    if not isinstance(params_or_plan, BucketPlan):
        return plan_buckets(
            params_or_plan,
            bucket_cap_mb=bucket_cap_mb,
            first_bucket_mb=first_bucket_mb,
            sparse=sparse,
            select=select,
        )
    if not params_or_plan.buckets:
        raise NoGradientError(
            f"the plan has {len(params_or_plan.leaves)} leaves and no bucket, so nothing would be "
            f"averaged; pass a plan with buckets"
        )
    if (bucket_cap_mb, first_bucket_mb, len(sparse), select) != (_CAP_MB, _FIRST_MB, 0, None):
        raise ValueError(
            "a plan that is passed in is used as it is; give bucket_cap_mb, first_bucket_mb, "
            "sparse and select to plan_buckets instead"
        )
    return params_or_plan


def _dtype_name(dtype: torch.dtype | None) -> str | None:
    if dtype not in (None, torch.float32, torch.float64):
        raise ValueError(f"reduce_dtype must be torch.float32 or torch.float64, got {dtype}")
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _written(own: Sequence[Tensor | None], results: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The caller's tensors with the results in them, and results where it had none."""
    pairs = list(zip(own, results, strict=True))
    with torch.no_grad():
        for target, result in pairs:
            if target is not None and result is not None:
                target.copy_(result)
    return [result if target is None or result is None else target for target, result in pairs]
