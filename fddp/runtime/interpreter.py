"""Interpreter of schedules: one synchronisation on one rank.

A step is opened before the gradients exist. While backward runs, it executes the operations of its
schedule as far as buckets are ready: a bucket is packed and sent when it is full and all before it
have gone. From the end of backward on it runs to the end of the schedule.

[Note: a rank that fails]
A failure that only one rank can see (an exception in its loss function, a bad weight, a wrong
tree) must not leave the others waiting. The step notes the failure, contributes zeros from then
on, finishes the collectives, which are the same on all ranks in any case, and reports the failure
in the control word. Then all ranks exchange their failures and raise. No collective is left
half-done, so the group stays usable. Only two kinds of errors end a step at once: those of the
transport, and those of a hook whose collectives the other ranks do not know.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from time import perf_counter
from types import MappingProxyType
from typing import NoReturn

import torch
from torch import Tensor

from fddp.core.protocol.calls import Method
from fddp.core.protocol.control_word import ControlReport, decode
from fddp.core.protocol.readiness import Action
from fddp.core.schedule.op import Op
from fddp.core.schedule.schedule import summands
from fddp.errors import FddpError, InternalError
from fddp.native.layout import Stats
from fddp.runtime.failures import (
    desync_error,
    exchange_reports,
    incompatible_contributions_error,
    locate,
    peer_error,
)
from fddp.runtime.nonfinite import StopStepError
from fddp.runtime.program import Instruction
from fddp.runtime.state import HANDLERS, Outcome, StepContext, StepState

_IN_BACKWARD = frozenset({"pack", "all_reduce", "reduce_scatter", "all_gather"})


class Interpreter(StepState):
    """Executes one synchronisation; see the module docstring."""

    _waits_for_buckets_only = True  # after backward, all operations may run

    is_complete = False  # no further gradients and failures belong to the step
    _runs_freely = False  # no operation has to wait for gradients
    _is_irregular = False  # some operations are left out
    _repaired: Mapping[str, frozenset[int]] = MappingProxyType({})  # by `Op.when`, once known
    _broken: BaseException | None = None

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        self._instructions = self.program.usual
        if context.idle:
            self._is_irregular = True
        self._lock = threading.RLock()

    # Events

    def bucket_ready(self, bucket: int) -> None:
        """Note that all expected gradients of a bucket have arrived. Never raises: backward must
        run to its end."""
        with self._lock:  # as the states of buckets may have to be made
            state = self.buckets[bucket]
            state.ready_s = min(state.ready_s, perf_counter())
        if self._broken is not None:
            return  # other ranks would match the next collective with the failed one
        try:
            self._advance()
        except BaseException as error:
            locate(error, self.program, self.current, self.number)
            self._broken = self._broken or error

    def finish(self) -> Outcome:
        """Run the rest of the schedule after backward.

        Raises:
            BaseException: this rank's own failure, once the step's collectives are done.
            PeerError: another rank failed.
            WeightError: the total weight over ranks is zero.
            DesyncError: ranks are at different steps, or run different plans.
            NonFiniteError: a number is not finite, under the policy "raise".
            RankLostError, SyncTimeoutError: the transport failed.
        """
        self.backward_ended, self._runs_freely = True, self._waits_for_buckets_only
        if self._broken is not None:
            self._raise(self._broken)
        try:
            return self._run_to_end()
        except BaseException as error:
            locate(error, self.program, self.current, self.number)
            raise

    def _run_to_end(self) -> Outcome:
        now_s = perf_counter()
        for state in self.buckets:
            state.ready_s = min(state.ready_s, now_s)
        try:
            self._advance()
            if self.report is None and self._read_report(len(self.program.schedule.ops)):
                self._advance()
            report = self.report
            if report is None:
                raise InternalError("a step ended without a control word")
            if 0 in report.users or not self.program.is_plain:
                self.results.finish(report.used, self.contributions)
            if self._check is not None:
                self._check.check_results(self.transport, self.number)
        except StopStepError:
            return self._stopped()
        self._keep_hook_states(report)
        self._close()
        return Outcome(self.leaves, report, self.results.stats if self.record_time else None)

    def _close(self) -> None:
        """Release the buckets of a step whose collectives are done."""
        for state in self.buckets:
            state.release(self.pool)
        self.is_orderly = True
        if self.record_time:
            self.log.append((self.contributions.arrived(), Action("finish")))

    def _keep_hook_states(self, report: ControlReport) -> None:
        """Update `hook_states` after a step that succeeded."""

    def _advance(self) -> None:
        """Run operations until one has to wait for gradients."""
        with self._lock:
            while self.cursor < len(self._instructions):
                instruction = self._instructions[self.cursor]
                if not (self._runs_freely or self._may_run(instruction)):
                    return
                position, op, awaited, needs_report = instruction
                if needs_report and self.report is None and self._read_report(position):
                    continue  # with all operations, repairs included
                # Advanced first: a gradient that arrives meanwhile must not run this again.
                self.cursor += 1
                if self._is_irregular and not self._applies(position, op):
                    continue
                for dep, bucket in awaited:
                    if bucket >= 0 and dep in self.buckets[bucket].works:
                        self.current = self.program.schedule.ops[dep]
                        self.buckets[bucket].wait(self, dep)
                self.current = op
                if op.kind == "control":
                    self._send_control(position, op)
                else:
                    getattr(self.buckets[op.bucket], HANDLERS[op.kind])(self, position, op)

    def _may_run(self, instruction: Instruction) -> bool:
        op = instruction.op
        if self.is_complete:
            is_due = op.kind in _IN_BACKWARD or op.kind == "control"
        else:
            is_due = (
                op.kind in _IN_BACKWARD
                and op.bucket != self.program.schedule.sequence[-1]
                and self.buckets[op.bucket].ready_s < math.inf
            )
        if instruction.needs_report or not is_due:
            return False
        # Backward never blocks on a collective.
        for dep, bucket in instruction.awaited:
            if bucket >= 0 and not self.buckets[bucket].is_done(dep):
                return False
        return True

    def _applies(self, position: int, op: Op) -> bool:
        if op.when != "always":
            return op.bucket in self._repaired[op.when]
        if op.bucket not in self.context.idle or op.kind == "control":
            return True
        if position == self.program.schedule.piggyback_op:
            return True  # the control word travels alone
        return op.kind not in _IN_BACKWARD and op.bucket in self._repaired["late"]

    # Control word

    def _send_control(self, position: int, op: Op) -> None:
        """Write this rank's control word into its bucket's buffer, or send it by itself."""
        vector = torch.from_numpy(self.own_word())
        if op.bucket < 0:
            self.word = vector.to(self.transport.control_device)
            entry = self.recorder.launched(self.program.schedule, self.number, position)
            self.word_work = self.transport.all_reduce(self.word, wait_soon=True), entry
        elif op.bucket in self.context.idle:
            self.word = vector.to(self.devices[self.program.buckets[op.bucket].device])
        else:
            state = self.buckets[op.bucket]
            buffer = state.memory(self) if state.buffer is None else state.buffer
            self.word = buffer[state.program.padded_numel :]
            self.word.copy_(vector)
        if self.record_time:
            self.log.append((self.contributions.arrived(), Action("control")))

    def _read_report(self, position: int) -> bool:
        """Wait for the control word, and act on it. Return True if there are repairs: the cursor
        is then moved back to the first conditional operation, or to this one if it is earlier."""
        self._wait_for_word()
        if self.word is None:
            raise InternalError("the control word was read before it was written")
        self.report = report = decode(
            self.program.control,
            self.word.cpu().numpy(),
            fingerprint=self.fingerprint,
            world_size=summands(self.program.schedule),
        )
        if not self._is_regular(report):
            unfit = self._unfit_error(report)
            if not report.agreed or report.failed or unfit is not None:
                self._give_up(report, unfit)
            if self.applies_scale:
                self.after = self.context.scale.after(report.total_weight)
        self._on_report(report)
        late = again = frozenset(report.late)
        if self.program.rescaled:
            again |= self._rescaled(report)
        self._repaired = {"late": late, "again": again}
        if not again:
            return False
        self._is_irregular = True
        self._instructions = self.program.instructions
        self.cursor = min(position, self.program.first_conditional)
        return True

    def _wait_for_word(self) -> None:
        schedule = self.program.schedule
        if self.word_work is not None:
            (work, entry), self.word_work = self.word_work, None
            self.current = schedule.ops[schedule.control]
            entry.note_wait()
            work.wait(f"the control word of step {self.number}")
            entry.note_done()
        elif schedule.piggyback_op >= 0:
            self.current = schedule.ops[schedule.piggyback_op]
            self.buckets[self.current.bucket].wait(self, schedule.piggyback_op)

    def _is_regular(self, report: ControlReport) -> bool:
        """Return True if all ranks contribute with the agreed weights, and none has failed."""
        schedule = self.program.schedule
        return (
            report.agreed
            and not report.failed
            and report.active == summands(schedule)
            and report.total_weight == self.context.scale.reference
            and schedule.result != "replicated"
            and schedule.scaling != "after"
        )

    def _unfit_error(self, report: ControlReport) -> FddpError | None:
        return incompatible_contributions_error(
            report, self.program, self.context.scale, self.number, None
        )

    def _on_report(self, report: ControlReport) -> None:
        """Act on the control word of a step that no rank has failed."""
        if self._check is not None:
            self._check.on_report(report, self.context.scale, self.source)

    def _rescaled(self, report: ControlReport) -> frozenset[int]:
        """Buckets that are reduced again because their sums were scaled for other weights."""
        if self.context.scale.keeps_range(report.total_weight, report.active):
            return frozenset()
        return self.program.rescaled

    # Failures

    def _give_up(self, report: ControlReport, unfit: FddpError | None) -> NoReturn:
        """Raise on every rank, after all collectives in flight have finished."""
        self._wait_for_all()
        if unfit is not None and report.agreed and not report.failed:
            self.is_orderly = True
            raise unfit
        self.current = None
        method = self.method if self.contributions.weight > 0.0 else Method.NOTHING
        digest = self.program.schedule.shared_digest
        reports = exchange_reports(
            self.transport, self.context.moment, digest, method.text, self._failure_text
        )
        self.failures = [report.failure for report in reports]
        self.is_orderly = True
        if not report.agreed:
            raise desync_error(self.transport.rank, reports) from self.failure
        if self.failure is not None:
            self._raise(self.failure)
        raise peer_error(
            self.number, {rank: text for rank, text in enumerate(self.failures) if text}
        )

    def _wait_for_all(self) -> None:
        places = [(position, state) for state in self.buckets for position in state.works]
        for position, state in sorted(places, key=lambda place: place[0]):
            self.current = self.program.schedule.ops[position]
            state.wait(self, position)
        self._wait_for_word()

    def _raise(self, error: BaseException) -> NoReturn:
        """Raise an error without keeping a reference: its traceback refers to this frame, and the
        cycle would keep the step's tensors until the garbage collector runs."""
        self.failure = self._broken = None
        try:
            raise error
        finally:
            del error

    def _stopped(self) -> Outcome:
        """Return the outcome of a step that all ranks stopped because of a non-finite number, or
        raise its error under the policy "raise"."""
        self._wait_for_all()
        report = self.report
        if report is None or self._check is None:
            raise InternalError("a step was stopped before the control word was read")
        self.current = None
        self.failure = self._check.error(self.transport, self.number)
        self._close()
        if self.failure is not None:
            self._raise(self.failure)
        nothing: list[Tensor | None] = [None] * len(self.leaves)
        return Outcome(nothing, report, Stats(math.nan, False), skipped=True)


def send_last_bucket(step: Interpreter) -> None:
    """Send the last bucket with the control word after backward, before `Step.finish`.

    Never raises: `finish` does. A hooked step sends it in `finish`, because its control word has to
    report whether the hook fails.
    """
    if step.context.bound_hook is None:
        step.is_complete = True
        for bucket in range(len(step.buckets)):
            step.bucket_ready(bucket)
