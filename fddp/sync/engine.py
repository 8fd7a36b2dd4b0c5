"""Engine of a `GradSync`: opens and finishes steps, and keeps the state between them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fddp.core.numerics.weighting import WeightScale
from fddp.core.protocol.calls import Method
from fddp.core.protocol.control_word import ControlReport
from fddp.core.protocol.expected_counts import Arrivals
from fddp.core.schedule.schedule import summands
from fddp.errors import ClosedError, InternalError, PeerError, ReentryError, UnevenError, error_text
from fddp.runtime.compiled import CompiledProgram
from fddp.runtime.donation import donate
from fddp.runtime.finish import finish as finish_step
from fddp.runtime.inputs import is_transformed, outside_transforms
from fddp.runtime.program import Program
from fddp.runtime.step import Step
from fddp.runtime.step_context import NO_BUCKETS, Outcome, StepContext
from fddp.sync.configuration import EngineConfiguration
from fddp.sync.request import EngineSpec
from fddp.sync.rounds import Round
from fddp.telemetry.flight.dump import dump_on_failure
from fddp.telemetry.flight.recorder import Recorder
from fddp.transport import Group, resolve

_MAX_FAILURE_CHARS = 500


class Engine(EngineConfiguration):
    """Opens and finishes steps, and keeps the state between them. Making one is a collective call.

    Args:
        request: the caller's request.

    Attributes:
        arrivals: numbers of gradients by leaf in the last backward pass.
        in_backward: True while backward of a step runs.
        step: number of the next step.
        finished: one more than the number of the last successful step; 0 before.
        last_failed: True if the last step ended with an error, on all ranks.
        scale: the agreed unit of weight.
        round: round of the loop over uneven inputs, if one runs.
        timeout_s: timeout requested by the caller.
        recorder: flight recorder of the operations.
        when: suffix of the next step's `moment`; ranks with different suffixes are out of step.
        closed_by: reason for which no further step may start; "" while the engine is open.
        superseded: True if another engine replaces this one.
        label, advice: owner of the engine, and what to do once it is closed, for errors.
    """

    def __init__(self, request: EngineSpec) -> None:
        super().__init__(request)
        self.timeout_s = request.timeout_s
        self.arrivals: Arrivals | None = None
        self.in_backward = False
        self.step = 0
        self.finished = 0
        self.last_failed = False
        self.when = ""
        self._idle: frozenset[int] = frozenset()
        self.scale = WeightScale(summands(self.schedule), scaling=self.schedule.scaling)
        self.round: Round | None = None
        self.closed_by = ""
        self.superseded = False
        self.label = "this GradSync, or its owner,"
        self.advice = (
            "build a new one on a working group, or rebuild this one there with its plan and "
            "state: sync = sync.rebuild(group)"
        )
        self._watch: list[Step] | None = None
        self._current: weakref.ref[Step] | None = None  # the newest
        # Several: a loss function may take steps itself.
        self._running: dict[int, weakref.ref[Step]] = {}
        self.recorder = Recorder("GradSync", self, self.transport)
        self._group = weakref.ref(resolve(request.span.group))

    @property
    def group(self) -> Group:
        """Group of the engine.

        Raises:
            ClosedError: the group no longer exists.
        """
        group = self._group()
        if group is None:
            raise ClosedError("the group of this GradSync is gone; build a new one")
        return group

    def at(self) -> tuple[int, str]:
        """Number of the running or else the next step, and its phase."""
        step = None if self._current is None else self._current()
        if self.is_closed:
            return self.step, "closed"
        if step is None or step.phase == "between steps":
            return self.step, "between steps"
        return step.number, "in backward" if self.in_backward else step.phase

    @property
    def is_closed(self) -> bool:
        """True if no further step may start."""
        return bool(self.closed_by)

    @property
    def closed_text(self) -> str:
        """Error text of a closed engine: reason and advice."""
        return f"{self.label} is closed ({self.closed_by}); {self.advice}"

    @property
    def is_in_step(self) -> bool:
        """True if a step was opened and has not ended."""
        return any(step() is not None for step in self._running.values())

    def check_usable(self) -> None:
        """Raise if no further step may start, or if the transport has failed.

        Raises:
            ClosedError: the engine is closed.
        """
        if self.transport.closed_by and not self.is_closed:
            self.close(self.transport.closed_by)
        if self.closed_by:
            raise ClosedError(self.closed_text)

    # Steps

    def open(self, method: Method, *, with_stats: bool) -> Step:
        """Open the next step.

        Args:
            method: the call that opens it, on all ranks that contribute.
            with_stats: True if times, norm and finiteness are wanted.

        Raises:
            ClosedError: the engine is closed.
            ReentryError: backward of another step runs.
            UnevenError: the other ranks have left the loop.
        """
        turn = self.round
        if turn is not None and turn.over:
            # No other rank would take part.
            self._check_open()
            turn.synced += 1
            raise UnevenError(f"rank {self.transport.rank} at step {self.step}: {turn.problem()}")
        step = self._new_step(self.code, method, with_stats=with_stats)
        step.hook_states = self.hook_states or ()
        if turn is not None:
            step.has_next = turn.has_next
            turn.synced += 1
            if turn.synced > 1:
                step.fail(turn.problem())
        return step

    def open_gather(self) -> Step:
        """Open a step that turns shards into whole leaves; not part of a round of uneven inputs.

        Raises:
            ClosedError, ReentryError: as `open`.
        """
        if self.gathering is None:
            raise InternalError("the schedule gives no shards to gather")
        return self._new_step(self.gathering, Method.ALL_GATHER, with_stats=False)

    def _new_step(self, code: CompiledProgram, method: Method, *, with_stats: bool) -> Step:
        if self.in_flight is not None:
            self.finish_in_flight()
        self._check_open()
        averages = code is self.code  # False if shards are gathered
        context = StepContext(
            code,
            self.transport,
            self._pool,
            self.scale if averages else WeightScale(self.transport.world_size),
            self.step,
            method,
            with_stats,
            self.recorder,
            self._idle if averages else NO_BUCKETS,
            # Parameters may be infinite, masks for instance.
            self.terms.nonfinite if averages else "propagate",
            self.when,
        )
        self.step += 1
        step = Step(context)
        self._current = self._running[step.number] = weakref.ref(step)
        return step

    def _check_open(self) -> None:
        if self.transport.closed_by or self.closed_by:
            self.check_usable()
        if self.in_backward:
            raise ReentryError(
                f"a step was called on rank {self.transport.rank} while backward of another step "
                f"of the same GradSync runs, which ranks reach at different points; call it in "
                f"the loss function itself, or use another GradSync for it"
            )

    def finish(self, step: Step) -> Outcome:
        """Finish a step, and update the state for the next one.

        Raises:
            Exception: as `fddp.runtime.finish.finish`.
        """
        self.last_failed = True  # until it has succeeded
        try:
            if self.closed_by:  # during the step, perhaps by the very error
                step.raise_failure()
            if is_transformed():
                with outside_transforms():
                    outcome = finish_step(step)
            else:
                outcome = finish_step(step)
        except BaseException as error:
            self._on_failure(step, error)
            raise
        finally:
            self._running.pop(step.number, None)
        self.last_failed = False
        self.finished = self.step
        if self.hook_states is not None:
            self.hook_states = tuple(step.hook_states)
        if self._watch is not None:
            self._watch.append(step)
        report = self._apply_report(step)
        if report.order and self.program.control.with_order:
            reduced = self.program.plan.reduced
            order = [reduced[slot] for slot in report.order]
            self.set_plan(self.terms.rebuilt(self.program.plan, order))
        if self.terms.skips_unused:
            self._idle = _unused_buckets(self.program, report)
        return outcome

    def _on_failure(self, step: Step, error: BaseException) -> None:
        if step.is_orderly:
            dump_on_failure(error)
            self._apply_report(step)
            return
        self.recorder.fail()
        dump_on_failure(error, breaks=True)
        # A collective was left half-done: ranks no longer agree on the next one.
        reason = error_text(error)
        self.transport.publish_step_failure(step.number, type(error).__name__)
        self.transport.abandon(reason)
        self.transport.note_interrupted_step()
        self.close(reason)

    def note_backward(self, *, runs: bool) -> None:
        """Note that backward of a step begins to run, or has ended."""
        self.in_backward = runs

    def note_arrivals(self, step: Step) -> None:
        """Note the numbers of gradients that arrived in a step, for the next one."""
        contributions = step.contributions.backward
        if contributions is not None and contributions.leaf_set is not None:
            self.arrivals = contributions.arrivals()

    @contextmanager
    def watched(self) -> Iterator[list[Step]]:
        """Collect the steps that succeed in the block."""
        steps: list[Step] = []
        self._watch = steps
        try:
            yield steps
        finally:
            self._watch = None

    def close(self, reason: str) -> None:
        """Free the communicator and all memory; a second call does nothing."""
        self._pool.clear()
        for code in (self.code, self.gathering):
            if code is not None:
                code.close()
        self.transport.close(reason)
        self.closed_by = self.closed_by or reason

    def supersede(self, reason: str, advice: str) -> None:
        """Close this engine in favour of another."""
        self.close(reason)
        self.closed_by, self.advice, self.superseded = reason, advice, True

    def donate(self, grads: Any) -> None:
        """See `GradSync.donate`."""
        donate(self.program, self._pool, grads)

    def fail_step(self, error: BaseException) -> None:
        """Take part in the next step only to report an error, and raise it."""
        step = self.open(Method.NOTHING, with_stats=False)
        step.fail(error)
        self.publish_step_failure(step.number, error)
        self.finish(step)

    def publish_step_failure(self, step: int, error: BaseException) -> None:
        """Publish an error to ranks that wait for this one in an operator of their loss function.
        Ranks in other steps ignore it.

        Args:
            step: number of the step.
            error: this rank's error. A `PeerError` is not published: the rank that failed has
                published its own.
        """
        if not isinstance(error, PeerError):
            self.transport.publish_step_failure(step, error_text(error)[:_MAX_FAILURE_CHARS])

    def _apply_report(self, step: Step) -> ControlReport:
        """Update the state with the control word; the same on all ranks, also after a failure."""
        report = step.report
        if report is None:
            raise InternalError("a step ended in order without a control word")
        if step.program.schedule.result == "replicated":
            return report  # gathering shards has no weights and no round
        if self.round is not None:
            self.round.any_next = report.has_next > 0
            self.round.over = report.has_next == 0
        if report.agreed and not report.failed and report.active:
            total, scale = report.total_weight, step.context.scale
            is_equal = report.total_squared * report.active == total * total
            if not (is_equal and total / report.active == scale.unit):
                scale = scale.next(total, report.total_squared, report.active)
            self.scale = scale
        return report


def _unused_buckets(program: Program, report: ControlReport) -> frozenset[int]:
    users = dict(zip(program.plan.reduced, report.users, strict=True))
    return frozenset(
        number
        for number, bucket in enumerate(program.plan.buckets)
        if not bucket.sparse
        and number not in program.schedule.retained
        and not any(users[leaf] for leaf in bucket.leaves)
    )


def any_rank_has_input(engine: Engine, mine: bool) -> bool:
    """Return True if any rank has input, or an error to report; a collective call."""
    entry = engine.recorder.launched("vote", engine.step, 1)
    entry.note_wait()
    votes = engine.transport.exchange(bytes([mine]), "votes")
    entry.note_done()
    return any(vote != b"\0" for vote in votes)
