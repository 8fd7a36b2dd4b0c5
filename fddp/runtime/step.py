"""One synchronisation on one rank: carries a schedule out, operation by operation.

A session is opened before the gradients exist and walks through the schedule's operations as far
as readiness allows: a bucket is packed and sent when it is full and all before it have gone. From
the end of backward on it runs to the end of the schedule.

[Note: a rank that fails]
What one rank alone can see (an exception in its loss function, a bad weight, a wrong tree) must not
leave the others waiting. The session notes the failure, contributes zeros from then on, finishes
the collectives that are the same on all ranks whatever happened, and tells through the control
word. Then all ranks exchange what went wrong and raise; no collective is left half done, so the
group stays usable. Only an error of the transport itself ends a session at once, or one of a hook,
whose collectives nobody else knows.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from fddp.core.numerics.weighting import WeightScale
from fddp.core.protocol.calls import Method
from fddp.core.protocol.control_word import ControlReport, ControlWord, decode, encode
from fddp.core.protocol.readiness import Action
from fddp.core.schedule.op import Op, is_piggybacked
from fddp.core.schedule.schedule import RETAINED_DTYPES
from fddp.core.timeline import Interval
from fddp.errors import FddpError, InternalError, error_text
from fddp.native.layout import Stats
from fddp.runtime.context import Outcome, Setting
from fddp.runtime.contributions import NOTHING, Contributions
from fddp.runtime.failures import (
    desync_error,
    exchange,
    incompatible_contributions_error,
    locate,
    pack_error,
    peer_error,
)
from fddp.runtime.finite_check import Judge
from fddp.runtime.hook_pipeline import HookedWork
from fddp.runtime.hook_step import HookedStep
from fddp.runtime.memory import StepMemory
from fddp.runtime.nonfinite import StopStepError
from fddp.runtime.results import Results
from fddp.runtime.sparse import gather_sparse
from fddp.telemetry.flight.recorder import StepEntries
from fddp.transport.base import Work

_BACKWARD = frozenset({"pack", "all_reduce", "reduce_scatter", "all_gather"})


@dataclass
class Session:
    """Runs one synchronisation; see the module's text.

    Attributes:
        setting: what does not change during the session.
        contributions: what this rank brings; nothing until it is set.
        has_next: whether this rank has input for another step.
        hook_states: the communication hook's state by bucket, before the step and, once it went
            through, after it; empty where the hook keeps none.
        lets_rest: whether a hook that divides by the number of ranks itself may meet ranks of
            weight 0, which then count as zeros; the same on all ranks that have input.
        failure: what went wrong on this rank.
        opened_s: when it was opened, on the clock of `time.perf_counter`; NaN where no times are
            wanted.
        method: the call, which ranks that bring something have in common.
        orderly: whether the step ended, well or not, with all collectives done.
        report: what the control word said, once it is in.
        log: what was done, each with the number of gradients that had arrived by then.
        buckets: how far each bucket is.
        told: what went wrong on each rank, once they have exchanged it; empty where nothing did.
    """

    setting: Setting
    contributions: Contributions = NOTHING
    has_next: bool = True
    hook_states: Sequence[Any] = ()
    lets_rest: bool = False
    failure: BaseException | None = None
    orderly: bool = False
    report: ControlReport | None = None
    log: list[tuple[int, Action]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._program = self.setting.program
        self._ops = self._program.schedule.ops
        self.method = self.setting.method
        self.opened_s = time.perf_counter() if self.setting.with_stats else math.nan
        self._begun_s = math.nan
        self._cursor = 0
        self._ended = False
        self._lock = threading.RLock()
        self._memory = StepMemory(self.setting)
        self.buckets = self._memory.buckets
        self._works: dict[int, Work | HookedWork] = {}
        self._notes = StepEntries(self.setting.recorder, self._program.schedule, self.setting.step)
        self._awaited: set[int] = set()  # operations that need no more waiting for
        self._at: Op | None = None  # the operation under way; None for what is in no schedule
        self._broken: BaseException | None = None
        self._carrier = self._program.schedule.piggyback_op
        self._results = Results(
            self._program, self.setting.with_stats, self._memory.devices, self.setting.pool
        )
        attached = self.setting.attached
        self._judge = Judge(
            self.setting.nonfinite,
            self._program,
            self._results,
            None if attached is None else attached.hook,
            self.setting.recorder,
        )
        self._hook = HookedStep(
            self.setting.attached,
            self._program,
            self.setting.transport,
            self.setting.scale,
            stamp=self.setting.with_stats,
        )
        self._told = ""  # what the others are told of the failure
        self.told: list[str] = []

    @property
    def scale(self) -> WeightScale:
        """What gradients are multiplied by as they are packed, once contributions are set."""
        raw = self._hook.is_raw
        return self._hook.scale_before(self.contributions.weight) if raw else self.setting.scale

    # Events

    def begin(self, contributions: Contributions, leaves: Sequence[Tensor | None]) -> None:
        """Sets what this rank brings; `leaves` show on which devices the buckets belong."""
        self._begun_s = time.perf_counter()
        self.contributions = contributions
        if self.setting.nonfinite == "raise":
            contributions.hold()
        self._memory.place(leaves)

    def ready_times_s(self) -> dict[int, float]:
        """For each leaf with a gradient type, when its last gradient came, on the clock of
        `time.perf_counter`; NaN where none did."""
        leaves = self._program.differentiated
        times_s = self.contributions.ready_times_s() or [self._begun_s] * len(leaves)
        return dict(zip(leaves, times_s, strict=True))

    @property
    def hook_spans(self) -> Sequence[Interval]:
        """When the hook was at work, or waited; see `HookedStep.spans`."""
        return self._hook.spans

    def buffer_of(self, bucket: int) -> Tensor:
        """The memory of a dense bucket, from the pool."""
        state = self.buckets[bucket]
        if state.buffer is None:
            # Zeros, which a rank that fails sends, are not to be written over its gradients.
            contributions = NOTHING if self.failure else self.contributions
            own = contributions.memory(bucket, self.setting.pool)
            state.buffer = self._roomy_buffer(bucket) if own is None else own
        return state.buffer

    def bucket_ready(self, bucket: int) -> None:
        """All gradients of a bucket are there. Never raises: backward must run to its end."""
        self.buckets[bucket].ready_s = time.perf_counter()
        if self._broken is not None:
            return  # the other ranks would take the next operation for the one that failed here
        try:
            self._advance()
        except BaseException as error:
            locate(error, self._program, self._at, self.setting.step)
            self._broken = self._broken or error

    def fail(self, error: BaseException) -> None:
        """This rank can't contribute; see [Note: a rank that fails]."""
        if self.failure is not None:
            return
        self.failure = error
        self._told = error_text(error)
        if isinstance(error, FddpError):
            rank, step = self.setting.transport.rank, self.setting.step
            error.args = (f"rank {rank} at step {step}: {error}", *error.args[1:])

    def finish(self) -> Outcome:
        """Backward has ended, or there was none: runs the rest of the schedule.

        Raises:
            BaseException: this rank's own failure, once the step's collectives are done.
            PeerError: another rank failed.
            WeightError: the total weight over ranks is zero.
            DesyncError: ranks are at different steps, or run different plans.
            NonFiniteError: a number is not finite, and callers asked for this error.
            RankLostError, SyncTimeoutError: the transport failed.
        """
        now = time.perf_counter()
        for state in self.buckets:
            state.ready_s = min(state.ready_s, now)
        self._ended = True
        if self._broken is not None:
            self._raise(self._broken)
        try:
            return self._run_out()
        except BaseException as error:
            locate(error, self._program, self._at, self.setting.step)
            raise

    def _run_out(self) -> Outcome:
        report = self._completed()
        if report is None:
            return self._stopped()
        self.hook_states = self._hook.new_states(self.hook_states, report)
        self._memory.lend()
        self.orderly = True
        self.log.append((self.contributions.arrived(), Action("finish")))
        return Outcome(self._results.leaves, report, self._results.stats)

    def _completed(self) -> ControlReport | None:
        """Runs the rest of the schedule; None if all ranks end the step for bad numbers."""
        try:
            self._advance()
            report = self._known()
            self._results.finish(report.used, self.contributions)
            self._judge.judge_results(self.setting.transport, self.setting.step)
        except StopStepError:
            return None
        return report

    # The interpreter

    def _advance(self) -> None:
        with self._lock:
            while self._cursor < len(self._ops):
                op = self._ops[self._cursor]
                if not self._may_run(op):
                    return
                position = self._cursor
                # Moved on first: a gradient that arrives while this runs must not run it again.
                self._cursor += 1
                if self._applies(op):
                    self._run(position, op)

    def _may_run(self, op: Op) -> bool:
        # The control word does not wait for hooks, on any rank.
        if op.kind != "control" and not self._hook.go_on(block=self._ended):
            return False
        if self._ended:
            return True
        if op.kind not in _BACKWARD or op.when != "always":
            return False
        if op.bucket == self._program.schedule.sequence[-1]:
            return False
        # Backward goes on rather than wait for a collective on which this one builds.
        is_ready = self.buckets[op.bucket].ready_s < math.inf
        works = [self._works[dep] for dep in op.deps if dep in self._works]
        return is_ready and all(map(self._hook.is_done, works))

    def _applies(self, op: Op) -> bool:
        if op.when == "always":
            if op.bucket not in self.setting.idle or op.kind == "control":
                return True
            if self._cursor - 1 == self._carrier:
                return True  # the word alone travels
            return op.kind not in _BACKWARD and op.bucket in self._known().late
        late = op.bucket in self._known().late
        if op.when == "late":
            return late
        if late or self._hook.is_raw:
            return late
        if self._program.schedule.wire_dtypes[op.bucket] not in RETAINED_DTYPES:
            return False  # one factor after the sum corrects it
        report = self._known()
        return not self.setting.scale.keeps_range(report.total_weight, report.active)

    def _run(self, position: int, op: Op) -> None:
        for dep in op.deps:
            self._wait(dep)
        self._at = op
        _HANDLERS[op.kind](self, position, op)

    def _wait(self, position: int) -> None:
        """Waits for an operation; for one that was skipped, for what it would have waited for."""
        pending = [position]
        while pending:
            position = pending.pop()
            if position in self._awaited:
                continue
            self._awaited.add(position)
            work, op = self._works.get(position), self._ops[position]
            if work is None:
                if op.when != "always":
                    pending.extend(op.deps)
                continue
            self._at = op
            entry = self._notes[position]
            entry.waited_s = time.perf_counter()
            if isinstance(work, HookedWork):
                self._hook.finish(work)
            else:
                work.wait(f"{self._what(op)} of step {self.setting.step}")
            entry.done_s = time.perf_counter()

    def _what(self, op: Op) -> str:
        return "the control word" if op.kind == "control" else self._program.describe(op.bucket)

    # Operations

    def _pack(self, position: int, op: Op) -> None:
        state = self.buckets[op.bucket]
        if op.region.buffer == "repair":
            state.repair = self._memory.acquire(op.bucket)
            self._fill(state.repair, position, op)
        else:
            self._fill(self.buffer_of(op.bucket), position, op)
        if op.when != "always":
            self.log.append((self.contributions.arrived(), Action("repair", op.bucket)))
        elif op.region.start == 0:
            self.log.append((self.contributions.arrived(), Action("launch", op.bucket)))

    def _fill(self, buffer: Tensor, position: int, op: Op) -> None:
        numel, padded = (
            self._program.layouts[op.bucket].numel,
            self._program.schedule.buffer_numels[op.bucket],
        )
        if numel < padded:
            buffer[numel:padded].zero_()
        try:
            contributions = NOTHING if self.failure else self.contributions
            peak = self._write(contributions, buffer, position, op)
            if op.when != "again":  # what is packed again has been judged
                self._judge.packed(op.bucket, buffer, peak, contributions.sources)
        except Exception as error:
            if self.report is not None:
                raise  # too late to tell the others through the control word
            self.fail(pack_error(self._program, op.bucket, buffer, contributions, error))
            self._write(NOTHING, buffer, position, op)

    def _write(self, contributions: Contributions, buffer: Tensor, position: int, op: Op) -> float:
        chunk = self._program.shards.chunks.get(position)
        if chunk is not None:
            return contributions.pack_chunk_(chunk, buffer)
        pack = contributions.pack_late_ if op.when == "late" else contributions.pack_
        return pack(op.bucket, buffer, self._program.layouts[op.bucket], self._scale_before(op))

    def _communicate(self, position: int, op: Op) -> None:
        state, transport = self.buckets[op.bucket], self.setting.transport
        own, stamp = self._memory.travelling(position, op), self.setting.with_stats
        average = self._program.schedule.scaling == "average" and not self._hook.is_raw
        if op.when == "always" and math.isnan(state.launch_s):
            state.launch_s = time.perf_counter()
        self._notes.launched(position)
        if self._hook.takes(position, op):
            what = f"{self._what(op)} of step {self.setting.step}"
            state.hooked = self._hook.start(op, own, self.hook_states, what)
            self._works[position] = state.hooked
            return
        if op.kind == "all_reduce":
            if op.when == "again":
                self._hook.discard(op.bucket)
            work = transport.all_reduce(
                own, axes=op.axes, average=average, record_time=stamp, wait_soon=self._ended
            )
        elif op.kind == "reduce_scatter":
            work = transport.reduce_scatter(
                own,
                axes=op.axes,
                average=average,
                ordered=self._program.schedule.deterministic,
                record_time=stamp,
                wait_soon=self._ended,
            )
        else:
            work = transport.all_gather_in_place(
                own, axes=op.axes, record_time=stamp, wait_soon=self._ended
            )
        state.work = self._works[position] = work

    def _add(self, position: int, op: Op) -> None:
        if self.buckets[op.bucket].buffer is None:
            self.buffer_of(op.bucket).zero_()  # it was idle
        repair = op._replace(region=op.region._replace(buffer="repair"))
        self._memory.of(op).add_(self._memory.of(repair))

    def _send_control(self, position: int, op: Op) -> None:
        layout = self._program.control
        if failure := self._hook.failure():
            self.fail(failure)
        contributions = NOTHING if self.failure else self.contributions
        word = ControlWord(
            fingerprint=self._program.fingerprint(self.setting.moment),
            method=self.method,
            weight=contributions.weight,
            used=contributions.used(self._program),
            late=contributions.late(self._program),
            has_next=self.has_next,
            nonfinite=not self._judge.finite,
            may_overflow=self._judge.large,
            failed=self.failure is not None,
            order=self._order() if layout.with_order else (),
        )
        vector = torch.from_numpy(encode(layout, word))
        lying = self._memory.put_word(op, vector, self.buffer_of)
        if not is_piggybacked(op):
            self._notes.launched(position)
            self._works[position] = self.setting.transport.all_reduce(lying, wait_soon=True)
        self.log.append((self.contributions.arrived(), Action("control")))

    def _order(self) -> tuple[int, ...]:
        if self.setting.transport.rank != 0 or self.failure:
            return ()
        return tuple(self.contributions.order(self._program))

    def _gather(self, position: int, op: Op) -> None:
        report = self._known()
        (leaf,) = self._program.plan.buckets[op.bucket].leaves
        spec = self._program.plan.leaves[leaf]
        parts = [
            (part.sources[0], part.weight / report.total_weight)
            for part in self.contributions.parts(op.bucket)
        ]
        entry = self._notes.launched(position)
        entry.waited_s = entry.launched_s
        gathered = gather_sparse(
            spec,
            self._program.schedule.wire_dtypes[op.bucket],
            self._memory.devices[spec.device],
            [(source, factor) for source, factor in parts if source is not None],
            self.setting.transport,
            f"{self._what(op)} of step {self.setting.step}",
        )
        entry.done_s = time.perf_counter()
        self._results.put_sparse(leaf, gathered)
        self._judge.gathered(leaf, [source for source, _ in parts])

    def _unpack(self, position: int, op: Op) -> None:
        report = self._known()
        if self._program.plan.buckets[op.bucket].sparse:
            return  # gathered as it is wanted
        after = 1.0
        if self._program.schedule.result != "replicated" and not self._hook.is_raw:
            after = self._scale(op.bucket).after(report.total_weight)
        self._results.unpack(position, op.bucket, self.buffer_of(op.bucket), after)

    # What the control word says

    def _known(self) -> ControlReport:
        if self.report is None:
            self.report = report = self._read_control()
            problem = self._hook.problem(report, lets_rest=self.lets_rest)
            unfit = incompatible_contributions_error(
                report, self._program, self.setting.scale, self.setting.step, problem
            )
            if not report.agreed or report.failed or unfit is not None:
                self._give_up(report, unfit)
            self._hook.know(report)
            self._judge.know(report, self.setting.scale)
        return self.report

    def _read_control(self) -> ControlReport:
        self._wait(self._program.word_position)
        return decode(
            self._program.control,
            self._memory.word.cpu().numpy(),
            fingerprint=self._program.fingerprint(self.setting.moment),
            world_size=self.setting.transport.world_size,
        )

    def _give_up(self, report: ControlReport, unfit: FddpError | None) -> None:
        """Raises on every rank, after the collectives in flight."""
        for position in list(self._works):
            self._wait(position)
        transport, step = self.setting.transport, self.setting.step
        if unfit is not None and report.agreed and not report.failed:
            self.orderly = True
            raise unfit
        self._at = None
        method = self.method if self.contributions.weight > 0.0 else Method.NOTHING
        digest = self._program.schedule.shared_digest
        told = exchange(transport, self.setting.moment, digest, method.text, self._told)
        self.told = [account.failure for account in told]
        self.orderly = True
        if not report.agreed:
            raise desync_error(transport.rank, told) from self.failure
        if self.failure is not None:
            self._raise(self.failure)
        raise peer_error(step, {rank: text for rank, text in enumerate(self.told) if text})

    def _raise(self, error: BaseException) -> NoReturn:
        """Lets go of an error while raising it: its traceback leads back here, and would keep the
        step's tensors until the garbage collector runs."""
        self.failure = self._broken = None
        try:
            raise error
        finally:
            del error

    def _stopped(self) -> Outcome:
        """The outcome of a step that all ranks end because a number is not finite, after the
        collectives in flight.

        Raises:
            NonFiniteError: callers asked for it.
        """
        for position in list(self._works):
            self._wait(position)
        report = self.report
        if report is None:
            raise InternalError("a step was left out before the control word was read")
        self._at = None
        error = self._judge.error(self.setting.transport, self.setting.step)
        self._memory.lend()
        self.orderly = True
        if error is not None:
            self._raise(error)
        self.log.append((self.contributions.arrived(), Action("finish")))
        nothing: list[Tensor | None] = [None] * len(self._results.leaves)
        return Outcome(nothing, report, Stats(math.nan, False), skipped=True)

    # Helpers

    @property
    def phase(self) -> str:
        """What this rank is at."""
        if self.orderly:
            return "between steps"
        return "after backward" if self._ended else "in forward"

    def _scale_before(self, op: Op) -> WeightScale:
        """The scale that an operation packs with."""
        if self._hook.is_raw:
            repairs = op.when != "always"
            return self._hook.scale_before(self.contributions.weight, repairs=repairs)
        return self._scale(op.bucket)

    def _scale(self, bucket: int) -> WeightScale:
        """The agreed scale, or one that fits for a bucket that is reduced again."""
        scale = self.setting.scale
        schedule = self._program.schedule
        is_narrow = schedule.wire_dtypes[bucket] in RETAINED_DTYPES
        if self.report is not None and is_narrow and bucket in schedule.retained:
            report = self.report
            if not scale.keeps_range(report.total_weight, report.active):
                return scale.fitting(report.total_weight, report.active)
        return scale

    def _roomy_buffer(self, bucket: int) -> Tensor:
        """As `StepMemory.acquire`; a rank without memory makes room for zeros, to end the step with
        them."""
        try:
            return self._memory.acquire(bucket)
        except (RuntimeError, MemoryError) as error:
            if self.report is not None:
                raise  # too late to tell the others through the control word
            self.fail(error)
            self.setting.pool.clear()
            return self._memory.acquire(bucket)


_HANDLERS: dict[str, Callable[[Session, int, Op], None]] = {
    "pack": Session._pack,
    "all_reduce": Session._communicate,
    "reduce_scatter": Session._communicate,
    "all_gather": Session._communicate,
    "add": Session._add,
    "control": Session._send_control,
    "gather": Session._gather,
    "unpack": Session._unpack,
}
