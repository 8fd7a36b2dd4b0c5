"""Configuration of an engine: agreed options, plan, schedule, program and hook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fddp.core.check import check_schedule
from fddp.core.plan.defaults import timeout_error
from fddp.core.plan.plan import BucketPlan
from fddp.core.schedule.builder import make_all_gather_schedule
from fddp.core.schedule.piggyback import with_separate_word
from fddp.core.schedule.schedule import Schedule
from fddp.core.schedule.stages import count_stages
from fddp.errors import ClosedError, DesyncError, RankLostError, SyncTimeoutError, TreeMismatchError
from fddp.hooks.hook import Hook
from fddp.native.buffer_pool import BufferPool
from fddp.runtime.agreement import SyncConfig, agree_on_hook, validate_across_ranks
from fddp.runtime.compiled import CompiledProgram
from fddp.runtime.hook_binding import BoundHook, staged
from fddp.runtime.program import Program
from fddp.sync.request import EngineSpec, deterministic_hook_error
from fddp.transport import Transport, open_transport
from fddp.transport.mesh import usable_transport


class EngineConfiguration:
    """Transport, plan, schedule, program and hook of an engine.

    Args:
        request: the caller's request.

    Attributes:
        transport: transport of the collectives.
        terms: configuration that ranks have agreed on.
        schedule: the agreed schedule. With a hook, the program's has a separate control word and
            the stages of the hook.
        program: program of a step.
        code: instructions of the program.
        gathering: instructions that turn shards into whole leaves, if steps give shards.
        hook: the communication hook in force, if there is one.
        bound_hook: the hook, bound to the program.
        in_flight: waits for the step that was started and not awaited, if there is one. Never
            raises its error: its handle does.
        hook_states: state of the hook by bucket, kept from step to step after `set_hook`; None if
            callers pass it.
    """

    def __init__(self, request: EngineSpec) -> None:
        self._foreign = request.is_foreign
        self._groups: list[tuple[str, ...]] = []  # opened by the transport
        group = request.span.group
        name = usable_transport(request.transport, group)
        timeout_s = None if timeout_error(request.timeout_s) else request.timeout_s
        self.transport = open_transport(group, name, timeout_s, request.title)
        self._pool = BufferPool(self.transport.empty)
        self.in_flight: Callable[[], object] | None = None
        self.bound_hook: BoundHook | None = None
        self.hook_states: tuple[Any, ...] | None = None
        try:
            self.terms = _agreed_terms(self.transport, request)
            schedule = self.terms.schedule_of(self.terms.plan)
            self._install(schedule, self.terms.hook, with_order=self.terms.rebuild is not None)
        except BaseException:
            self.transport.close()
            raise

    def set_plan(self, plan: BucketPlan) -> None:
        """Use another plan for the same leaves from the next step on; the same on all ranks."""
        if self.bound_hook is not None and self.bound_hook.stateful:
            raise ValueError(
                f"the plan can't change under {self.bound_hook.hook.name}, whose state is by "
                f"bucket; tune without the hook, and pass on the plan"
            )
        self._install(self.terms.schedule_of(plan), self.hook, with_order=False)
        self._pool.clear()

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
        agree_on_hook(self.transport, hook)
        if hook is not None and self.schedule.deterministic:
            raise ValueError(deterministic_hook_error(hook))
        self._install(self.schedule, hook, with_order=self.program.control.with_order)
        self.hook_states = None if hook is None else self.init_states()

    def init_states(self) -> tuple[Any, ...]:
        """State of the hook by bucket before the first step; () if there is none to keep."""
        bound = self.bound_hook
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
        bound = self.bound_hook
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

    def finish_in_flight(self) -> None:
        """Wait for a step in flight; its handle raises its errors."""
        if self.in_flight is not None:
            self.in_flight()

    def _install(self, agreed: Schedule, hook: Hook[Any] | None, *, with_order: bool) -> None:
        """Use a schedule with a hook. After an error, those from before are in force."""
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
        program, bound = Program(schedule, rank, with_order, foreign), None
        if hook is not None:
            program = staged(program, hook)
            if program.schedule is not schedule:
                check_schedule(program.schedule)
            bound = BoundHook.of(hook, program)
            if bound.stateful:  # by bucket: the plan must not be rebuilt
                program = replace(program, with_order=False)
        self.schedule, self.hook, self.bound_hook, self.program = agreed, hook, bound, program
        self.code = CompiledProgram(self.program, self.transport, self.bound_hook)
        self.gathering: CompiledProgram | None = None
        if gather is not None:
            program = Program(gather, rank, False, foreign)
            self.gathering = CompiledProgram(program, self.transport, None)


def _agreed_terms(transport: Transport, request: EngineSpec) -> SyncConfig:
    """Return the agreed configuration. An error of this rank is reported to the others first."""
    try:
        terms = request.terms(transport)
    except (ClosedError, DesyncError, RankLostError, SyncTimeoutError):
        raise  # no communication is possible
    except Exception as error:
        return validate_across_ranks(transport, None, error)
    return validate_across_ranks(transport, terms, None)
