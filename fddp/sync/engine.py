"""From step to step: what a `GradSync` carries on between its synchronisations."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
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
    TreeMismatchError,
    UnevenError,
    error_text,
)
from fddp.hooks.hook import Hook
from fddp.native.buffer_pool import BufferPool
from fddp.runtime.agreement import SyncConfig, agree_on_hook, validate_across_ranks
from fddp.runtime.context import Outcome, Setting
from fddp.runtime.donation import donate
from fddp.runtime.hook_binding import Attached
from fddp.runtime.inputs import outside_transforms
from fddp.runtime.nonfinite import Policy
from fddp.runtime.program import Program, make_program
from fddp.runtime.step import Session
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
        attached: the same with what it reduces.
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
        self.attached: Attached | None = None
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
        self._scale = WeightScale(self.transport.world_size, scaling=schedule.scaling)
        self._round: Round | None = None
        self._closed_by = ""  # why no further step may start
        self._gave_way = False
        self._named = "this GradSync, or what it belongs to,"
        self._instead = (
            "build a new one on a working group, or go on with this one's plan and state there: "
            "sync = sync.rebuild(group)"
        )
        self._watch: list[Session] | None = None
        self._current: weakref.ref[Session] | None = None  # the newest
        # Steps that have begun and not ended, by number; a loss function may take steps itself.
        self._running: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
        self.recorder = Recorder("GradSync", self, self.transport)
        self._group = weakref.ref(resolve(request.span.group))

    @property
    def is_shut(self) -> bool:
        """Whether no further step may start."""
        return bool(self._closed_by)

    @property
    def gave_way(self) -> bool:
        """Whether another goes on in its place."""
        return self._gave_way

    @property
    def closed_text(self) -> str:
        """Why no further step may start, and what to do."""
        return f"{self._named} is closed ({self._closed_by}); {self._instead}"

    def name_it(self, what: str, instead: str) -> None:
        """What callers know it as, and what to do once it is closed, for the text of errors."""
        self._named, self._instead = what, instead

    def check_usable(self) -> None:
        """Raises where no further step may start, also because its transport failed between steps.

        Raises:
            ClosedError: so it is; the text says why, and what to do.
        """
        if self.transport.closed_by and not self._closed_by:
            self.shut(self.transport.closed_by)
        if self._closed_by:
            raise ClosedError(self.closed_text)

    @property
    def runs_step(self) -> bool:
        """Whether a synchronisation has begun and not ended."""
        return len(self._running) > 0

    @property
    def in_round(self) -> bool:
        """Whether steps belong to a loop of `uneven`."""
        return self._round is not None

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
        session = None if self._current is None else self._current()
        if self._closed_by:
            return self.step, "closed"
        if session is None or session.phase == "between steps":
            return self.step, "between steps"
        return session.setting.step, "in backward" if self.in_backward else session.phase

    # Steps

    def open(self, method: Method, *, with_stats: bool) -> Session:
        """A session for the next step.

        Args:
            method: the call that it belongs to, on all ranks that bring something.
            with_stats: whether times, norm and finiteness are wanted.

        Raises:
            ClosedError: there can be none.
            ReentryError: backward of another step runs.
            UnevenError: the other ranks have left the loop.
        """
        self._check_open()
        turn = self._round
        if turn is not None and turn.over:
            # Nobody would meet this rank.
            turn.synced += 1
            raise UnevenError(f"rank {self.transport.rank} at step {self.step}: {turn.problem()}")
        session = self._session(
            self.program,
            method,
            self._scale,
            self.attached,
            with_stats=with_stats,
            nonfinite=self.terms.nonfinite,
        )
        session.hook_states = self.hook_states or ()
        if turn is not None:
            session.has_next = turn.has_next
            turn.synced += 1
            if turn.synced > 1:
                session.fail(turn.problem())
        return session

    def open_gathering(self) -> Session:
        """A session that turns shards into whole leaves; no step in the sense of `uneven`.

        Raises:
            ClosedError, ReentryError: as `open`.
        """
        self._check_open()
        if self.gathering is None:
            raise InternalError("shards are gathered only where steps leave some")
        scale = WeightScale(self.transport.world_size)
        # Parameters may be infinite, masks for instance.
        method = Method.ALL_GATHER
        return self._session(
            self.gathering, method, scale, None, with_stats=False, nonfinite="propagate"
        )

    def close(self, session: Session) -> Outcome:
        """Runs a session to its end, and takes note of it.

        Raises:
            Exception: what `Session.finish` raises.
        """
        self.last_failed = True  # until it has gone through
        try:
            # Results outlive the caller's inference mode, and buffers are used again after it.
            with outside_transforms(), torch.inference_mode(False):
                outcome = session.finish()
        except BaseException as error:
            if session.orderly:
                dump_on_failure(error)
                self._take_note(session)
            else:
                self.recorder.fail()
                dump_on_failure(error, breaks=True)
                # A step was left half done: ranks no longer agree on what comes next.
                reason = error_text(error)
                self.transport.publish_step_failure(session.setting.step, type(error).__name__)
                self.transport.abandon(reason)
                self.transport.status.board.doubtful_s = time.perf_counter()
                self.shut(reason)
            raise
        finally:
            self._running.pop(session.setting.step, None)
        self.last_failed = False
        self.finished = self.step
        if self.hook_states is not None:
            self.hook_states = tuple(session.hook_states)
        if self._watch is not None:
            self._watch.append(session)
        report = self._take_note(session)
        if report.order and self.program.control.with_order:
            reduced = self.program.reduced
            order = [reduced[slot] for slot in report.order]
            self.adopt(self.terms.rebuilt(self.program.plan, order))
        self._idle = self._unused_buckets(report) if self.terms.skips_unused else frozenset()
        return outcome

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
    def watched(self) -> Iterator[list[Session]]:
        """Collects the sessions that are closed meanwhile."""
        sessions: list[Session] = []
        self._watch = sessions
        try:
            yield sessions
        finally:
            self._watch = None

    def adopt(self, plan: BucketPlan) -> None:
        """Goes on with another plan for the same leaves; all ranks must at the same step."""
        if self.attached is not None and self.attached.stateful:
            raise ValueError(
                f"the plan can't change under {self.attached.hook.name}, whose state is by bucket; "
                f"tune without the hook, and pass on the plan"
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
        attached = None if hook is None else Attached.of(hook, self.program)
        self.hook = hook
        self._install(self.schedule, with_order=self.program.control.with_order)
        self.hook_states = None if attached is None else attached.init_states(self.program)

    def shut(self, reason: str) -> None:
        """Frees the communicator and all memory; a second call does nothing."""
        self._pool.clear()
        self.transport.close(reason)
        self._closed_by = self._closed_by or reason

    def give_way(self, reason: str, instead: str) -> None:
        """Closes it in favour of another, which callers are pointed to."""
        self.shut(reason)
        self._closed_by, self._instead, self._gave_way = reason, instead, True

    @property
    def scale(self) -> WeightScale:
        """The agreed unit of weight."""
        return self._scale

    def carry_on(
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
        self._scale = replace(self._scale, unit=unit)
        self.hook_states = hook_states

    def donate(self, grads: Any) -> None:
        """Takes a tree of results back; see `GradSync.donate`."""
        donate(self.program, self._pool, grads)

    def fail_step(self, error: BaseException) -> None:
        """Takes part in the next synchronisation only to say what went wrong; raises it."""
        session = self.open(Method.NOTHING, with_stats=False)
        session.fail(error)
        self.raise_alarm(session.setting.step, error)
        self.close(session)

    def raise_alarm(self, step: int, error: BaseException) -> None:
        """Tells ranks that wait for this one in operators which their loss function calls. Nobody
        else looks for it, and those in another step do not take it for theirs.

        Args:
            step: its number.
            error: what went wrong here; of a `PeerError` the rank that failed has told.
        """
        if not isinstance(error, PeerError):
            self.transport.publish_step_failure(step, error_text(error)[:_LONGEST_ALARM])

    def init_states(self) -> tuple[Any, ...]:
        """The hook's state of each bucket before the first step; () where there is none to keep."""
        return self.attached.init_states(self.program) if self.attached is not None else ()

    def checked_states(self, states: Any, way: str) -> Sequence[Any]:
        """The hook's states as a caller handed them in; `way` says how callers do.

        Raises:
            ValueError: there are none where the hook needs some.
            TreeMismatchError: they are not like those of `init_states`.
        """
        attached = self.attached
        if attached is not None and attached.stateful:
            if states is None:
                raise ValueError(
                    f"{attached.hook.name} keeps state, which this call would lose; begin with "
                    f"sync.init_state(), and pass the state on by {way}"
                )
            return attached.checked(states)
        if states is not None and states != ():
            raise TreeMismatchError(
                f"there is no hook that keeps state, and the state is a {type(states).__name__}; "
                f"pass what init_state gave, which is ()"
            )
        return ()

    # Rounds of `fddp.uneven`

    def any_has(self, mine: bool) -> bool:
        """Whether any rank has input, or anything else to tell; a collective call."""
        entry = self.recorder.launched("vote", self.step, 1)
        entry.waited_s = entry.launched_s
        votes = self.transport.exchange(bytes([mine]), "votes")
        entry.done_s = time.perf_counter()
        return any(vote != b"\0" for vote in votes)

    def begin_round(self, turn: Round) -> Round:
        """Steps belong to this round from now on."""
        self._round = turn
        return turn

    def end_rounds(self) -> None:
        """Steps belong to no round any more."""
        self._round = None

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
        self.attached = None if self.hook is None else Attached.of(self.hook, self.program)
        if with_order and self.attached is not None and self.attached.stateful:
            # State is by bucket, so that plans stay as they are.
            self.program = make_program(schedule, rank, with_order=False, foreign=foreign)
        self.gathering: Program | None = None
        if gather is not None:
            self.gathering = make_program(gather, rank, with_order=False, foreign=foreign)

    def _check_open(self) -> None:
        self.check_usable()
        if self.in_backward:
            raise ReentryError(
                f"a step was called on rank {self.transport.rank} while backward of another step "
                f"of the same GradSync runs, where ranks reach it at different points; call it in "
                f"the loss function itself, or use a GradSync of its own for it"
            )

    def _session(
        self,
        program: Program,
        method: Method,
        scale: WeightScale,
        attached: Attached | None,
        *,
        with_stats: bool,
        nonfinite: Policy,
    ) -> Session:
        idle = self._idle if program is self.program else frozenset()
        setting = Setting(
            program,
            self.transport,
            self._pool,
            scale,
            self.step,
            method,
            with_stats,
            self.recorder,
            attached,
            idle,
            nonfinite,
            self.when,
        )
        self.step += 1
        session = Session(setting)
        self._current = weakref.ref(session)
        self._running[session.setting.step] = session
        return session

    def _take_note(self, session: Session) -> ControlReport:
        """What the control word means for later steps; the same on all ranks, also of a failure."""
        report = session.report
        if report is None:
            raise InternalError("a step ended in good order without a control word")
        if session.setting.program.schedule.result == "replicated":
            return report  # weights and rounds have no part in gathering shards
        if self._round is not None:
            self._round.any_next = report.has_next > 0
            self._round.over = report.has_next == 0
        if report.agreed and not report.failed and report.active:
            self._scale = session.setting.scale.next(
                report.total_weight, report.total_squared, report.active
            )
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
