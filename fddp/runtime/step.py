"""One synchronisation on one rank.

A step is opened before the gradients exist: `begin` sets the contributions, `arm` prepares for a
backward pass if there is one, and `prepare`, by `arm` or at the end of backward, takes memory.
While backward runs, the executor packs and sends buckets as they become ready;
`runtime/finish.py` does the rest.

[Note: a rank that fails]
A failure that only one rank can see (an exception in its loss function, a bad weight, a wrong
tree) must not leave the others waiting. The step notes the failure, contributes zeros from then
on, finishes the collectives, which are the same on all ranks in any case, and reports the failure
in the control word. Then all ranks exchange their failures and raise. No collective is left
half-done, so the group stays usable. If a hook fails, its rank goes on with zeros in the operations
that the hook issued in the step before. Only two kinds of errors end a step at once: those of the
transport, and those of a hook after the control word, or whose collectives are not known.
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Hashable, Sequence
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fddp.core.protocol.calls import Method
from fddp.core.protocol.control_word import ControlReport
from fddp.core.protocol.expected_counts import Arrivals
from fddp.core.protocol.launch import TraceAction
from fddp.core.protocol.lifecycle import Event, Life, advance
from fddp.errors import FddpError, error_text
from fddp.native import extension
from fddp.native.buffer_pool import BufferPool
from fddp.native.layout import Stats
from fddp.native.pack import measures_late
from fddp.runtime.compiled import CompiledProgram, RegularWord
from fddp.runtime.contributions import (
    NOTHING,
    BackwardContributions,
    BackwardPrediction,
    Contributions,
    WeightedGradients,
    divisor_of_squares,
)
from fddp.runtime.finite_check import FiniteCheck
from fddp.runtime.hook_sums import HookSums
from fddp.runtime.nonfinite import Policy
from fddp.runtime.result_flags import ResultFlags
from fddp.runtime.results import Devices, Results
from fddp.runtime.sums import Sums
from fddp.runtime.virtual_sums import VirtualSums
from fddp.telemetry.flight.recorder import Recorder
from fddp.telemetry.waits import note_wait
from fddp.transport.base import Transport, Work

if TYPE_CHECKING:
    from fddp._C import Executor, GradientCounter, StepCalls

_CPU = torch.device("cpu")
_OPENED, _ = advance(Life(), "opened")

CAPTURED = ", captured in a graph"
"""Part of the moment of a captured step, as ranks compare it."""


class Step:
    """One synchronisation.

    Args:
        code: the program to run.
        calls: functions of Python for what is not native.
        transport: transport of the collectives.
        pool: memory for buckets.
        recorder: flight recorder of the operations.
        number: number of the step.
        method: the call that opens it.
        label: text that must be the same on all ranks, beside the number.
        idle: buckets that are left out because no rank used them in the step before; a gradient for
            one makes it late. The same on all ranks.
        nonfinite: policy for non-finite numbers.
        record_time: True to record times, norm and finiteness.
        has_next: True if this rank has input for another step; from the loop over uneven inputs.
        asks_stop: True if this rank asks all ranks to stop.
        hook_states: state of the communication hook by bucket; () if it is stateless.
        is_captured: True if the step is captured in a graph, on all ranks.
    """

    # State of the step. It ends once: with results, in a failure of all ranks, or broken.
    life: Life = _OPENED
    # Result of the caller's function that began the step, see `Engine.run`.
    begin_result: Any = None
    # Gradients and weight of this rank from `begin` on, for its reports and results.
    contributions: Contributions = NOTHING
    # The same, to pack; nothing from a failure of this rank on.
    source: Contributions = NOTHING
    # Sums over the virtual ranks of this rank before the last, whose gradients are `source`. None
    # without virtual ranks, and from a failure of this rank on.
    earlier: VirtualSums | None = None
    # Factor on results, from the report on; that on gradients before the sum is `scale`.
    after: float = 1.0
    # True to let ranks of weight 0 contribute zeros under a hook that divides by the number of
    # ranks; the same on all ranks that have input.
    allow_idle_ranks: bool = False
    # Error of this rank, until it is raised, and its text for the others.
    failure: BaseException | None = None
    failure_text: str = ""
    # Error texts of all ranks, once they were exchanged; "" for ranks without one.
    failures: Sequence[str] = ()
    # Word of a step in which nothing is unusual, with the report that it leads to; None where
    # something is.
    regular: RegularWord | None = None
    # Sum of the control words, from the moment at which it is read.
    report: ControlReport | None = None
    # True once buffers were allocated and sources passed to the executor.
    is_prepared: bool = False
    # Non-finite numbers of the step; None if they are propagated, or its report is read later.
    check: FiniteCheck | None = None
    # Those of its results, if its report is read later; None if they are propagated.
    flags: ResultFlags | None = None

    def __init__(
        self,
        code: CompiledProgram,
        calls: StepCalls,
        transport: Transport,
        pool: BufferPool,
        recorder: Recorder,
        number: int,
        method: Method,
        *,
        label: str = "",
        idle: frozenset[int] = frozenset(),
        nonfinite: Policy = "propagate",
        record_time: bool = False,
        has_next: bool = True,
        asks_stop: bool = False,
        hook_states: Sequence[Any] = (),
        is_captured: bool = False,
    ) -> None:
        self.opened_s = self.begun_s = perf_counter()
        self.code = code
        self.program = program = code.program
        self.transport, self.pool, self.recorder = transport, pool, recorder
        self.number, self.record_time = number, record_time
        # Squared norms are measured where a `SyncInfo` is asked for.
        self.measures_squares = record_time and len(program.groups) > 0
        self.idle, self.is_captured = idle, is_captured
        self.has_next, self.asks_stop = has_next, asks_stop
        # Replaced by the new one in a step that succeeds, so that one that fails keeps the old one.
        self.hook_states = hook_states
        # Call that the control word reports, equal on all ranks that contribute; cleared where
        # other ranks may make another call.
        self.method = method
        # Identifies the step in error texts; its checksum in the control word is equal on ranks in
        # the same step of the same plan.
        self.moment = f"{number}{label}{CAPTURED if is_captured else ''}"
        self.fingerprint = zlib.crc32(self.moment.encode(), code.seed)
        # Factors on gradients before the sum; `begin` sets others under a raw hook.
        self.scale = program.scale
        if program.defers_report:  # every rank has weight 1
            self.after = program.scale.after(program.scale.ranks)
        if nonfinite != "propagate" and program.defers_report:
            self.flags = ResultFlags(nonfinite, program, transport, recorder, number)
        elif nonfinite != "propagate":
            hook = None if code.hook is None else code.hook.hook
            self.check = FiniteCheck(nonfinite, program, self.results, hook, recorder)
        # Runs the list of the program, also from threads of backward. It refers to the step weakly,
        # because hooks of gradients keep it alive.
        self.executor: Executor = extension.compiled.Executor(
            code.native,
            calls,
            code.captured_collectives if is_captured else code.collectives,
            recorder.ring,
            recorder.number_of(program.schedule),
            number,
            weakref.ref(self),
            [*idle],
            record_time,
            record_time or self.check is not None,
        )

    # Made when they are needed, which most steps do not.

    @cached_property
    def sums(self) -> Sums:
        """Scaling of the sums."""
        hook = self.code.hook
        if hook is None:
            return Sums(self.program)
        return HookSums(
            hook, self.program, self.transport, self.number, record_time=self.record_time
        )

    @cached_property
    def devices(self) -> Devices:
        """Devices of the buckets, by their label in the plan, from the leaves of this step."""
        return Devices(self.code.devices)

    @cached_property
    def repairs(self) -> dict[int, Tensor]:
        """Buffers of late gradients by bucket, returned to the pool with the others."""
        return {}

    @cached_property
    def in_place(self) -> list[int]:
        """Buckets whose gradients are reduced in place."""
        return []

    @cached_property
    def scratch(self) -> dict[Hashable, Tensor]:
        """Memory that an operation leaves for a later one of the same bucket."""
        return {}

    @cached_property
    def sparse(self) -> dict[int, tuple[list[Tensor | None], Tensor]]:
        """Sparse buckets that the hook has reduced: this rank's gradients, and the result."""
        return {}

    @cached_property
    def works(self) -> dict[int, Any]:
        """By bucket, the collective that Python has started last, for its times."""
        return {}

    @cached_property
    def squares(self) -> dict[int, Tensor]:
        """By bucket, for each leaf the squared norm of what was packed; empty unless measured."""
        return {}

    @cached_property
    def leaves(self) -> list[Tensor | None]:
        """Results by leaf, None at first."""
        return [None] * len(self.program.plan.leaves)

    @cached_property
    def log(self) -> list[tuple[int, TraceAction]]:
        """Actions, each with the number of gradients that had arrived; empty unless
        `record_time`."""
        return []

    @cached_property
    def results(self) -> Results:
        """Results that are not views of their buffers."""
        return Results(self.program, self.leaves, self.devices, self.pool, measure=self.record_time)

    @property
    def phase(self) -> str:
        """Phase of the step, for error texts of other ranks."""
        if self.is_orderly:
            return "between steps"
        return "after backward" if self.life.name == "complete" else "in forward"

    @property
    def is_orderly(self) -> bool:
        """True if the step has ended, in success or failure, with all collectives done."""
        return self.life.name in ("ended", "failed")

    def note(self, event: Event) -> None:
        """Note an event in the life of the step. The actions that follow are code of the caller's:
        of this class, `finish.py` and the engine, which go through them in the same order.

        Needs no lock: until backward has ended, threads of devices note failures only, one after
        the other within the executor, and a failure leaves the state as it is.
        """
        self.life, _ = advance(self.life, event)

    def take_begin_result(self, result: Any) -> None:
        """Take the result of the function that began the step."""
        self.begin_result = result

    def leave_method(self) -> None:
        """Report no call of this rank, where other ranks may make another."""
        self.method = Method.NOTHING

    # Contributions

    def note_devices(self, leaves: Sequence[Tensor | None]) -> None:
        """Set the devices of the buckets to those of their leaves."""
        for bucket in self.program.buckets:
            if bucket.device not in self.devices:
                leaf = leaves[bucket.leaves[0]]
                planned = bucket.device.partition("#")[0]  # "meta" stands for any
                # For a leaf on another type of device, packing raises.
                if leaf is not None and planned in ("meta", leaf.device.type):
                    self.devices[bucket.device] = leaf.device
                    self.code.devices[bucket.device] = leaf.device

    def begin(
        self,
        contributions: Contributions,
        leaves: Sequence[Tensor | None],
        *,
        earlier: VirtualSums | None = None,
        allow_idle_ranks: bool = False,
    ) -> None:
        """Set this rank's contributions; `leaves` determine the devices of the buckets.

        Args:
            earlier, allow_idle_ranks: see the attributes.
        """
        self.begun_s = perf_counter()
        self.contributions, self.allow_idle_ranks = contributions, allow_idle_ranks
        if not self.code.is_on_cpu:
            self.note_devices(leaves)
        if self.code.hook is not None:
            self.scale = self.sums.scale(contributions.weight)
        if self.failure is not None:
            return
        self.source, self.earlier = contributions, earlier

    def arm(
        self, leaf_set: GradientCounter, view: BackwardPrediction, previous: Arrivals | None
    ) -> None:
        """Prepare for a backward pass, whose contributions `begin` has set.

        Args:
            leaf_set: leaves of the call, one for each of `program.differentiated`.
            view: inspection of the graph.
            previous: arrivals of the previous step.
        """
        own = self.contributions
        assert isinstance(own, BackwardContributions)
        own.collect(leaf_set)
        self.prepare()
        self.note("armed")  # before threads of devices can bring gradients
        own.arm(
            self.program,
            view,
            previous,
            self.memory,
            self.scale,
            self.executor,
            keeps_sources=self.keeps_sources,
            sums_squares=self.measures_squares,
        )

    @property
    def keeps_sources(self) -> bool:
        """True if packed gradients may be asked for, to name those that are not finite. With
        virtual ranks, their sums are named instead."""
        return self.check is not None and self.check.names_leaves and self.earlier is None

    @property
    def arrived(self) -> int:
        """Number of gradients that have arrived during backward."""
        counter = self.contributions.leaf_set
        return 0 if counter is None else counter.arrival_count()

    def sources(self, bucket: int, *, late: bool = False) -> list[WeightedGradients]:
        """Summands of a bucket as in `Contributions`. Of a sparse one, those of all virtual ranks
        of this rank."""
        own = self.source.sources(self.program, bucket, late=late)
        return own if self.earlier is None else [*self.earlier.gradients(bucket), *own]

    def prepare(self) -> None:
        """Allocate the buffers, and let the extension pack and report where it can."""
        self.is_prepared = True
        if self.source.allocates_early:
            for bucket in self.program.buckets:
                if not bucket.sparse and bucket.index not in self.idle:
                    self.executor.set_buffer(bucket.index, self.new_memory(bucket.index))
        if self.failure is not None:
            return
        source, code = self.source, self.code
        has_order = self.program.control.with_order and source.gives_order
        is_unusual = self.idle or has_order or self.asks_stop
        carrier = code.carrier_device  # to whose memory the extension writes the word
        is_on_host = not carrier or self.devices[carrier].type == "cpu"
        is_usual = source.weight == 1.0 and self.has_next and is_on_host and not is_unusual
        if is_usual and code.has_regular_words:
            self.regular = code.regular_word(self.method, with_squares=self.measures_squares)
            self.executor.set_regular_word(self.regular.vector, self.fingerprint)
        if self.record_time or self.check is not None or not code.packs_natively:
            return
        if self.earlier is not None or source.accumulated is not None:
            return
        if source.leaves is not None:
            self.executor.pack_leaves(source.leaves, self.scale.before(source.weight))
        elif source.leaf_set is not None:
            self.executor.pack_counted(source.leaf_set, self.scale.before(source.own_weight))

    @cached_property
    def own_squares(self) -> list[float]:
        """For each group of leaves, the squared norm of this rank's gradient times its weight,
        once all buckets are packed. Waits for devices other than the CPU."""
        weight = self.source.weight
        totals = self.program.by_group({} if self.earlier is None else self.earlier.squares)
        if weight == 0.0:
            return totals
        divisor, own = divisor_of_squares(self.scale, weight), self.program.by_group(self.squares)
        if divisor == 0.0:  # of a weight near the smallest number
            return [math.nan] * len(totals)
        return [total + square / divisor for total, square in zip(totals, own, strict=True)]

    def memory(self, bucket: int) -> Tensor:
        """Buffer of a dense bucket, taken from the pool at the first call."""
        buffer = self.executor.buffer(bucket)
        if buffer is None:
            buffer = self.new_memory(bucket)
            self.executor.set_buffer(bucket, buffer)
        return buffer

    def new_memory(self, index: int) -> Tensor:
        """Take memory for a bucket from the pool; called by the executor, too. For lack of memory,
        fail the step on this rank, or raise if it is too late to report the error in the control
        word."""
        bucket, aliases = self.program.buckets[index], self.source.aliases_buffer
        if aliases is not None and index not in self.program.schedule.retained:
            leaves, layout = self.program.member_numbers[index], bucket.layout.native
            buffer = self.pool.reclaim(
                index, lambda b: len(b) == bucket.buffer_numel and aliases(leaves, b, layout)
            )
            if buffer is not None:
                self.in_place.append(index)
                return buffer
        device = _CPU if self.code.is_on_cpu else self.devices[bucket.device]
        spec = index, bucket.buffer_numel, bucket.wire_dtype, device
        try:
            return self.pool.acquire(*spec)
        except (RuntimeError, MemoryError) as error:
            if self.report is not None:
                raise
            # This rank finishes the step with zeros, in the memory freed here.
            self.fail(error)
            self.pool.clear()
            return self.pool.acquire(*spec)

    def fail(self, error: BaseException, where: str = "") -> None:
        """Fail the step on this rank; see [Note: a rank that fails]. `where` precedes the text of
        the error on other ranks."""
        if self.failure is not None:
            return
        self.note("failed")
        self.failure, self.source, self.regular = error, NOTHING, None
        self.earlier = None
        self.executor.leave_to_python()
        self.failure_text = where + error_text(error)
        place = f"rank {self.transport.rank} at step "
        # The error of a step within this one's loss function has its place already.
        if isinstance(error, FddpError) and not str(error).startswith(place):
            error.args = (f"{place}{self.number}: {error}", *error.args[1:])

    def leave_regular(self) -> None:
        """Note that this rank sends another control word than the regular one."""
        self.regular = None

    def take_report(self, report: ControlReport, after: float = 1.0) -> None:
        """Take the sum of the control words, and the factor on results that follows from it."""
        self.report, self.after = report, after

    def take_views(self) -> None:
        """Take slices of the buffers as the results."""
        self.leaves = self.executor.results()

    @property
    def flag_device(self) -> torch.device:
        """Device of the first bucket that is not on the CPU, if there is one; the same bucket on
        all ranks."""
        devices = [self.devices[bucket.device] for bucket in self.program.buckets]
        return next(filter(measures_late, devices), _CPU)

    @property
    def result_memory(self) -> list[Tensor]:
        """Memory of the reduced results, of which they are slices, without other data."""
        if self.executor.gives_views:
            return [self.memory(bucket.index)[: bucket.numel] for bucket in self.program.buckets]
        return self.results.memory

    def take_regular_report(self) -> None:
        """Take the report of regular words, if it was read without a call."""
        if self.report is None and self.regular is not None and self.executor.has_report:
            self.report = self.regular.report

    def take_states(self, states: Sequence[Any]) -> None:
        """Take a state of the communication hook: the caller's, or the new one."""
        self.hook_states = states

    def take_failures(self, failures: Sequence[str]) -> None:
        """Take the error texts of all ranks, once they were exchanged."""
        self.failures = failures

    def release(self) -> None:
        """Return the memory of the step to the pool, once all collectives are done."""
        if self.report is not None and self.report.late:
            for bucket, repair in self.repairs.items():
                self.pool.release(bucket, repair)
        for bucket, buffer in enumerate(self.executor.buffers()):
            if buffer is not None:
                self.pool.release(bucket, buffer)
        if self.earlier is not None:
            self.earlier.release()
        if self.record_time:
            self.log.append((self.arrived, TraceAction("finish")))

    def keep_word(self) -> None:
        """Drop gradients and results. The control word is kept, whose report is read later."""
        self.executor.release()
        self.contributions.release()
        self.leaves, self.begin_result = [], None
        self.__dict__.pop("results", None)

    def leave_flags_unread(self) -> None:
        """Let the report say nothing of non-finite results, which the host can't read now."""
        self.flags = None

    def wait(self, work: Work, what: str) -> None:
        """Wait for a collective that takes long, or has failed. Called by the executor."""
        work.wait(what)

    note_wait = staticmethod(note_wait)  # called by the executor

    def raise_failure(self) -> None:
        """Raise the error of this rank, if it has one, without communication, and without keeping a
        reference: its traceback refers to this frame, and the cycle would keep the step's tensors
        until the garbage collector runs."""
        error, self.failure = self.failure, None
        try:
            if error is not None:
                raise error
        finally:
            del error


class Outcome(NamedTuple):
    """Outcome of a step.

    Attributes:
        step: the step, which has ended.
        leaves: the synchronised gradients, by leaf; local ones for leaves that are not reduced.
        report: the control word summed over ranks; None if it has not been read.
        stats: squared norm and finiteness of the synchronised gradients; None unless requested.
        begin_result: result of the caller's function that began the step; see `Engine.run`.
        skipped: True if all ranks skipped the step because of a non-finite number; all leaves are
            then None.
    """

    step: Step
    leaves: list[Tensor | None]
    report: ControlReport | None
    stats: Stats | None
    begin_result: Any
    skipped: bool = False
