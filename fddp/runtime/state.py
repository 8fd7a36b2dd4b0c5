"""State of one step on one rank: its constants, its buckets and its outcome.

A step runs the operations of its schedule through the methods of `BucketState`: `pack` fills the
buffer, `launch` starts a collective, `wait` blocks until it has finished, `unpack` turns the buffer
into results.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fddp.core.numerics.weighting import WeightScale
from fddp.core.protocol.calls import Method
from fddp.core.protocol.control_word import ControlReport, ControlWord, encode
from fddp.core.protocol.readiness import Action
from fddp.core.schedule.op import Op
from fddp.core.schedule.virtual import SumTree
from fddp.core.timeline import Interval
from fddp.errors import FddpError, InternalError, error_text
from fddp.native.buffer_pool import BufferPool
from fddp.native.flight_ring import FlightEntry
from fddp.native.layout import Stats
from fddp.native.pack import native_slices
from fddp.runtime.contributions import NOTHING, BackwardContributions, Contributions
from fddp.runtime.failures import pack_error
from fddp.runtime.finite_check import FiniteCheck
from fddp.runtime.hook_binding import BoundHook
from fddp.runtime.nonfinite import Policy
from fddp.runtime.program import BucketProgram, Program
from fddp.runtime.results import Devices, Results
from fddp.runtime.sparse import SparseForm, gather_sparse
from fddp.runtime.usual_program import UsualProgram
from fddp.telemetry.flight.recorder import Recorder
from fddp.transport.base import Transport, Work


class Outcome(NamedTuple):
    """Outcome of a step.

    Attributes:
        leaves: the synchronised gradients, by leaf; local ones for leaves that are not reduced.
        report: the control word summed over ranks.
        stats: squared norm and finiteness of the synchronised gradients; None unless requested.
        skipped: True if all ranks skipped the step because of a non-finite number; all leaves are
            then None.
    """

    leaves: list[Tensor | None]
    report: ControlReport
    stats: Stats | None
    skipped: bool = False


@dataclass(slots=True, eq=False)
class StepContext:
    """Constants of one step. Not a named tuple, whose fields are slow to read.

    Attributes:
        program: program to execute.
        transport: transport of the collectives.
        pool: memory for buckets.
        scale: the agreed unit of weight.
        step: number of the step.
        method: the call that opened it.
        with_stats: True to record times, norm and finiteness.
        recorder: flight recorder of the operations.
        bound_hook: the communication hook, if there is one.
        idle: buckets that are left out because no rank used them in the previous step; a gradient
            for one makes it late. The same on all ranks.
        nonfinite: policy for non-finite numbers.
        when: suffix of `moment` that callers may set; the same on all ranks.
        usual: program for the compiled interpreter; None if the step is not usual.
    """

    program: Program
    transport: Transport
    pool: BufferPool
    scale: WeightScale
    step: int
    method: Method
    with_stats: bool
    recorder: Recorder
    bound_hook: BoundHook | None = None
    idle: frozenset[int] = frozenset()
    nonfinite: Policy = "propagate"
    when: str = ""
    usual: UsualProgram | None = None

    @property
    def moment(self) -> str:
        """Text that identifies the step; the same on all ranks in step."""
        return f"{self.step}{self.when}"


class StepState:
    """State of one synchronisation, which its buckets share.

    Attributes:
        number: number of the synchronisation.
        method: the call, which must be the same on all ranks that contribute.
        contributions: gradients and weight of this rank; none until `begin`.
        source: contributions to pack; none on a rank that has failed.
        has_next: True if this rank has input for another step.
        hook_states: state of the communication hook by bucket, replaced by the new state once the
            step has succeeded; () if the hook is stateless.
        allow_idle_ranks: True to let ranks of weight 0 contribute zeros under a hook that divides
            by the number of ranks; the same on all ranks that have input.
        failure: error of this rank.
        is_orderly: True once the step has ended, in success or failure, with all collectives done.
        report: the control word summed over ranks, once it was read.
        failures: error text of each rank, once they were exchanged; "" for ranks without one.
        cursor: number of the next operation to run, among those of the interpreter.
        current: the operation under way.
        word: this rank's control word, or the sum.
        word_work: collective of a control word that is sent by itself.
        is_finite, may_overflow: see `ControlWord`.
        measures: True to check results as they are unpacked.
        record_time: True to record times, norm and finiteness.
        fingerprint: number that is equal on ranks in the same step of the same plan.
        opened_s: time at which the step was opened, on the clock of `time.perf_counter`.
        hook_spans: times at which the hook ran or waited, with `record_time` only.
    """

    # Defaults of attributes that most steps never set.
    source: Contributions = NOTHING
    #: makes the contributions of a backward pass
    backward_contributions: ClassVar[Callable[..., BackwardContributions]] = BackwardContributions
    contributions: Contributions = NOTHING
    has_next = True
    hook_states: Sequence[Any] = ()
    allow_idle_ranks = False
    failure: BaseException | None = None
    failures: Sequence[str] = ()
    is_orderly = False
    backward_ended = False
    report: ControlReport | None = None
    after = 1.0
    word: Tensor | None = None
    hook_spans: Sequence[Interval] = ()
    _begun_s = math.nan
    measures = False
    is_finite = True
    may_overflow = False
    cursor = 0
    current: Op | None = None
    word_work: tuple[Work, FlightEntry] | None = None
    _failure_text = ""
    _check: FiniteCheck | None = None  # None if non-finite numbers are propagated

    def __init__(self, context: StepContext) -> None:
        program = context.program
        self.context = context
        self.program, self.transport, self.pool = program, context.transport, context.pool
        self.recorder, self.number, self.method = context.recorder, context.step, context.method
        self.record_time, self.scale = context.with_stats, context.scale
        self.devices = Devices()
        self.opened_s = perf_counter()
        moment = f"{program.schedule.shared_digest}:{context.step}{context.when}"
        self.fingerprint = zlib.crc32(moment.encode())  # equal on ranks in the same step
        if context.with_stats:
            self.measures = True
        if context.nonfinite != "propagate":
            hook = None if context.bound_hook is None else context.bound_hook.hook
            self.measures = True
            self._check = FiniteCheck(context.nonfinite, program, self.results, hook, self.recorder)

    # Made when they are needed, which they are not in a usual step.

    @cached_property
    def buckets(self) -> Sequence[BucketState]:
        """State of each bucket."""
        return [*map(BucketState, self.program.buckets)]

    @cached_property
    def averages(self) -> bool:
        """True if the collectives divide their sums."""
        return self.program.schedule.scaling == "average"

    @cached_property
    def applies_scale(self) -> bool:
        """True if results are multiplied by a factor that depends on the weights."""
        return self.program.schedule.result != "replicated"

    @cached_property
    def leaves(self) -> list[Tensor | None]:
        """Results by leaf, None at first."""
        return [None] * len(self.program.plan.leaves)

    @cached_property
    def log(self) -> list[tuple[int, Action]]:
        """Actions, each with the number of gradients that had arrived; empty unless
        `record_time`."""
        return []

    @cached_property
    def results(self) -> Results:
        """Results that are not plain views of their buffers."""
        return Results(self.program, self.leaves, self.devices, self.pool, measure=self.record_time)

    @property
    def phase(self) -> str:
        """Phase of the step, for error texts of other ranks."""
        if self.is_orderly:
            return "between steps"
        return "after backward" if self.backward_ended else "in forward"

    def begin(self, contributions: Contributions, leaves: Sequence[Tensor | None]) -> None:
        """Set this rank's contributions; `leaves` determine the devices of the buckets."""
        self._begun_s = perf_counter()
        self.contributions = contributions
        if self.failure is None:
            self.source = contributions
        if self.context.nonfinite == "raise":
            contributions.retain_sources()
        for bucket in self.program.buckets:
            if bucket.device not in self.devices:
                leaf = leaves[bucket.leaves[0]]
                if leaf is not None:
                    self.devices[bucket.device] = leaf.device

    def ready_times_s(self) -> dict[int, float]:
        """Time of the last gradient of each differentiable leaf, on the clock of
        `time.perf_counter`; NaN for leaves without gradient."""
        leaves = self.program.differentiated
        times_s = self.contributions.ready_times_s() or [self._begun_s] * len(leaves)
        return dict(zip(leaves, times_s, strict=True))

    def fail(self, error: BaseException) -> None:
        """Fail the step on this rank; see [Note: a rank that fails]."""
        if self.failure is not None:
            return
        self.failure, self.source = error, NOTHING
        self._failure_text = error_text(error)
        if isinstance(error, FddpError):
            rank = self.transport.rank
            error.args = (f"rank {rank} at step {self.number}: {error}", *error.args[1:])

    def own_word(self) -> npt.NDArray[np.floating[Any]]:
        """This rank's control word."""
        layout, source = self.program.control, self.source
        # Rank 0's order of gradients is that of the rebuilt plan.
        has_order = layout.with_order and self.transport.rank == 0 and not self.failure
        word = ControlWord(
            fingerprint=self.fingerprint,
            method=self.method,
            weight=source.weight,
            used=source.used(self.program),
            late=source.late(self.program),
            has_next=self.has_next,
            nonfinite=not self.is_finite,
            may_overflow=self.may_overflow,
            failed=self.failure is not None,
            order=tuple(self.contributions.order(self.program)) if has_order else (),
        )
        return encode(layout, word)

    # For buckets

    def buffer_of(self, bucket: int) -> Tensor:
        """Buffer of a dense bucket."""
        state = self.buckets[bucket]
        return state.memory(self) if state.buffer is None else state.buffer

    def new_memory(self, bucket: BucketProgram) -> Tensor:
        """Take memory for a bucket from the pool. For lack of memory, fail the step on this rank,
        or raise if it is too late to report the error in the control word."""
        if self.source.aliases_buffer is not None:
            buffer = self.source.aliased_memory(bucket.index, self.pool)
            if buffer is not None:
                return buffer
        device = self.devices[bucket.device]
        spec = bucket.index, bucket.buffer_numel, bucket.wire_dtype, device
        try:
            return self.pool.acquire(*spec)
        except (RuntimeError, MemoryError) as error:
            if self.report is not None:
                raise
            # This rank finishes the step with zeros, in the memory freed here.
            self.fail(error)
            self.pool.clear()
            return self.pool.acquire(*spec)

    def note_magnitude(self, bucket: BucketProgram, buffer: Tensor, peak: float, op: Op) -> None:
        """Note a packed bucket with large, non-finite or unknown numbers. `peak` is a bound on the
        magnitudes; NaN if unknown."""
        again = op.when == "again"
        if again and (self.report is None or bucket.index not in self.report.late):
            return  # noted when it was packed first
        self.is_finite = self.is_finite and not math.isinf(peak)
        self.may_overflow = True
        if self._check is not None:
            finite = not math.isinf(peak)
            self._check.packed(bucket, buffer, self.source, finite=finite, again=again)

    def note_sparse(self, leaf: int, sources: list[Tensor | None]) -> None:
        """Check this rank's gradients of a sparse leaf, after their sum."""
        if self._check is not None:
            self._check.gathered(leaf, sources)

    def log_packed(self, op: Op) -> None:
        """Add a packed bucket to the step's trace."""
        if op.when != "always":
            self.log.append((self.contributions.arrived(), Action("repair", op.bucket)))
        elif op.region.start == 0:
            self.log.append((self.contributions.arrived(), Action("launch", op.bucket)))

    def pack_scale(self, bucket: BucketProgram, *, repairs: bool) -> WeightScale:
        """Scale of gradients that are packed after the control word was read: the agreed one, or
        one that fits for a bucket that is reduced again. `repairs` is True if the packed gradients
        are reduced after a first reduction of the bucket."""
        report, scale = self.report, self.context.scale
        if report is None or not bucket.rescaled:
            return scale
        if scale.keeps_range(report.total_weight, report.active):
            return scale
        return scale.fitting(report.total_weight, report.active)

    def result_factor(self, bucket: BucketProgram) -> float:
        """Factor on a bucket that may have been reduced twice."""
        if self.report is None or not self.applies_scale:
            return 1.0
        return self.pack_scale(bucket, repairs=False).after(self.report.total_weight)


