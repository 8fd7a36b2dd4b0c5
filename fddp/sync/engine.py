"""Engine of a `GradSync`: the one place that opens, fails and finishes steps and rebuilds plans."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor

from fddp.core.check import check_schedule
from fddp.core.plan.defaults import timeout_error
from fddp.core.plan.plan import BucketPlan
from fddp.core.protocol.calls import Method
from fddp.core.protocol.control_word import ControlReport
from fddp.core.protocol.expected_counts import Arrivals
from fddp.core.schedule.builder import make_all_gather_schedule
from fddp.core.schedule.piggyback import with_separate_word
from fddp.core.schedule.schedule import Schedule, summands
from fddp.core.schedule.stages import count_stages
from fddp.errors import (
    ClosedError,
    DesyncError,
    InternalError,
    PeerError,
    RankLostError,
    ReentryError,
    SyncTimeoutError,
    TransformError,
    TreeMismatchError,
    UnevenError,
    error_text,
)
from fddp.hooks.hook import Hook
from fddp.native.buffer_pool import BufferPool
from fddp.runtime.agreement import SyncConfig, agree_on_hook, exchange, validate_across_ranks
from fddp.runtime.compiled import CompiledProgram
from fddp.runtime.contributions import BackwardContributions, Contributions
from fddp.runtime.donation import donate
from fddp.runtime.finish import executor_calls, settle
from fddp.runtime.finish import finish as finish_step
from fddp.runtime.hook_binding import BoundHook, staged
from fddp.runtime.inputs import is_transformed, outside_transforms
from fddp.runtime.program import Program
from fddp.runtime.step import Outcome, Step
from fddp.runtime.stopping import Stopping
from fddp.sync.request import (
    EngineSpec,
    check_noise,
    check_report,
    deterministic_hook_error,
)
from fddp.sync.rounds import Round
from fddp.telemetry.flight.dump import dump_on_failure
from fddp.telemetry.flight.recorder import Recorder
from fddp.telemetry.step_info import SyncInfo
from fddp.transport import Group, Transport, open_transport, resolve
from fddp.transport.mesh import usable_transport

_MAX_FAILURE_CHARS = 500

_labels = count()


@dataclass(frozen=True)
class Setup:
    """Programs of an engine, replaced as a whole by a new plan or hook.

    Attributes:
        schedule: the agreed schedule. With a hook, the program's has a separate control word and
            the stages of the hook.
        hook: the communication hook in force, if there is one.
        code: the program of a step.
        gathering: the program that turns shards into whole leaves, if steps give shards.
    """

    schedule: Schedule
    hook: Hook[Any] | None
    code: CompiledProgram
    gathering: CompiledProgram | None


class Engine:
    """Opens and finishes steps, and keeps the state between them. Making one is a collective call.

    Args:
        request: the caller's request.
    """

    def __init__(self, request: EngineSpec) -> None:
        group = request.span.group
        name = usable_transport(request.transport, group)
        timeout_s = None if timeout_error(request.timeout_s) else request.timeout_s
        # Ranks agree on the transport ...
        self.transport = open_transport(group, name, timeout_s, request.title)
        # Memory of buckets; buffers come back as soon as no result uses them.
        self._pool = BufferPool(self.transport.empty)
        # True if this rank's trees have arrays of another library.
        self._foreign = request.is_foreign
        # Axes for which the transport has groups; they are opened once.
        self._groups: list[tuple[str, ...]] = []
        try:
            # ... on plan and options ...
            self.terms = _agreed_terms(self.transport, request)
            # Devices of the leaves by their label in the plan, as known; steps add theirs.
            self.devices = request.devices(self.terms.plan)
            self.transport.connect(_known_to_all(self.transport, self.terms.plan, self.devices))
            types = {bucket.device.partition("#")[0] for bucket in self.terms.plan.buckets}
            self._averages = self.transport.world_size > 1 and self.transport.averages(types)
            # ... and on the groups along the axes of the schedule, which is proved first.
            schedule = self.schedule_of(self.terms.plan, self.terms.hook)
            self.setup = self._made(schedule, self.terms.hook, self.terms.rebuild is not None)
            self.transport.hold_group()
        except BaseException:
            self.transport.close()
            raise
        # Summands of all ranks, each of which says in its word whether another step follows.
        self._summands = summands(schedule)
        # Limit that the caller asked for, for a rebuild.
        self.timeout_s = request.timeout_s
        # Number of the next step; one more than that of the last successful step, 0 before.
        self.step = self.finished = 0
        # True during a step, and from one that ended with an error on.
        self.last_failed = False
        # Steps that were opened and have not ended, by number: several, because a loss function may
        # take steps itself.
        self._running: dict[int, weakref.ref[Step]] = {}
        # Waits for the step that was started and not awaited, if there is one. Raises no error of
        # the step, as its handle does, but `TransformError` if it can't be awaited here.
        self.in_flight: Callable[[], object] | None = None
        # The last step, if the next call raises its errors: only under `report="next"`, where its
        # report has not been read, or this rank failed.
        self._unread: Step | None = None
        # Flag of non-finite results of the last step. None if its report was read at once, or they
        # are propagated.
        self.found_inf: Tensor | None = None
        # True while backward of a step runs, in which no other step may begin.
        self.in_backward = False
        # Arrivals of the last backward pass, by which the next one is expected to be like it.
        self.arrivals: Arrivals | None = None
        # Buckets that no rank used in the last step, and the next one leaves out.
        self._idle: frozenset[int] = frozenset()
        # State of the hook by bucket, from `set_hook` on; None if callers pass it.
        self.hook_states: tuple[Any, ...] | None = None
        # Requests to stop, which an engine that replaces this one takes over.
        self.stopping = Stopping()
        # "own" once this rank has said that its next step is the last; "another's" once another has
        # taken its last step, so that none can follow on this group.
        self.departure: Literal["none", "own", "another's"] = "none"
        # Round of the loop over uneven inputs, while one runs.
        self.round: Round | None = None
        # Reason for which no further step may start; "" while the engine is open. Owner of the
        # engine and advice, for its error.
        self.closed_by = ""
        self.label = "this GradSync, or its owner,"
        self.advice = (
            "build a new one on a working group, or rebuild this one there with its plan and "
            "state: sync = sync.rebuild(group)"
        )
        # True if another engine replaces this one.
        self.superseded = False
        # Steps that succeed, while somebody collects them.
        self._collected: list[Step] | None = None
        # Name of this engine with its plan and hook in graphs.
        self.graph_label = _new_label()
        # Info of the last step of a graph that asked for it.
        self.graph_info: SyncInfo | None = None
        self.recorder = Recorder("GradSync", self, self.transport)
        # Weak, as the engine must not keep a group from being freed.
        self._group = weakref.ref(resolve(group))

    def schedule_of(self, plan: BucketPlan, hook: Hook[Any] | None) -> Schedule:
        """Return the schedule of a plan under a hook, which expects shares of the mean."""
        return self.terms.schedule_of(plan, averages=self._averages and hook is None)

    def _made(self, agreed: Schedule, hook: Hook[Any] | None, with_order: bool) -> Setup:
        """Prove a schedule, bind a hook to it, and open the groups that it needs.

        Raises:
            ScheduleError: the schedule does not give its result.
            ValueError: the hook has no place in it.
        """
        schedule = agreed
        if hook is not None:
            schedule = with_separate_word(schedule)
        elif count_stages(schedule):
            raise ValueError(
                "the schedule has stages of a communication hook, and there is no hook; pass the "
                "hook, or a schedule without stages"
            )
        check_schedule(schedule)
        gather = make_all_gather_schedule(schedule) if schedule.result == "sharded_mean" else None
        if gather is not None:
            check_schedule(gather)
        groups = sorted({*schedule.groups, *(gather.groups if gather else ())})
        if groups != self._groups:
            self.transport.open_subgroups(schedule.topology, groups)
            self._groups = groups
        rank, foreign = self.transport.rank, self._foreign
        defers = self.terms.report == "next"
        noise = self.terms.noise
        program, bound = Program(schedule, rank, with_order, foreign, defers, noise), None
        if hook is not None:
            program = staged(program, hook)
            if program.schedule is not schedule:
                check_schedule(program.schedule)
            bound = BoundHook.of(hook, program, self.devices)
            if bound.stateful:  # by bucket: the plan must not be rebuilt
                program = replace(program, with_order=False)
        return Setup(
            agreed,
            hook,
            CompiledProgram(program, self.transport, bound, self.devices),
            None
            if gather is None
            else CompiledProgram(
                Program(gather, rank, False, foreign), self.transport, None, self.devices
            ),
        )

    @property
    def program(self) -> Program:
        """The program of a step."""
        return self.setup.code.program

    @property
    def schedule(self) -> Schedule:
        """The agreed schedule."""
        return self.setup.schedule

    @property
    def hook(self) -> Hook[Any] | None:
        """The communication hook in force."""
        return self.setup.hook

    @property
    def gathering(self) -> CompiledProgram | None:
        """The program that turns shards into whole leaves, if steps give shards."""
        return self.setup.gathering

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
        # A copy: other threads open and end steps meanwhile.
        found = [step() for step in [*self._running.values()]]
        step = next((step for step in reversed(found) if step is not None), None)
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
        return any(step() is not None for step in [*self._running.values()])

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

    def run(
        self,
        method: Method,
        begin: Callable[[Step], Any],
        *,
        with_stats: bool = False,
        label: str = "",
    ) -> Outcome:
        """Run a step, from its opening to its outcome; its halves are `start` and `finish`.

        Args:
            method: the call that takes the step, on all ranks that contribute.
            begin: passes this rank's contribution to the step, by `Step.begin`. Its result is
                `Outcome.begin_result`. An error fails the step on this rank, and is
                raised once all ranks know.
            with_stats: True if times, norm and finiteness are wanted.
            label: text that must be the same on all ranks, beside the number of the step.

        Raises:
            Exception: as `open` and `finish`.
        """
        number = self.step
        try:
            return self.finish(self.start(method, begin, with_stats=with_stats, label=label))
        except BaseException as error:
            self.end_interrupted(number, error)
            raise

    def start(
        self,
        method: Method,
        begin: Callable[[Step], Any],
        *,
        with_stats: bool = False,
        label: str = "",
    ) -> Step:
        """Open a step, and begin it; as `run`. Errors of `begin` are raised by `finish`."""
        step = self.open(method, with_stats=with_stats, label=label)
        try:
            step.take_begin_result(begin(step))
        except BaseException as error:
            self.fail(step, error)
        return step

    def open(self, method: Method, *, with_stats: bool = False, label: str = "") -> Step:
        """Open the next step. The caller calls `Step.begin`, or else `fail`, and then `finish`.

        Raises:
            ClosedError: the engine is closed.
            ReentryError: backward of another step runs.
            TransformError: the step is captured in a graph, and can't be. Other ranks have read
                the error in a step beside the capture.
            UnevenError: the other ranks have left the loop.
        """
        is_captured = bool(self.setup.code.accelerators) and self.is_captured
        if is_captured and (error := self.capture_error(with_stats=with_stats)) is not None:
            with self.beside_capture():
                self.fail_step(error)
        if self.in_flight is not None:
            self.finish_in_flight()
        if self._unread is not None:
            self.check()
        if self.transport.closed_by or self.closed_by:
            self.check_usable()
        if self.departure == "another's":
            self.check_complete()
        if self.in_backward:
            raise ReentryError(
                f"a step was called on rank {self.transport.rank} while backward of another step "
                f"of the same GradSync runs, which ranks reach at different points; call it in "
                f"the loss function itself, or use another GradSync for it"
            )
        setup, turn = self.setup, self.round
        code, idle, nonfinite = setup.code, self._idle, self.terms.nonfinite
        if method is Method.ALL_GATHER and setup.gathering is not None:
            # Parameters may be infinite, masks for instance; and inputs have no part in it.
            code, idle, nonfinite, turn = setup.gathering, frozenset(), "propagate", None
        if turn is not None:
            turn.count_step()
            if turn.over:  # no other rank would take part
                problem = turn.problem()
                raise UnevenError(f"rank {self.transport.rank} at step {self.step}: {problem}")
        step = Step(
            code,
            executor_calls(),
            self.transport,
            self._pool,
            self.recorder,
            self.step,
            method,
            label=label,
            idle=idle,
            nonfinite=nonfinite,
            record_time=with_stats,
            # A step within another one is not the last.
            has_next=self.departure != "own" or bool(self._running)
            if turn is None
            else turn.has_next,
            asks_stop=self.stopping.asked,
            hook_states=self.hook_states or (),
            is_captured=is_captured,
        )
        self._running[step.number] = weakref.ref(step)
        self.step += 1
        if turn is not None and turn.synced > 1:
            step.fail(turn.problem())
        return step

    def fail(self, step: Step, error: BaseException) -> None:
        """Fail a step on this rank, which `finish` completes with zeros; also for ranks that wait
        in an operator of their loss function. Ranks in other steps ignore it."""
        step.fail(error)
        self.publish_step_failure(step.number, error)

    def finish(self, step: Step) -> Outcome:
        """Finish a step, and update the state for the next one: idle buckets, and once the plan.

        Raises:
            InternalError: the step has ended before.
            Exception: as `fddp.runtime.finish.finish`.
        """
        if step.number not in self._running:
            raise InternalError(f"step {step.number} was finished a second time")
        is_nested = len(self._running) > 1  # on all ranks
        try:
            self.last_failed = True  # until it has succeeded
            if self.closed_by:  # during the step, perhaps by the very error
                step.raise_failure()
                raise ClosedError(self.closed_text)
            if step.is_captured and not step.code.is_captured:
                raise TransformError(
                    f"step {step.number} was started inside of the capture of a graph, which ended "
                    f"before the step did; end a step in the capture in which it began"
                ) from step.failure
            if is_transformed():
                with outside_transforms():
                    outcome = finish_step(step)
            else:
                outcome = finish_step(step)
            if self.hook_states is not None:
                self.hook_states = tuple(step.hook_states)
            if self._collected is not None:
                self._collected.append(step)
            if step.flags is not None:
                self.found_inf = step.flags.found_inf
            if outcome.report is not None:
                self._take_report(step.program, outcome.report)
            self.finished = self.step
            self.last_failed = False
        except BaseException as error:
            self._on_failure(step, error)
            if not is_nested:
                self._note_failed(step)
            raise
        finally:
            self._running.pop(step.number, None)
        # `leave` may have been called during the step, and rounds of a loop end together.
        is_last = self.departure == "own" and not step.has_next and self.round is None
        if outcome.report is None:
            self._unread = step
            if is_nested:
                self.check()
            elif step.record_time or is_last:  # for its `SyncInfo`, on this rank; or none follows
                try:
                    self.check()
                finally:
                    self._note_failed(step)
            outcome = outcome._replace(report=step.report)
        if is_last:
            self.close(f"this rank has left after step {step.number}")
        return outcome

    def leave(self) -> None:
        """Announce that this rank takes one more step, and none after it.

        Raises:
            ClosedError: the engine is closed.
            UnevenError: a loop over uneven inputs runs.
            ValueError: the others could not go on.
        """
        self.check_usable()
        if self.round is not None:
            raise UnevenError(
                "a rank can't leave within a loop of fddp.uneven, whose rounds all ranks take to "
                "the end; call leave() after it, or request_stop()"
            )
        if self.schedule.result != "replicated_mean":
            raise ValueError(
                "a rank that keeps shards can't leave: no other rank has them; gather them, and "
                "end the loops of all ranks by request_stop()"
            )
        self.transport.announce_leave()
        self.departure = "own"

    def check_complete(self) -> None:
        """Raise if another rank has left after the last step, or `ClosedError` if this one has."""
        if self.departure == "own":
            self.check_usable()
        if self.departure != "another's":
            return
        ranks = self.transport.ranks_leaving()
        raise RankLostError(
            f"step {self.step} on rank {self.transport.rank} of {self.transport.world_size}: "
            f"rank {', '.join(map(str, ranks))} left after the last step, as announced, and "
            f"nothing was lost; go on with the others, sync.rebuild(), and take the step again",
            ranks,
        )

    def check(self) -> None:
        """Read the report of the last step, if that has not happened, and raise its errors.

        Raises:
            TransformError: a graph is captured, and the host would have to wait for the device.
            Exception: as `fddp.runtime.finish.settle`.
        """
        step = self._unread
        if step is None:
            return
        if step.flags is not None and step.flags.are_read_later and self.is_captured:
            raise TransformError(
                f"what the device found in results of step {step.number} can't be read while a "
                f"graph is captured; call check() before the capture"
            )
        self._unread = None
        try:
            with outside_transforms():
                self._take_report(step.program, settle(step))
        except BaseException as error:
            self.last_failed = True
            self._on_failure(step, error)
            raise
        finally:
            del step  # the traceback refers to this frame

    def _note_failed(self, step: Step) -> None:
        """Note a step that failed before other ranks have read its report: all raise its error in
        their next call."""
        if step.program.defers_report and step.life.name == "failed":
            step.keep_word()
            self._unread = step

    def _take_report(self, program: Program, report: ControlReport) -> None:
        """Update the state for the next step, which is alike on all ranks."""
        if report.stop:
            self.stopping.agree()
        if self.round is not None:
            self.round.note(report, program.schedule)
        elif report.has_next < self._summands and self.departure == "none":
            self.departure = "another's"
        if report.order and self.program.control.with_order:
            order = [program.plan.reduced[slot] for slot in report.order]
            self.set_plan(self.terms.rebuilt(program.plan, order))
        if self.terms.skips_unused:
            self._idle = _unused_buckets(self.program, report)

    def forget_report(self) -> None:
        """Leave the report of the last step unread, where other ranks may not read it."""
        self._unread = None

    def end_interrupted(self, number: int, error: BaseException) -> None:
        """End the steps from a number on that an error, as of a signal handler, has interrupted
        before `finish`. Has no effect on others."""
        for left in [n for n in [*self._running] if n >= number]:
            step = self._running.pop(left)()
            self._break(left, error)
            if step is not None:
                step.note("interrupted")

    def _on_failure(self, step: Step, error: BaseException) -> None:
        if step.life.name == "failed":
            dump_on_failure(error)
            if self.round is not None and step.report is not None:
                self.round.note(step.report, step.program.schedule)
            return
        step.note("interrupted")
        self._break(step.number, error)

    def _break(self, number: int, error: BaseException) -> None:
        """Close the engine. A collective was left half-done, or what follows from a step, so ranks
        no longer agree on the next one."""
        self.recorder.fail()
        dump_on_failure(error, breaks=True)
        reason = error_text(error)
        self.transport.publish_step_failure(number, type(error).__name__)
        self.transport.abandon(reason)
        self.transport.note_interrupted_step()
        self.close(reason)

    def note_backward(self, *, runs: bool) -> None:
        """Note that backward of a step begins to run, or has ended."""
        self.in_backward = runs

    def take_round(self, turn: Round | None) -> None:
        """Take a round of the loop over uneven inputs; None at its end."""
        self.round = turn

    def note_arrivals(self, contributions: Contributions) -> None:
        """Note the numbers of gradients that arrived in a backward pass, if there was one, for the
        next."""
        if isinstance(contributions, BackwardContributions) and contributions.leaf_set is not None:
            self.arrivals = contributions.arrivals()

    def note_in_flight(self, wait: Callable[[], object] | None) -> None:
        """Note the wait for a step that was started, or that there is none."""
        self.in_flight = wait

    def finish_in_flight(self) -> None:
        """Wait for a step in flight; its handle raises its errors."""
        in_flight = self.in_flight  # another thread may end the step meanwhile
        if in_flight is not None:
            in_flight()

    # Captures

    @property
    def is_captured(self) -> bool:
        """True if a step would now be captured in a graph."""
        return self.setup.code.is_captured

    def capture_error(self, *, with_stats: bool = False) -> TransformError | None:
        """Return the error of a step that can't be captured in a graph. It is the same on all ranks
        that capture the step.

        Args:
            with_stats: as in `run`.
        """
        if self.terms.report != "next":
            problem = "a step whose report is read at once can't be captured in a graph"
            advice = "pass report='next'"
        elif self.finished == 0:
            problem = "the first step can't be captured in a graph"
            advice = "take one before the capture, as a warm-up"
        elif with_stats:
            problem = "times and norms can't be measured in a step that is captured in a graph"
            advice = "leave out with_info=True"
        elif any(bucket.sparse for bucket in self.program.plan.buckets):
            problem = "sparse gradients, whose sizes the host reads, can't be captured in a graph"
            advice = "make them dense"
        elif not self.transport.orders_by_streams(self.setup.code.accelerators):
            problem = "collectives that the host carries out can't be captured in a graph"
            advice = "use a group whose backend for the device streams order, such as nccl"
        elif any(bucket.device == "cpu" for bucket in self.program.plan.buckets):
            problem = "leaves on the CPU beside those of a device can't be captured in a graph"
            advice = "give them a GradSync of their own, and take its steps outside of the capture"
        elif self.terms.nonfinite == "raise":
            problem = "nonfinite='raise', whose errors the host reads, can't be captured in a graph"
            advice = (
                "ask for nonfinite='skip', and read found_inf between replays. Results of the step "
                "before were not examined, unless check() was called before the capture"
            )
        else:
            return None
        return TransformError(f"{problem}; {advice}")

    @contextmanager
    def beside_capture(self) -> Iterator[None]:
        """Keep a step that fails out of a capture, on a stream of its own: ranks that capture
        nothing wait for it. Its zeros are no memory of the pool, which a stream that is captured
        may have released. The host can't read what the device found in results of the step
        before."""
        with ExitStack() as stack:
            self._pool.clear()
            if self._unread is not None:
                self._unread.leave_flags_unread()
            while self.is_captured:  # also by a stream that torch lends a second time
                device = torch.accelerator.current_accelerator()
                stack.enter_context(torch.Stream(device))
            yield

    # Plan, hook and memory

    def set_plan(self, plan: BucketPlan) -> None:
        """Use another plan for the same leaves from the next step on; the same on all ranks."""
        bound = self.setup.code.hook
        if bound is not None and bound.stateful:
            raise ValueError(
                f"the plan can't change under {bound.hook.name}, whose state is by bucket; tune "
                f"without the hook, and pass on the plan"
            )
        if not self.program.control.with_order:  # else graphs expect another plan anyway
            self.graph_label = _new_label()
        self.setup = self._made(self.schedule_of(plan, self.hook), self.hook, False)
        self._pool.clear()

    def continue_from(self, step: int, finished: int) -> None:
        """Take over the numbers of the next step and of the finished ones from another engine."""
        self.step, self.finished = step, finished

    def note_info(self, info: SyncInfo) -> None:
        """Note the info of a step of a graph."""
        self.graph_info = info

    def release_memory(self, *, keep_views: bool) -> None:
        """Drop the buffers of earlier steps; with `keep_views`, only those that no result uses."""
        if keep_views:
            self._pool.trim()
        else:
            self._pool.clear()

    def set_hook(self, hook: Hook[Any] | None) -> None:
        """Use another hook from the next step on, and keep its state in the engine; a collective
        call.

        Raises:
            ValueError: the schedule has no place for it, or is deterministic.
            PlanMismatchError: ranks passed different hooks.
        """
        self.check()
        agree_on_hook(self.transport, hook)
        if hook is not None and self.schedule.deterministic:
            raise ValueError(deterministic_hook_error(hook))
        check_report(self.terms.report, hook=hook)
        check_noise(True if self.terms.noise else None, hook=hook)
        schedule = self.schedule_of(self.schedule.plan, hook)
        self.graph_label = _new_label()
        self.setup = self._made(schedule, hook, self.program.control.with_order)
        self.hook_states = None if hook is None else self.init_states()

    def init_states(self) -> tuple[Any, ...]:
        """State of the hook by bucket before the first step; () if there is none to keep."""
        bound = self.setup.code.hook
        return () if bound is None else bound.init_states(self.program)

    def checked_states(self, states: Any, source: str) -> tuple[Any, ...]:
        """Return the caller's states, if they have the form of this hook's.

        Args:
            states: the states; None if none were passed.
            source: expression by which callers pass them, for errors.

        Raises:
            ValueError: no states were passed, and the hook needs some.
            TreeMismatchError: the states differ in form from those of `init_states`.
        """
        bound = self.setup.code.hook
        if bound is not None and bound.stateful:
            if states is None:
                raise ValueError(
                    f"{bound.hook.name} keeps state, which this call would lose; begin with "
                    f"sync.init_state(), and pass the state on by {source}"
                )
            return bound.checked(states)
        if states is not None and states != ():
            raise TreeMismatchError(
                f"no hook keeps state, got a state of type {type(states).__name__}; pass the "
                f"result of init_state, which is ()"
            )
        return ()

    def donate(self, grads: Any) -> None:
        """See `GradSync.donate`."""
        donate(self.program, self._pool, grads)

    def fail_step(self, error: BaseException) -> None:
        """Take part in the next step only to report an error, and raise it."""
        self.run(Method.NOTHING, lambda step: self.fail(step, error))

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

    # The end

    @contextmanager
    def collect_steps(self) -> Iterator[list[Step]]:
        """Collect the steps that succeed in the block."""
        steps: list[Step] = []
        self._collected = steps
        try:
            yield steps
        finally:
            self._collected = None

    def close(self, reason: str) -> None:
        """Free the communicator and all memory; a second call does nothing."""
        self._unread = None
        self._pool.clear()
        for code in (self.setup.code, self.setup.gathering):
            if code is not None:
                code.close()
        self.transport.close(reason)
        self.closed_by = self.closed_by or reason

    def supersede(self, reason: str, advice: str) -> None:
        """Close this engine in favour of another."""
        self.close(reason)
        self.transport.drop_groups()
        self.closed_by, self.advice, self.superseded = reason, advice, True


def _agreed_terms(transport: Transport, request: EngineSpec) -> SyncConfig:
    """Return the agreed configuration. An error of this rank is reported to the others first."""
    try:
        terms = request.terms(transport)
    except (ClosedError, DesyncError, RankLostError, SyncTimeoutError):
        raise  # no communication is possible
    except Exception as error:
        return validate_across_ranks(transport, None, error)
    return validate_across_ranks(transport, terms, None)


def _known_to_all(
    transport: Transport, plan: BucketPlan, devices: Mapping[str, torch.device]
) -> list[torch.device]:
    """Return this rank's accelerators of the labels that all ranks know; a collective call."""
    labels = [*dict.fromkeys(bucket.device for bucket in plan.buckets)]
    labels = [label for label in labels if label.partition("#")[0] not in ("cpu", "meta")]
    if not labels:
        return []
    known = exchange(transport, [label in devices for label in labels], [bool], "devices")
    columns = zip(labels, zip(*known, strict=True), strict=True)
    return [devices[label] for label, on_ranks in columns if all(on_ranks)]


def _unused_buckets(program: Program, report: ControlReport) -> frozenset[int]:
    users = dict(zip(program.plan.reduced, report.users, strict=True))
    return frozenset(
        number
        for number, bucket in enumerate(program.plan.buckets)
        if not bucket.sparse
        and number not in program.schedule.retained
        and not any(users[leaf] for leaf in bucket.leaves)
    )


def _new_label() -> str:
    return str(next(_labels))


def any_rank_has_input(engine: Engine, mine: bool) -> bool:
    """Return True if any rank has input, or an error to report; a collective call."""
    entry = engine.recorder.launched("vote", engine.step, 1)
    entry.note_wait()
    votes = engine.transport.exchange(bytes([mine]), "votes")
    entry.note_done()
    return any(vote != b"\0" for vote in votes)
