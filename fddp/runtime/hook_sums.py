"""Sums of a step whose buckets are reduced by a communication hook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fddp.core.numerics.weighting import WeightScale, weight_problem
from fddp.core.protocol.control_word import ControlReport
from fddp.core.schedule.op import Op
from fddp.core.timeline import Interval
from fddp.errors import FddpError, error_text
from fddp.hooks.future import Future
from fddp.hooks.hook import Bucket, HookError
from fddp.native.memory import wrapper_kind
from fddp.runtime.failures import locate
from fddp.runtime.hook_binding import BoundHook
from fddp.runtime.hook_collectives import Collectives
from fddp.runtime.hook_work import HookWork
from fddp.runtime.program import Program
from fddp.runtime.sums import Sums
from fddp.telemetry.waits import note_wait
from fddp.transport.base import Transport
from fddp.transport.liveness.membership import CHECK_INTERVAL_S
from fddp.tree.pytree import flatten

if TYPE_CHECKING:
    from fddp._C import CollectiveRange

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 0.01  # between two looks at the future of a raw hook


class HookSums(Sums):
    """Runs a communication hook in one step: starts its reductions, stores results and states.

    Attributes:
        spans: when the hook ran or waited, on the clock of `time.perf_counter`; with
            `record_time` only.
    """

    def __init__(
        self,
        bound: BoundHook,
        program: Program,
        transport: Transport,
        step: int,
        *,
        record_time: bool,
    ) -> None:
        super().__init__(program)
        self._is_raw = bound.hook.raw
        if self._is_raw:
            self.averages = self.applies_scale = False
        self._bound = bound
        self._transport, self._step = transport, step
        self._record_time = record_time
        self.spans: list[Interval] = []
        self._works: dict[int, HookWork] = {}  # by bucket
        self._new_states: dict[int, Any] = {}  # by bucket, of reductions that have ended
        self._failure: tuple[Exception, str] | None = None  # with its place
        # True once a rank may lack a collective that a raw hook has started on others. Further ones
        # would meet those of other buckets.
        self._is_stopped = False
        self._is_late = False  # True once a failure can no longer be reported

    def reduction(self, position: int) -> Op | None:
        """Return the reduction that the hook carries out in the operation at a position, of which
        it is a stage; None for other operations."""
        ops = self._program.schedule.ops
        op, last = ops[position], self._bound.positions.get(ops[position].bucket)
        return ops[last] if last is not None and (op.kind == "stage" or last == position) else None

    def launch(
        self, op: Op, own: Tensor, weight: float, states: Sequence[Any], what: str
    ) -> HookWork:
        """Start the next stage of a reduction. Its memory `own`, shape `(n,)`, with this rank's
        gradients of a weight, receives the result. `states` are those by bucket; empty before the
        first step."""
        work = self._works.get(op.bucket)
        if work is None:
            work = self._works[op.bucket] = self._start(op, own, weight, states, what)
        else:
            self._guarded(work, work.start_next)
        return work

    def _start(
        self, op: Op, own: Tensor, weight: float, states: Sequence[Any], what: str
    ) -> HookWork:
        bound = self._bound
        hook, spec = bound.hook, bound.specs[op.bucket]
        reference = self._scale.ranks if self._scale.scaling == "before" else 1.0
        collectives = Collectives(
            self._transport, self._program, op.axes, op.bucket, what, record_time=self._record_time
        )
        state = states[op.bucket] if states else hook.init(spec)
        spans = self.spans if self._record_time else None
        work = HookWork(collectives, op, own, what, spans)
        if self._is_stopped:
            work.replace(_zeros(work))
        else:
            bucket = Bucket(spec, own, reference, weight)
            self._guarded(work, lambda: work.start(lambda: hook.apply(state, bucket, collectives)))
        return work

    def reduce_sparse(
        self, op: Op, own: Tensor, weight: float, states: Sequence[Any], what: str
    ) -> Tensor:
        """Reduce a sparse bucket, once the dense ones are done; see `Hook.takes_sparse`.

        Args:
            op: the operation that gathers the bucket.
            own: this rank's gradient, coalesced.
            weight, states, what: as in `launch`.
        """
        for work in self._works.values():
            self.await_result(work)
        work = self._start(op, own, weight, states, what)

        def resolve() -> None:
            result, _ = self._resolve(work)
            if not (isinstance(result, Tensor) and result.is_sparse and result.shape == own.shape):
                raise HookError(
                    f"{what}: a hook must return a sparse tensor of shape {tuple(own.shape)} for a "
                    f"sparse bucket, got a {type(result).__name__}"
                )

        self._guarded(work, resolve)
        result: Tensor
        result, state = work.take()
        self._new_states[op.bucket] = state
        return result.coalesce()

    def await_result(self, work: HookWork) -> None:
        """Wait for a reduction and store its result; later calls do nothing."""
        if not work.settled:
            with torch.no_grad():
                self._settle(work)

    def discard(self, bucket: int) -> None:
        """Discard the new state of a bucket whose result is not used."""
        self._new_states.pop(bucket, None)

    # Sums

    def scale(self, weight: float) -> WeightScale:
        """As `Sums.scale`; raw hooks receive gradients unscaled."""
        return _raw_scale(1, weight) if self._is_raw else self._scale

    def repair_scale(self, weight: float) -> WeightScale:
        """As `Sums.repair_scale`; a raw hook has divided the results that repairs change."""
        return _raw_scale(self._transport.world_size, weight) if self._is_raw else self._scale

    def failure(self) -> tuple[Exception, str] | None:
        """Return the hook's failure and its place, for the control word. Waits for the results of
        reductions without further stages. Later failures are raised at once."""
        for work in self._works.values():
            if not (work.settled or work.pending):
                try:
                    self._guarded(work, partial(self._resolve, work))
                except BaseException as error:
                    locate(error, self._program, work.op, self._step)
                    work.collectives.release()
                    raise
        self._is_late = True
        return self._failure

    def is_regular(self, report: ControlReport) -> bool:
        """Return False: `problem` has to be checked."""
        return False

    def problem(self, report: ControlReport, *, allow_idle_ranks: bool) -> str | None:
        """Describe why the hook can't reduce with the weights of all ranks, or return None."""
        bound = self._bound
        total, ranks = report.total_weight, self._transport.world_size
        are_equal = report.total_squared * report.active == total * total
        if not bound.hook.raw:
            narrow = bound.hook.name if bound.hook.narrow else self._program.narrow
            return weight_problem(total / report.active, narrow)
        if not (are_equal and (allow_idle_ranks or report.active == ranks)):
            return (
                f"{bound.hook.name} divides by the number of ranks itself and needs equal weights "
                f"on all ranks; {report.active} of {ranks} ranks have a weight above 0, "
                f"{'the same' if are_equal else 'not the same'}; use a hook of fddp.hooks, or "
                f"equal weights"
            )
        return None

    def new_states(
        self, states: Sequence[Any], report: ControlReport, results: Sequence[Tensor | None]
    ) -> Sequence[Any]:
        """Return the states after the step; the old ones if a contribution was not finite."""
        if not states or report.nonfinite or not _are_finite(self._program, report.late, results):
            return states
        return tuple(self._new_states.get(bucket, state) for bucket, state in enumerate(states))

    def _settle(self, work: HookWork) -> None:
        op, averages, ranks = work.op, self._scale.scaling == "average", work.collectives.world_size
        is_scattered = op.kind == "reduce_scatter"
        own = work.own.view(ranks, -1)[work.collectives.rank] if is_scattered else work.own
        self._guarded(work, partial(self._resolve, work))
        result, state = work.take()
        if not isinstance(result, Tensor) or result.numel() != len(own):
            found = result.numel() if isinstance(result, Tensor) else type(result).__name__
            raise HookError(
                f"{work.what}: a hook must return as many elements as the "
                f"{'chunk' if is_scattered else 'buffer'} has, {len(own)}, got {found}"
            )
        own.copy_(result.view(own.shape))
        if averages and not self._is_raw:
            own /= ranks
        if self._failure is None:
            self._bound.learn(op.bucket, work.collectives.issued if work.is_declared else None)
        # An overflow would stay in the state; the result shows it on every rank that keeps it.
        checked = [own, *(flatten(state)[0] if is_scattered else ())]
        if not self._bound.stateful or all(map(_is_finite, checked)):
            self._new_states[op.bucket] = state

    def _resolve(self, work: HookWork) -> Any:
        if self._is_raw and not self._is_late:
            self._await_raw(work)
        found = work.resolve()
        if isinstance(found, tuple) and found and isinstance(found[0], Tensor):
            kind = wrapper_kind(found[0])
            if kind:
                raise HookError(
                    f"{work.what}: a hook must return a plain tensor, got a {kind}, whose memory "
                    f"does not hold its values"
                )
        return found

    def _await_raw(self, work: HookWork) -> None:
        """Wait for the future of a raw hook. Once the hook has failed on another rank, which may
        be missing in a collective of the hook's own group, take zeros in its place."""
        start_s = now_s = perf_counter()
        look_s = start_s + CHECK_INTERVAL_S
        while not work.done:
            if now_s > look_s:
                look_s = now_s + CHECK_INTERVAL_S
                if self._transport.step_failure(self._step) is not None:
                    self._is_stopped = True
                    work.replace(_zeros(work))
            sleep(min(max((now_s - start_s) / 8, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))
            now_s = perf_counter()
        note_wait(start_s, now_s)

    def _guarded(self, work: HookWork, call: Callable[[], object]) -> None:
        """Call a function of the hook. If it raises, let this rank take part in the other
        collectives of the reduction with zeros, so that the control word reports the failure."""
        try:
            with torch.no_grad():
                call()
        except Exception as error:
            is_hooks = isinstance(error, HookError) or not isinstance(error, FddpError)
            expected = self._bound.expected(work.op.bucket, work.collectives.issued)
            if expected is None or self._is_late or not (self._is_raw or is_hooks):
                raise
            if self._transport.closed_by:
                raise
            if self._failure is None:
                where = f"{self._bound.hook.name} on {work.what}: "
                if self._is_raw:  # others may wait in a collective of the hook's own group
                    where = f"(a collective of the hook's own group may stay unmatched) {where}"
                    self._transport.publish_step_failure(self._step, where + error_text(error))
                self._failure = error, where
            self._is_stopped = self._is_stopped or (self._is_raw and not work.is_started)
            zeros = _zeros(work).wait()
            work.replace(work.collectives.start_zeros(expected).map(lambda _: zeros))


def _zeros(work: HookWork) -> Future[tuple[Tensor, Any]]:
    """Result of a reduction that contributes nothing."""
    own = work.own
    if work.op.kind == "reduce_scatter":
        own = own[: len(own) // work.collectives.world_size]
    return Future.of((torch.zeros_like(own), ()))


def _raw_scale(divisor: int, weight: float) -> WeightScale:
    """Scale of this rank's gradients for a raw hook, which divides by the number of ranks.
    `divisor` is that number for late gradients, which are added to the divided result, and 1
    otherwise."""
    return WeightScale(divisor * (weight or 1.0))


def _are_finite(program: Program, late: Sequence[int], results: Sequence[Tensor | None]) -> bool:
    """Return True if the results with gradients that the control word does not cover are finite:
    those of sparse buckets, and of buckets with late gradients."""
    found = (
        results[leaf]
        for bucket in program.buckets
        if bucket.sparse or bucket.index in late
        for leaf in bucket.leaves
    )
    values = (r._values() if r.is_sparse else r for r in found if r is not None)
    return all(bool(torch.isfinite(value).all()) for value in values)


def _is_finite(value: Tensor | float) -> bool:
    return bool(torch.isfinite(torch.as_tensor(value)).all())


class StageWork:
    """A stage of a hook's reduction as the work of an instruction.

    Args:
        sums: the hook's sums.
        work: the reduction.
        is_last: True for the last stage, which stores the result.
    """

    def __init__(self, sums: HookSums, work: HookWork, *, is_last: bool) -> None:
        self.sums, self.work, self.is_last = sums, work, is_last

    @property
    def done(self) -> bool:
        """True if the next stage could start at once; after the last, if the result is there."""
        return self.work.done if self.is_last else self.work.ready

    @property
    def done_s(self) -> float | None:
        """Time at which the last collective finished, as `Work.done_s`."""
        return self.work.collectives.done_s

    @property
    def nbytes(self) -> int:
        """Bytes that this rank has passed to collectives."""
        return self.work.collectives.nbytes

    def end_range(self, range: CollectiveRange) -> None:
        """As `Work.end_range`. A stage may have several collectives: it ends with `wait`."""

    def wait(self, what: str) -> None:
        """Wait until the next stage could start; after the last, store the result."""
        if self.is_last:
            self.sums.await_result(self.work)
        else:
            self.work.wait_ready()
