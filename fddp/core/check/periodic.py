"""Verification of periodic schedules: each fragment is averaged once in each of its periods.

The events of a schedule do not depend on the rank, so all ranks start collectives in one order.
What is left to prove concerns one list of events. Two cycles are executed, after the first starts
of all fragments: the first gives the collectives that are in flight when a cycle begins, and the
second is checked.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from fddp.core.schedule.periodic import Event, PeriodicSchedule
from fddp.core.text import counted
from fddp.errors import ScheduleError


def check_periodic_schedule(schedule: PeriodicSchedule) -> None:
    """Prove that a periodic schedule is correct, or raise an error.

    See `fddp.check_schedule` for the properties.

    Raises:
        ScheduleError: the schedule is wrong; the text names fragment, leaves and step.
    """
    _check_leaves(schedule)
    _check_cycle(schedule)
    _Execution(schedule).run()


def _check_leaves(schedule: PeriodicSchedule) -> None:
    owners: dict[int, int] = {}
    for number, fragment in enumerate(schedule.fragments):
        if not fragment.leaves:
            raise ScheduleError(f"fragment {number} has no leaves; leave it out")
        for leaf in fragment.leaves:
            if leaf >= len(schedule.leaves):
                raise ScheduleError(
                    f"fragment {number} has leaf {leaf}, and there are "
                    f"{counted(len(schedule.leaves), 'leaf')}"
                )
            path = schedule.leaves[leaf].path
            if leaf in owners:
                where = f"fragments {owners[leaf]} and {number}"
                where = where if owners[leaf] != number else f"fragment {number} twice"
                raise ScheduleError(
                    f"leaf {path!r} is in {where}; each leaf must be in one fragment", paths=(path,)
                )
            if not schedule.leaves[leaf].reducible:
                raise ScheduleError(
                    f"leaf {path!r} of fragment {number} has dtype "
                    f"{schedule.leaves[leaf].dtype}, which can't be averaged",
                    paths=(path,),
                )
            owners[leaf] = number
    missing = [spec.path for leaf, spec in enumerate(schedule.leaves) if leaf not in owners]
    if missing:
        raise ScheduleError(
            f"{counted(len(missing), 'leaf')} would never be averaged, the first of which is "
            f"{missing[0]!r}; each leaf must be in one fragment",
            paths=tuple(missing),
        )


def _check_cycle(schedule: PeriodicSchedule) -> None:
    for number, fragment in enumerate(schedule.fragments):
        if schedule.cycle % fragment.when.longest:
            raise ScheduleError(
                f"{schedule.describe(number)}: its period of {fragment.when.longest} does not "
                f"divide the cycle of {counted(schedule.cycle, 'step')}",
                paths=schedule.paths(number),
            )
        if fragment.delay > fragment.when.shortest:
            raise ScheduleError(
                f"{schedule.describe(number)}: its delay of {counted(fragment.delay, 'step')} is "
                f"longer than its period of {fragment.when.shortest}, so that its collective "
                f"would be in flight when it is started again",
                paths=schedule.paths(number),
            )
    before = 0
    for number, event in enumerate(schedule.events):
        if not before <= event.position < schedule.cycle:
            raise ScheduleError(
                f"event {number} ({event.kind} of {schedule.describe(event.fragment)}) is at step "
                f"{event.position} of a cycle of {schedule.cycle}, after an event at step "
                f"{before}; positions must be ascending and below the cycle",
                op=number,
            )
        before = event.position


class _InFlight(NamedTuple):
    started: int  # step
    axes: tuple[str, ...]


class _Execution:
    """Execution of the events, with the collectives in flight by fragment."""

    def __init__(self, schedule: PeriodicSchedule) -> None:
        self._schedule = schedule
        self._in_flight: dict[int, _InFlight] = {}
        self._starts: set[tuple[int, int]] = set()  # fragments and steps
        latest = max((f.when.warmup_steps for f in schedule.fragments), default=0)
        self._first = -(-latest // schedule.cycle) * schedule.cycle

    def run(self) -> None:
        schedule = self._schedule
        for event in schedule.events:
            if event.kind == "start":
                started = self._first + event.position
                self._in_flight[event.fragment] = _InFlight(started, event.axes)
            else:
                self._in_flight.pop(event.fragment, None)
        first = self._first + schedule.cycle
        for number, event in enumerate(schedule.events):
            execute = self._start if event.kind == "start" else self._apply
            execute(number, event, first + event.position)
        self._check_complete(range(first, first + schedule.cycle))

    def _start(self, number: int, event: Event, step: int) -> None:
        when = self._schedule.fragments[event.fragment].when
        due, previous = when.due(step), self._in_flight.get(event.fragment)
        if previous is not None:
            problem = (
                f"it is started while its collective, started after step {previous.started}, is "
                f"in flight"
            )
            self._fail(number, step, problem)
        if not due:
            self._fail(number, step, f"it is started, and {when} is not due")
        if event.axes != due:
            self._fail(number, step, f"it is started along {event.axes}, and {due} are due")
        if (event.fragment, step) in self._starts:
            self._fail(number, step, "it is started twice")
        self._starts.add((event.fragment, step))
        self._in_flight[event.fragment] = _InFlight(step, event.axes)

    def _apply(self, number: int, event: Event, step: int) -> None:
        previous = self._in_flight.pop(event.fragment, None)
        delay = self._schedule.fragments[event.fragment].delay
        if previous is None:
            self._fail(number, step, "it is applied, and no collective of it is in flight")
        if step - previous.started != delay:
            took = counted(step - previous.started, "step")
            self._fail(
                number, step, f"it is applied {took} after its start, and its delay is {delay}"
            )
        if event.axes != previous.axes:
            problem = f"it is applied along {event.axes}, and was started along {previous.axes}"
            self._fail(number, step, problem)

    def _check_complete(self, steps: range) -> None:
        """Check that nothing that is due was left out."""
        schedule = self._schedule
        for number, previous in self._in_flight.items():
            if previous.started + schedule.fragments[number].delay < steps.stop:
                raise ScheduleError(
                    f"{schedule.describe(number)}: its collective, started after step "
                    f"{previous.started}, is never applied",
                    paths=schedule.paths(number),
                )
        for number, fragment in enumerate(schedule.fragments):
            when = fragment.when
            first = steps.start + (when.warmup_steps - steps.start) % when.shortest
            for step in range(first, steps.stop, when.shortest):
                if (number, step) not in self._starts:
                    raise ScheduleError(
                        f"{schedule.describe(number)}, after step {step}: it is not started, and "
                        f"{when} is due",
                        paths=schedule.paths(number),
                    )

    def _fail(self, number: int, step: int, problem: str) -> NoReturn:
        fragment = self._schedule.events[number].fragment
        raise ScheduleError(
            f"{self._schedule.describe(fragment)}, after step {step}: {problem} (event {number}, "
            f"on all ranks)",
            op=number,
            paths=self._schedule.paths(fragment),
        )
