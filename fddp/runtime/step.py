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

import weakref
import zlib
from collections.abc import Hashable, Sequence
from functools import cached_property
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fddp.core.protocol.control_word import ControlReport
from fddp.core.protocol.expected_counts import Arrivals
from fddp.core.protocol.launch import Action
from fddp.errors import FddpError, error_text
from fddp.native.autograd_leaves import GradientCounter, GraphInfo
from fddp.native.executor import Executor, new_executor
from fddp.runtime.contributions import NOTHING, Contributions
from fddp.runtime.finite_check import FiniteCheck
from fddp.runtime.hook_sums import HookSums
from fddp.runtime.results import Devices, Results
from fddp.runtime.step_context import USUAL, ListKey, RegularWord, StepContext
from fddp.runtime.sums import Sums
from fddp.telemetry.waits import note_wait

_CPU = torch.device("cpu")


class Step:
    """One synchronisation.

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
        after: factor on results.
        repairs: memory of late gradients by bucket.
        scratch: further memory of operations.
        sparse: sparse buckets that the hook has reduced: this rank's gradients, and the result.
        works: the collective that was started last, by bucket, if Python has started it.
        record_time: True to record times, norm and finiteness.
        fingerprint: number that is equal on ranks in the same step of the same plan.
        opened_s: time at which the step was opened, on the clock of `time.perf_counter`.
    """

    def __init__(self, context: StepContext) -> None:
        self.context, self.code = context, context.code
        self.program, self.bound_hook = self.code.program, self.code.hook
        program = self.program
        self.transport, self.pool, self.recorder = context.transport, context.pool, context.recorder
        self.number, self.method = context.step, context.method
        self.record_time, self.scale = context.with_stats, context.scale
        self.contributions: Contributions = NOTHING
        self.source: Contributions = NOTHING
        self.has_next = True
        self.hook_states: Sequence[Any] = ()
        self.allow_idle_ranks = False
        self.failure: BaseException | None = None
        self.failures: Sequence[str] = ()
        self.is_orderly = self.backward_ended = False
        self.report: ControlReport | None = None
        self.after = 1.0
        self.devices = Devices(cpu=_CPU)
        self.repairs: dict[int, Tensor] = {}
        self.scratch: dict[Hashable, Tensor] = {}
        self.sparse: dict[int, tuple[list[Tensor | None], Tensor]] = {}
        self.works: dict[int, Any] = {}
        self.opened_s = self.begun_s = perf_counter()
        moment = f"{program.schedule.shared_digest}:{context.step}{context.when}"
        self.fingerprint = zlib.crc32(moment.encode())
        is_usual = not (context.idle or context.with_stats)
        self.key = USUAL if is_usual else ListKey(context.idle, context.with_stats)
        self.first_lists = self.code.first_lists(self.key)
        self.is_whole: bool | None = None  # True if no gradient is missing; None if not known
        self.regular_word: RegularWord | None = None
        self.sent_word = False
        self.failure_text = ""
        self.is_prepared = False
        self.executor: Executor = new_executor(
            self.code.constants,
            self.code.collectives,
            context.recorder.ring,
            context.recorder.number_of(program.schedule),
            context.step,
            weakref.ref(self),
            self.first_lists.before_word,
        )
        self.check: FiniteCheck | None = None  # None if non-finite numbers are propagated
        if context.nonfinite != "propagate":
            hook = None if self.bound_hook is None else self.bound_hook.hook
            self.check = FiniteCheck(
                context.nonfinite, program, self.results, hook, context.recorder
            )

    # Made when they are needed, which most steps do not.

    @cached_property
    def sums(self) -> Sums:
        """Scaling of the sums."""
        hook, context = self.bound_hook, self.context
        return Sums(self.program, context.scale) if hook is None else HookSums(hook, context)

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
        """Results that are not views of their buffers."""
        return Results(self.program, self.leaves, self.devices, self.pool, measure=self.record_time)

    @property
    def phase(self) -> str:
        """Phase of the step, for error texts of other ranks."""
        if self.is_orderly:
            return "between steps"
        return "after backward" if self.backward_ended else "in forward"

    # Contributions

    def note_devices(self, leaves: Sequence[Tensor | None]) -> None:
        """Set the devices of the buckets to those of their leaves."""
        for bucket in self.program.buckets:
            if bucket.device not in self.devices:
                leaf = leaves[bucket.leaves[0]]
                if leaf is not None:
                    self.devices[bucket.device] = leaf.device

    def begin(
        self,
        contributions: Contributions,
        leaves: Sequence[Tensor | None],
        *,
        allow_idle_ranks: bool = False,
    ) -> None:
        """Set this rank's contributions; `leaves` determine the devices of the buckets.

        Args:
            allow_idle_ranks: see the attribute.
        """
        self.begun_s = perf_counter()
        self.contributions = contributions
        self.allow_idle_ranks = allow_idle_ranks
        if self.context.nonfinite == "raise":
            contributions.retain_sources()
        if not self.code.is_native:
            self.note_devices(leaves)
        if self.bound_hook is not None:
            self.scale = self.sums.scale(contributions.weight)
        if self.failure is not None:
            return
        self.source = contributions

    def arm(self, leaf_set: GradientCounter, view: GraphInfo, previous: Arrivals | None) -> None:
        """Prepare for a backward pass, whose contributions `begin` has set.

        Args:
            leaf_set: leaves of the call, one for each of `program.differentiated`.
            view: inspection of the graph.
            previous: arrivals of the previous step.
        """
        own = self.contributions.backward
        assert own is not None
        own.leaf_set = leaf_set
        self.prepare()
        own.arm(view, previous, self.memory, self.scale, self.executor)

    def prepare(self) -> None:
        """Allocate the buffers, and let the extension pack where it can."""
        self.is_prepared = True
        if self.source.allocates_early:
            for bucket in self.program.buckets:
                if not bucket.sparse and bucket.index not in self.context.idle:
                    self.executor.set_buffer(bucket.index, self.new_memory(bucket.index))
        checks = self.record_time or self.check is not None
        if self.failure is not None or checks or not self.code.packs_natively:
            return
        only, weight = self.source.only(), self.source.own_weight
        if only is None:
            return
        factor = self.scale.unit_factor if weight == 1.0 else self.scale.before(weight)
        if isinstance(only, list):
            self.is_whole = self.executor.pack_leaves(only, factor)
        else:
            self.executor.pack_counted(only, factor)

    def memory(self, bucket: int) -> Tensor:
        """Buffer of a dense bucket, taken from the pool at the first call."""
        buffer = self.executor.buffer(bucket)
        if buffer is None:
            buffer = self.new_memory(bucket)
            self.executor.set_buffer(bucket, buffer)
        return buffer

    def new_memory(self, index: int) -> Tensor:
        """Take memory for a bucket from the pool. For lack of memory, fail the step on this rank,
        or raise if it is too late to report the error in the control word."""
        bucket = self.program.buckets[index]
        if self.source.aliases_buffer is not None:
            buffer = self.source.aliased_memory(index, self.pool)
            if buffer is not None:
                return buffer
        device = self.devices[bucket.device]
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
        self.failure, self.source = error, NOTHING
        self.executor.pack_in_python()
        self.failure_text = where + error_text(error)
        if isinstance(error, FddpError):
            rank = self.transport.rank
            error.args = (f"rank {rank} at step {self.number}: {error}", *error.args[1:])

    def close(self) -> None:
        """Release the buckets, once all collectives are done."""
        for bucket, repair in self.repairs.items():
            self.pool.release(bucket, repair)
        for bucket, buffer in enumerate(self.executor.buffers()):
            if buffer is not None:
                self.pool.release(bucket, buffer)
        self.contributions.release()
        self.is_orderly = True
        if self.record_time:
            self.log.append((self.contributions.arrived(), Action("finish")))

    def wait(self, handle: Any, what: str) -> None:
        """Wait for a collective that takes long, or has failed."""
        self.code.collectives.adopt(handle).wait(what)

    note_wait = staticmethod(note_wait)

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
