"""One synchronisation on one rank: in the compiled interpreter while it is usual, else in Python.

See [Note: usual steps] in csrc/step/usual_step.h. `Interpreter` is the reference, and continues
every step that turns out to be unusual.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fddp.core.protocol.control_word import ControlReport
from fddp.core.protocol.expected_counts import Arrivals
from fddp.native.autograd_leaves import GradientCounter, GraphInfo
from fddp.native.usual_step import UsualStep
from fddp.runtime.contributions import BackwardContributions
from fddp.runtime.interpreter import Interpreter
from fddp.runtime.state import Outcome, StepState
from fddp.telemetry.waits import note_wait
from fddp.transport.base import Work

_CPU = torch.device("cpu")


@dataclass(slots=True, eq=False)
class UsualRun:
    """A step in the compiled interpreter.

    Attributes:
        native: the step.
        buffers: memory of the buckets.
        report: report that it has if it remains usual.
        adopt: see `UsualProgram`.
    """

    native: UsualStep
    buffers: list[Tensor]
    report: ControlReport
    adopt: Callable[[Any], Work]

    @classmethod
    def of(cls, step: StepState) -> UsualRun | None:
        """Begin a step, whose contributions are set; None if it is not usual."""
        usual, weight = step.context.usual, step.contributions.weight
        if usual is None or weight != step.scale.unit or not step.has_next:
            return None
        source = step.contributions.usual_source()
        if source is None:
            return None
        for device in step.devices.values():
            if device != _CPU:
                return None
        word, program, recorder = usual.words[step.method, weight], step.program, step.recorder
        buffers = [*map(step.new_memory, program.buckets)]
        if step.failure is not None:  # for lack of memory
            _set_buffers(step, buffers)
            return None
        native = usual.setup.begin(
            (step.number, step.fingerprint, recorder.number_of(program.schedule)),
            recorder.ring,
            buffers,
            word.vector,
            source,
            weakref.ref(step),  # the hooks of gradients must not keep the step alive
        )
        if native is None:
            _set_buffers(step, buffers)
            return None
        return cls(native, buffers, word.report, usual.adopt)

    def hand_over(self, step: StepState) -> None:
        """Set the state from which the interpreter in Python continues.

        Raises:
            BaseException: the error of a collective.
        """
        state, program = self.native.take_over(), step.program
        self.note_waits()
        step.cursor, step.word = state.cursor, state.word
        step.is_finite, step.may_overflow = state.is_finite, state.may_overflow
        now_s = perf_counter()
        _set_buffers(step, self.buffers)
        for bucket, is_ready in zip(step.buckets, state.ready, strict=True):
            bucket.ready_s = min(bucket.ready_s, now_s if is_ready else math.inf)
        for position, number, handle, record in state.take_in_flight():
            pending = self.adopt(handle), step.recorder.ring.entry(record)
            if number < 0:
                step.word_work = pending
            else:
                step.buckets[number].works[position] = pending
        ops = program.schedule.ops
        for position in state.unpacked:
            step.buckets[ops[position].bucket].unpack(step, position, ops[position])
        if state.failed_op < 0:
            return
        op = step.current = ops[state.failed_op]
        try:
            state.raise_error()
        except Exception as error:
            if op.kind != "pack":
                raise
            step.buckets[op.bucket].fail_pack(step, state.failed_op, op, error)

    def note_waits(self) -> None:
        """Record the times at which this rank waited."""
        for start_s, end_s in self.native.waits:
            note_wait(start_s, end_s)


class Step(Interpreter):
    """One synchronisation. The compiled interpreter runs it as long as it is usual."""

    _usual: UsualRun | None = None
    _has_begun = False

    def arm(self, leaf_set: GradientCounter, view: GraphInfo, previous: Arrivals | None) -> None:
        """Prepare for a backward pass, whose contributions `begin` has set.

        Args:
            leaf_set: leaves of the call, one for each of `program.differentiated`.
            view: inspection of the graph.
            previous: arrivals of the previous step.
        """
        contributions = self.contributions
        assert isinstance(contributions, BackwardContributions)
        contributions.leaf_set = leaf_set
        usual = self._begin_usual()
        on_bucket = self.bucket_ready if usual is None else usual.native
        contributions.arm(view, previous, self.buffer_of, self.scale, on_bucket)

    def buffer_of(self, bucket: int) -> Tensor:
        """Buffer of a dense bucket."""
        run = self._usual
        return super().buffer_of(bucket) if run is None else run.buffers[bucket]

    def start(self) -> None:
        """Start the collectives of a step whose contributions are complete; `finish` waits for
        them. Further calls start those that had to wait for others. Never raises: `finish` does."""
        self._has_begun = self.is_complete = True
        for bucket in range(len(self.buckets)):
            self.bucket_ready(bucket)

    def raise_failure(self) -> None:
        """Raise the error of this rank, if it has one, without communication."""
        if self.failure is not None:
            self._raise(self.failure)

    def _begin_usual(self) -> UsualRun | None:
        self._has_begun = True
        if self.context.usual is not None and self.failure is None:
            self._usual = UsualRun.of(self)
        return self._usual

    def _run_to_end(self) -> Outcome:
        run = self._usual if self._has_begun else self._begin_usual()
        if run is None or self.failure is not None or not run.native.finish():
            return super()._run_to_end()
        self._usual = None
        run.note_waits()
        self.report, self.leaves = run.report, run.native.results()
        program = self.program
        last = program.buckets[program.schedule.sequence[-1]].text
        self.transport.note_finished(f"{last} of step {self.number}")
        for bucket, buffer in enumerate(run.buffers):
            self.pool.release(bucket, buffer)
        self.is_orderly = True
        return Outcome(self.leaves, self.report, None)

    def _advance(self) -> None:
        # Gradients may arrive on several threads, and none may continue before the state is set.
        with self._lock:
            run, self._usual = self._usual, None
            if run is not None:
                run.hand_over(self)
            super()._advance()


def _set_buffers(step: StepState, buffers: list[Tensor]) -> None:
    for bucket, buffer in zip(step.buckets, buffers, strict=True):
        bucket.buffer = buffer
