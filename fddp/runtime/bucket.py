"""One bucket in one step: its buffer, its collectives and its times.

A step runs the operations of its schedule through these methods: `pack` fills the buffer, `launch`
starts a collective, `wait` blocks until it has finished, `unpack` turns the buffer into results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol

from torch import Tensor

from fddp.core.numerics.weighting import WeightScale
from fddp.core.protocol.control_word import ControlReport
from fddp.core.schedule.op import Op
from fddp.errors import InternalError
from fddp.native.buffer_pool import BufferPool
from fddp.native.pack import native_slices
from fddp.runtime.contributions import NOTHING, Contributions
from fddp.runtime.failures import pack_error
from fddp.runtime.program import BucketProgram, Program
from fddp.runtime.results import Devices, Results
from fddp.runtime.sparse import gather_sparse
from fddp.telemetry.flight.recorder import Entry, Recorder
from fddp.transport.base import Transport, Work


class RunningStep(Protocol):
    """Attributes of a step that its buckets use; see `StepState`."""

    program: Program
    transport: Transport
    pool: BufferPool
    recorder: Recorder
    leaves: list[Tensor | None]
    measures: bool
    devices: Devices
    number: int
    record_time: bool
    source: Contributions
    scale: WeightScale
    report: ControlReport | None
    after: float
    averages: bool
    word: Tensor | None
    hook_states: Sequence[Any]
    backward_ended: bool

    @property
    def results(self) -> Results: ...

    def pack_scale(self, bucket: BucketProgram, op: Op) -> WeightScale: ...

    def result_factor(self, bucket: BucketProgram) -> float: ...

    def note_magnitude(
        self, bucket: BucketProgram, buffer: Tensor, peak: float, op: Op
    ) -> None: ...

    def recover_memory(self, error: BaseException) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    def note_sparse(self, leaf: int, sources: list[Tensor | None]) -> None: ...

    def log_packed(self, op: Op) -> None: ...


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
        self.works: dict[int, tuple[Any, Entry]] = {}

    # Memory

    def memory(self, step: RunningStep) -> Tensor:
        """Buffer of the bucket, taken from the pool at the first call."""
        if self.buffer is not None:
            return self.buffer
        bucket, device = self.program, step.devices[self.program.device]
        if step.source.aliases_buffer is not None:
            self.buffer = step.source.aliased_memory(bucket.index, step.pool)
            if self.buffer is not None:
                return self.buffer
        spec = bucket.index, bucket.buffer_numel, bucket.wire_dtype, device
        try:
            self.buffer = step.pool.acquire(*spec)
        except (RuntimeError, MemoryError) as error:
            # This rank finishes the step with zeros, in memory freed by the call.
            step.recover_memory(error)
            self.buffer = step.pool.acquire(*spec)
        return self.buffer

    def release(self, pool: BufferPool) -> None:
        """Return the buffers to the pool, which reuses them once no result uses them."""
        if self.repair is not None:
            pool.release(self.program.index, self.repair)
        if self.buffer is not None:
            pool.release(self.program.index, self.buffer)

    # Operations

    def pack(self, step: RunningStep, position: int, op: Op) -> None:
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
            step.fail(pack_error(step.program, bucket.index, buffer, step.source, error))
            self._write(step, NOTHING, buffer, position, op)
        if step.record_time:
            step.log_packed(op)

    def _write(
        self, step: RunningStep, source: Contributions, buffer: Tensor, position: int, op: Op
    ) -> float:
        bucket = self.program
        chunk = step.program.shards.chunks.get(position)
        if chunk is not None:
            return source.pack_chunk_(chunk, buffer)
        scale = step.scale if step.report is None else step.pack_scale(bucket, op)
        if op.when == "late":
            return source.pack_late_(bucket.index, buffer, bucket.layout, scale)
        return source.pack_(bucket.index, buffer, bucket.layout, scale)

    def launch(self, step: RunningStep, position: int, op: Op) -> None:
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
                ordered=step.program.schedule.deterministic,
                record_time=step.record_time,
                wait_soon=wait_soon,
            )
        else:
            work = transport.all_gather_in_place(
                own, axes=op.axes, record_time=step.record_time, wait_soon=wait_soon
            )
        self.work = work
        self.works[position] = work, entry

    def operand(self, step: RunningStep, position: int, op: Op) -> Tensor:
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

    def wait(self, step: RunningStep, position: int) -> None:
        """Block until the collective at a position has finished; a second call does nothing."""
        pending = self.works.pop(position, None)
        if pending is None:
            return
        work, entry = pending
        entry.waited_s = perf_counter()
        work.wait(f"{self.program.text} of step {step.number}")
        entry.done_s = perf_counter()

    def add_repair(self, step: RunningStep, position: int, op: Op) -> None:
        """Add the reduced late gradients to the reduced bucket."""
        if self.buffer is None:  # the bucket was left out
            self.memory(step).zero_()
        if self.buffer is None or self.repair is None:
            raise InternalError(f"the repair of bucket {op.bucket} was added before it was packed")
        start, stop = step.program.extents[position]
        self.buffer[start:stop].add_(self.repair[start:stop])

    def gather(self, step: RunningStep, position: int, op: Op) -> None:
        """Sum the sparse gradients of all ranks."""
        report = step.report
        if report is None:
            raise InternalError("sparse gradients were gathered before the control word was read")
        (leaf,) = self.program.leaves
        spec = step.program.plan.leaves[leaf]
        parts = [
            (part.sources[0], part.weight / report.total_weight)
            for part in step.source.parts(op.bucket)
        ]
        entry = step.recorder.launched(step.program.schedule, step.number, position)
        entry.waited_s = entry.launched_s
        gathered = gather_sparse(
            spec,
            step.program.schedule.wire_dtypes[op.bucket],
            step.devices[self.program.device],
            [(source, factor) for source, factor in parts if source is not None],
            step.transport,
            f"{self.program.text} of step {step.number}",
        )
        entry.done_s = perf_counter()
        step.results.put_sparse(leaf, gathered)
        step.note_sparse(leaf, [source for source, _ in parts])

    def unpack(self, step: RunningStep, position: int, op: Op) -> None:
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