class BucketState:
    """A bucket that is reduced by the collectives of its schedule.

    Attributes:
        program: constants of the bucket.
        buffer: memory of the bucket; None until it is needed, and in a step without the bucket.
        repair: memory of the late gradients; None if there are none.
        ready_s: time at which all expected gradients had arrived, on the clock of
            `time.perf_counter`; infinite before.
        launch_s: time at which the first collective was started; NaN before.
        work: the collective that was started last.
        works: collectives in flight, by position in the schedule.
    """

    __slots__ = ("buffer", "launch_s", "program", "ready_s", "repair", "work", "works")

    def __init__(self, program: BucketProgram) -> None:
        self.program = program
        self.buffer: Tensor | None = None
        self.repair: Tensor | None = None
        self.ready_s = math.inf
        self.launch_s = math.nan
        self.work: Work | None = None
        self.works: dict[int, tuple[Any, FlightEntry]] = {}

    # Memory

    def memory(self, step: StepState) -> Tensor:
        """Buffer of the bucket, taken from the pool at the first call."""
        if self.buffer is None:
            self.buffer = step.new_memory(self.program)
        return self.buffer

    def release(self, pool: BufferPool) -> None:
        """Return the buffers to the pool, which reuses them once no result uses them."""
        if self.repair is not None:
            pool.release(self.program.index, self.repair)
        if self.buffer is not None:
            pool.release(self.program.index, self.buffer)

    # Operations

    def pack(self, step: StepState, position: int, op: Op) -> None:
        """Write this rank's contribution into the buffer, with zeros for missing gradients."""
        bucket = self.program
        if op.region.buffer == "repair":
            buffer = self.repair = step.pool.acquire(
                bucket.index, bucket.buffer_numel, bucket.wire_dtype, step.devices[bucket.device]
            )
        else:
            buffer = self.memory(step) if self.buffer is None else self.buffer
        if bucket.numel < bucket.padded_numel:
            buffer[bucket.numel : bucket.padded_numel].zero_()
        try:
            peak = self._write(step, step.source, buffer, position, op)
            if not peak <= bucket.max_safe_magnitude:
                step.note_magnitude(bucket, buffer, peak, op)
        except Exception as error:
            if step.report is not None:
                raise  # too late to report it in the control word
            self.fail_pack(step, position, op, error)
        if step.record_time:
            step.log_packed(op)

    def fail_pack(self, step: StepState, position: int, op: Op, error: Exception) -> None:
        """Fail the step because of an error while its gradients were packed, and pack zeros."""
        bucket, buffer = self.program, self.memory(step)
        step.fail(pack_error(step.program, bucket.index, buffer, step.source, error))
        self._write(step, NOTHING, buffer, position, op)

    def _write(
        self, step: StepState, source: Contributions, buffer: Tensor, position: int, op: Op
    ) -> float:
        bucket = self.program
        chunk = step.program.shards.chunks.get(position)
        if chunk is not None:
            return source.pack_chunk_(chunk, buffer)
        scale = step.scale
        if step.report is not None:
            scale = step.pack_scale(bucket, repairs=op.when != "always")
        if op.when == "late":
            return source.pack_late_(bucket.index, buffer, bucket.layout, scale)
        return source.pack_(bucket.index, buffer, bucket.layout, scale)

    def launch(self, step: StepState, position: int, op: Op) -> None:
        """Start a collective on the buffer, including a piggybacked control word."""
        entry = step.recorder.launched(step.program.schedule, step.number, position)
        if op.when == "always" and self.launch_s != self.launch_s:
            self.launch_s = entry.launched_s
        own = self.operand(step, position, op)
        transport, wait_soon = step.transport, step.backward_ended
        if op.kind == "all_reduce":
            work = transport.all_reduce(
                own,
                axes=op.axes,
                average=step.averages,
                record_time=step.record_time,
                wait_soon=wait_soon,
            )
        elif op.kind == "reduce_scatter":
            work = transport.reduce_scatter(
                own,
                axes=op.axes,
                average=step.averages,
                ordered=self.order(step, position),
                record_time=step.record_time,
                wait_soon=wait_soon,
            )
        else:
            work = transport.all_gather_in_place(
                own,
                axes=op.axes,
                record_time=step.record_time,
                wait_soon=wait_soon,
            )
        self.work = work
        self.works[position] = work, entry

    def order(self, step: StepState, position: int) -> bool | SumTree:
        """Association of sums, as in `Transport.reduce_scatter`."""
        return step.program.schedule.deterministic

    def operand(self, step: StepState, position: int, op: Op) -> Tensor:
        """Tensor to reduce, including a piggybacked control word."""
        if position != step.program.schedule.piggyback_op:
            start, stop = step.program.extents[position]
            memory = self.repair if op.region.buffer == "repair" else self.buffer
            if memory is None:
                raise InternalError(f"{op.kind} of bucket {op.bucket} before it was packed")
            return memory[start:stop]
        if self.buffer is not None:
            return self.buffer[op.region.start :]
        if step.word is None:
            raise InternalError("the control word was sent before it was written")
        return step.word  # the bucket is left out, and the word travels alone

    def is_done(self, position: int) -> bool:
        """Return True if the collective at a position, if there is one, has finished."""
        pending = self.works.get(position)
        return pending is None or pending[0].done

    def wait(self, step: StepState, position: int) -> None:
        """Block until the collective at a position has finished; a second call does nothing."""
        pending = self.works.pop(position, None)
        if pending is None:
            return
        work, entry = pending
        entry.note_wait()
        work.wait(f"{self.program.text} of step {step.number}")
        entry.note_done()

    def add_repair(self, step: StepState, position: int, op: Op) -> None:
        """Add the reduced late gradients to the reduced bucket."""
        if self.buffer is None:  # the bucket was left out
            self.memory(step).zero_()
        if self.buffer is None or self.repair is None:
            raise InternalError(f"the repair of bucket {op.bucket} was added before it was packed")
        start, stop = step.program.extents[position]
        self.buffer[start:stop].add_(self.repair[start:stop])

    def gather(self, step: StepState, position: int, op: Op) -> None:
        """Sum the sparse gradients of all ranks."""
        report = step.report
        if report is None:
            raise InternalError("sparse gradients were gathered before the control word was read")
        (leaf,) = self.program.leaves
        form = SparseForm(
            step.program.plan.leaves[leaf],
            step.program.schedule.wire_dtypes[op.bucket],
            step.devices[self.program.device],
        )
        parts = [
            (part.sources[0], part.weight / report.total_weight)
            for part in step.source.parts(op.bucket)
        ]
        entry = step.recorder.launched(step.program.schedule, step.number, position)
        entry.note_wait()
        what = f"{self.program.text} of step {step.number}"
        gathered = self.gathered(step, form, parts, what)
        entry.note_done()
        step.results.put_sparse(leaf, gathered)
        step.note_sparse(leaf, [source for source, _ in parts])

    def gathered(
        self,
        step: StepState,
        form: SparseForm,
        parts: Sequence[tuple[Tensor | None, float]],
        what: str,
    ) -> Tensor:
        """Sum of the sparse gradients of all ranks, of which `parts` are this rank's and their
        factors."""
        own = form.summed([(source, factor) for source, factor in parts if source is not None])
        return gather_sparse(form, [own], step.transport, what)

    def unpack(self, step: StepState, position: int, op: Op) -> None:
        """Turn the reduced buffer into results; views of it if no cast or factor is needed."""
        bucket = self.program
        if bucket.sparse:
            return  # gathered in its final form
        buffer = self.memory(step) if self.buffer is None else self.buffer
        after = step.result_factor(bucket) if bucket.rescaled else step.after
        if bucket.is_plain and after == 1.0 and not step.measures:
            for leaf, result in zip(
                bucket.leaves, native_slices()(buffer, bucket.layout.native), strict=True
            ):
                step.leaves[leaf] = result
        else:
            step.results.unpack(position, bucket.index, buffer, after)


HANDLERS: Mapping[str, str] = {
    "pack": "pack",
    "all_reduce": "launch",
    "reduce_scatter": "launch",
    "all_gather": "launch",
    "add": "add_repair",
    "gather": "gather",
    "unpack": "unpack",
}
"""Method of `BucketState` that runs each kind of operation."""
