"""From step to step: what a `GradSync` carries on between its synchronisations."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from fddp.core.check import check_schedule
from fddp.core.numerics.weighting import WeightScale
from fddp.core.plan.plan import BucketPlan
from fddp.core.protocol.calls import Method
from fddp.core.protocol.control_word import ControlReport
from fddp.core.protocol.expected_counts import Arrivals
from fddp.core.schedule.builder import make_all_gather_schedule
from fddp.core.schedule.piggyback import with_separate_word
from fddp.core.schedule.schedule import Schedule
from fddp.errors import (
    ClosedError,
    DesyncError,
    InternalError,
    PeerError,
    RankLostError,
    ReentryError,
    SyncTimeoutError,
    UnevenError,
    error_text,
)
from fddp.hooks.hook import Hook
from fddp.native.buffer_pool import BufferPool
from fddp.runtime.agreement import SyncConfig, agree_on_hook, validate_across_ranks
from fddp.runtime.context import Outcome, StepContext
from fddp.runtime.donation import donate
from fddp.runtime.hook_binding import BoundHook
from fddp.runtime.hook_step import HookedStep
from fddp.runtime.inputs import outside_transforms
from fddp.runtime.program import Program, make_program
from fddp.runtime.step import Step
from fddp.sync.lifecycle import Lifecycle
from fddp.sync.request import EngineSpec, deterministic_hook_error, usable_transport
from fddp.sync.rounds import Round
from fddp.telemetry.flight.dump import dump_on_failure
from fddp.telemetry.flight.recorder import Recorder
from fddp.transport import Group, Transport, open_transport, resolve

_LONGEST_ALARM = 500  # characters


class Engine:
    """Opens a session for each step, and takes note of how it ended. Making one is a collective
    call.

    Args:
        request: what the caller asked for.

    Attributes:
        transport: carries the collectives.
        terms: what ranks have agreed on.
        program: what a step carries out.
        gathering: what turns shards into whole leaves, where steps leave shards.
        arrivals: what the last backward pass showed.
        in_backward: whether one is running.
        step: number of the next synchronisation.
        hook: the communication hook in force, if there is one.
        bound_hook: the same with what it reduces.
        schedule: what was agreed on; the program's differs from it where a hook takes the place of
            the all-reduce in which the control word would ride.
        hook_states: its state by bucket, carried on from step to step since `set_hook`; None where
            callers hand it in.
        last_failed: whether the last synchronisation ended with an error, on all ranks.
        finished: the number after that of the last synchronisation that went through; 0 before.
        timeout_s: what the caller gave for it.
        recorder: takes note of operations.
        when: what callers say of when the next synchronisation is; ranks that say otherwise are
            not in step.
    """

    def __init__(self, request: EngineSpec) -> None:
        self._foreign = request.is_foreign
        self.timeout_s = request.usable_timeout_s
        self._groups: list[tuple[str, ...]] = []  # those that the transport has opened
        self.transport = open_transport(
            request.span.group, usable_transport(request), request.usable_timeout_s, request.title
        )
        self.bound_hook: BoundHook | None = None
        self.hook_states: tuple[Any, ...] | None = None
        try:
            self.terms = _agreed_terms(self.transport, request)
            self.hook = self.terms.hook
            schedule = self.terms.schedule_of(self.terms.plan)
            self._install(schedule, with_order=self.terms.rebuild is not None)
        except BaseException:
            self.transport.close()
            raise
        self.arrivals: Arrivals | None = None
        self.in_backward = False
        self.step = 0
        self.finished = 0
        self.last_failed = False
        self.when = ""
        self._idle: frozenset[int] = frozenset()
        self._pool = BufferPool(self.transport.empty)
        self.scale = WeightScale(self.transport.world_size, scaling=schedule.scaling)
        self.round: Round | None = None
        self.lifecycle = Lifecycle()
        self._watch: list[Step] | None = None
        self._current: weakref.ref[Step] | None = None  # the newest
        # A loss function may take steps itself.
        self.running: weakref.WeakValueDictionary[int, Step] = weakref.WeakValueDictionary()
        self.recorder = Recorder("GradSync", self, self.transport)
        self._group = weakref.ref(resolve(request.span.group))

    @property
    def group(self) -> Group:
        """What it was made on.

        Raises:
            ClosedError: it is gone.
        """
        group = self._group()
        if group is None:
            raise ClosedError("the group of this GradSync is gone; build a new one")
        return group

    def at(self) -> tuple[int, str]:
        """The number of the step that runs, or else of the next, and what it is at."""
        step = None if self._current is None else self._current()
        if self.is_closed:
            return self.step, "closed"
        if step is None or step.phase == "between steps":
            return self.step, "between steps"
        return step.number, "in backward" if self.in_backward else step.phase

    @property
    def is_closed(self) -> bool:
        """True if no further step may start."""
        return bool(self.lifecycle.closed_by)

    def check_usable(self) -> None:
        """Raise where no further step may start, also because the transport failed meanwhile.

        Raises:
            ClosedError: the engine is closed.
        """
        if self.transport.closed_by and not self.is_closed:
            self.close(self.transport.closed_by)
        self.lifecycle.check()

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
        step = self._new_step(self.program, method, with_stats=with_stats)
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
            raise InternalError("shards are gathered only where steps leave some")
        return self._new_step(self.gathering, Method.ALL_GATHER, with_stats=False)

    def _new_step(self, program: Program, method: Method, *, with_stats: bool) -> Step:
        self._check_open()
        averages = program is self.program  # otherwise shards of anything are gathered
        context = StepContext(
            program,
            self.transport,
            self._pool,
            self.scale if averages else WeightScale(self.transport.world_size),
            self.step,
            method,
            with_stats,
            self.recorder,
            self.bound_hook if averages else None,
            self._idle if averages else frozenset(),
            # Parameters may be infinite, masks for instance.
            self.terms.nonfinite if averages else "propagate",
            self.when,
        )
        self.step += 1
        bound_hook = context.bound_hook
        step = Step(context) if bound_hook is None else HookedStep(context, bound_hook)
        self._current = weakref.ref(step)
        self.running[step.number] = step
        return step

    def _check_open(self) -> None:
        if self.transport.closed_by or self.lifecycle.closed_by:
            self.check_usable()
        if self.in_backward:
            raise ReentryError(
                f"a step was called on rank {self.transport.rank} while backward of another step "
                f"of the same GradSync runs, where ranks reach it at different points; call it in "
                f"the loss function itself, or use a GradSync of its own for it"
            )

    def finish(self, step: Step) -> Outcome:
        """Run a step to its end, and note what later steps need of it.

        Raises:
            Exception: as `Step.finish`.
        """
        self.last_failed = True  # until it has succeeded
        try:
            # Results outlive the caller's inference mode, and buffers are reused after it.
            with outside_transforms(), torch.inference_mode(False):
                outcome = step.finish()
        except BaseException as error:
            self._on_failure(step, error)
            raise
        finally:
            self.running.pop(step.number, None)
        self.last_failed = False
        self.finished = self.step
        if self.hook_states is not None:
            self.hook_states = tuple(step.hook_states)
        if self._watch is not None:
            self._watch.append(step)
        report = self._take_note(step)
        if report.order and self.program.control.with_order:
            reduced = self.program.reduced
            order = [reduced[slot] for slot in report.order]
            self.set_plan(self.terms.rebuilt(self.program.plan, order))
        if self.terms.skips_unused:
            self._idle = self._unused_buckets(report)
        return outcome

    def _on_failure(self, step: Step, error: BaseException) -> None:
        if step.is_orderly:
            dump_on_failure(error)
            self._take_note(step)
            return
        self.recorder.fail()
        dump_on_failure(error, breaks=True)
        # A collective was left half-done: ranks no longer agree on the next one.
        reason = error_text(error)
        self.transport.publish_step_failure(step.number, type(error).__name__)
        self.transport.abandon(reason)
        self.transport.status.board.doubtful_s = time.perf_counter()
        self.close(reason)

    def _unused_buckets(self, report: ControlReport) -> frozenset[int]:
        """Those that may be left out of the next step."""
        program = self.program
        users = dict(zip(program.reduced, report.users, strict=True))
        return frozenset(
            number
            for number, bucket in enumerate(program.plan.buckets)
            if not bucket.sparse
            and number not in program.schedule.retained
            and not any(users[leaf] for leaf in bucket.leaves)
        )

    @contextmanager
    def watched(self) -> Iterator[list[Step]]:
        """Collects the sessions that are closed meanwhile."""
        steps: list[Step] = []
        self._watch = steps
        try:
            yield steps
        finally:
            self._watch = None

    def set_plan(self, plan: BucketPlan) -> None:
        """Goes on with another plan for the same leaves; all ranks must at the same step."""
        if self.bound_hook is not None and self.bound_hook.stateful:
            raise ValueError(
                f"the plan can't change under {self.bound_hook.hook.name}, whose state is by "
                f"bucket; tune without the hook, and pass on the plan"
            )
        self._install(self.terms.schedule_of(plan), with_order=False)
        self._pool.clear()

    def set_hook(self, hook: Hook[Any] | None) -> None:
        """Reduces buckets by another hook from the next step on, and carries its state on from step
        to step; a collective call.

        Raises:
            ValueError: the schedule has no place for it, or is deterministic.
            PlanMismatchError: ranks passed different hooks.
        """
        agree_on_hook(self.transport, hook)
        if hook is not None and self.schedule.deterministic:
            raise ValueError(deterministic_hook_error(hook))
        bound_hook = None if hook is None else BoundHook.of(hook, self.program)
        self.hook = hook
        self._install(self.schedule, with_order=self.program.control.with_order)
        self.hook_states = None if bound_hook is None else bound_hook.init_states(self.program)

    def close(self, reason: str) -> None:
        """Free the communicator and all memory; a second call does nothing."""
        self._pool.clear()
        self.transport.close(reason)
        self.lifecycle.close(reason)

    def supersede(self, reason: str, advice: str) -> None:
        """Close this engine in favour of another."""
        self.close(reason)
        self.lifecycle.supersede(reason, advice)

    def restore(
        self,
        *,
        step: int,
        finished: int,
        unit: float,
        arrivals: Arrivals | None,
        hook_states: tuple[Any, ...] | None,
    ) -> None:
        """Takes up what another engine had come to; the first three are the same on all ranks."""
        self.step, self.finished, self.arrivals = step, finished, arrivals
        self.scale = replace(self.scale, unit=unit)
        self.hook_states = hook_states

    def donate(self, grads: Any) -> None:
        """Takes a tree of results back; see `GradSync.donate`."""
        donate(self.program, self._pool, grads)

    def fail_step(self, error: BaseException) -> None:
        """Takes part in the next synchronisation only to say what went wrong; raises it."""
        step = self.open(Method.NOTHING, with_stats=False)
        step.fail(error)
        self.publish_step_failure(step.number, error)
        self.finish(step)

    def publish_step_failure(self, step: int, error: BaseException) -> None:
        """Tells ranks that wait for this one in operators which their loss function calls. Nobody
        else looks for it, and those in another step do not take it for theirs.

        Args:
            step: its number.
            error: what went wrong here; of a `PeerError` the rank that failed has told.
        """
        if not isinstance(error, PeerError):
            self.transport.publish_step_failure(step, error_text(error)[:_LONGEST_ALARM])

    # Parts

    def _install(self, schedule: Schedule, *, with_order: bool) -> None:
        """Proves what is about to be carried out, and opens the groups that it needs."""
        self.schedule = schedule
        if self.hook is not None:
            schedule = with_separate_word(schedule)
        check_schedule(schedule)
        gather = make_all_gather_schedule(schedule) if schedule.result == "sharded_mean" else None
        if gather is not None:
            check_schedule(gather)
        groups = sorted({*schedule.groups, *(gather.groups if gather else ())})
        if groups != self._groups:
            self.transport.open_subgroups(schedule.topology, groups)
            self._groups = groups
        rank = self.transport.rank
        foreign = self._foreign
        self.program = make_program(schedule, rank, with_order=with_order, foreign=foreign)
        self.bound_hook = None if self.hook is None else BoundHook.of(self.hook, self.program)
        if with_order and self.bound_hook is not None and self.bound_hook.stateful:
            # State is by bucket, so that plans stay as they are.
            self.program = make_program(schedule, rank, with_order=False, foreign=foreign)
        self.gathering: Program | None = None
        if gather is not None:
            self.gathering = make_program(gather, rank, with_order=False, foreign=foreign)

    def _take_note(self, step: Step) -> ControlReport:
        """Note the consequences of the control word for later steps; alike on all ranks, also
        after a failure."""
        report = step.report
        if report is None:
            raise InternalError("a step ended in order without a control word")
        if step.program.schedule.result == "replicated":
            return report  # weights and rounds have no part in gathering shards
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


def _agreed_terms(transport: Transport, request: EngineSpec) -> SyncConfig:
    """What is wrong on this rank alone is told to the others before it is raised."""
    try:
        terms = request.terms(transport)
    except (ClosedError, DesyncError, RankLostError, SyncTimeoutError):
        raise  # from which nobody can be told
    except Exception as error:
        return validate_across_ranks(transport, None, error)
    return validate_across_ranks(transport, terms, None)


def any_rank_has_input(engine: Engine, mine: bool) -> bool:
    """Return True if any rank has input, or an error to report; a collective call."""
    entry = engine.recorder.launched("vote", engine.step, 1)
    entry.waited_s = entry.launched_s
    votes = engine.transport.exchange(bytes([mine]), "votes")
    entry.done_s = time.perf_counter()
    return any(vote != b"\0" for vote in votes)
