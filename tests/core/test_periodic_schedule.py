"""Periodic schedules: what is due when, their proof, and mutants that it rejects."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fddp
from fddp.core.plan.leaf import LeafSpec
from fddp.core.schedule.periodic import (
    Event,
    Fragment,
    PeriodicSchedule,
    make_periodic_schedule,
)
from fddp.core.schedule.periods import Periodic
from fddp.core.sim.cost import CostModel
from fddp.core.sim.periodic import simulate_periodic
from fddp.errors import ScheduleError


def leaves(count: int) -> list[LeafSpec]:
    return [LeafSpec(f"leaf{number}", (number + 1,), "float32") for number in range(count)]


@st.composite
def schedules(draw: st.DrawFn) -> PeriodicSchedule:
    """Right schedules, with one or two axes, and any offsets and delays."""
    owners = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    factor = draw(st.sampled_from([None, 1, 2, 3]))
    fragments = []
    for owner in sorted(set(owners)):
        inner = draw(st.integers(1, 6))
        period: Any = inner if factor is None else {"host": inner * factor, "local": inner}
        when = Periodic(period, warmup_steps=draw(st.integers(0, 15)))
        members = tuple(leaf for leaf, other in enumerate(owners) if other == owner)
        fragments.append(Fragment(members, when, draw(st.integers(0, inner))))
    return make_periodic_schedule(leaves(len(owners)), fragments)


@given(schedules())
def test_built_schedules_are_proved(schedule: PeriodicSchedule) -> None:
    fddp.check_schedule(schedule)


@given(schedules())
def test_each_fragment_is_started_and_applied_once_in_each_period(
    schedule: PeriodicSchedule,
) -> None:
    """Counted step by step, from the first step on."""
    steps = 3 * schedule.cycle + 20
    starts: Counter[tuple[int, int]] = Counter()
    applied: Counter[tuple[int, int]] = Counter()
    in_flight: dict[int, tuple[int, tuple[str, ...]]] = {}
    for step in range(steps):
        for event in schedule.due(step):
            if event.kind == "start":
                assert event.fragment not in in_flight
                in_flight[event.fragment] = step, event.axes
                starts[event.fragment, step] += 1
            else:
                started, axes = in_flight.pop(event.fragment)
                assert axes == event.axes
                applied[event.fragment, started] += 1
                assert step - started == schedule.fragments[event.fragment].delay
    for number, fragment in enumerate(schedule.fragments):
        for step in range(steps):
            due = fragment.when.due(step)
            assert starts[number, step] == bool(due)
            if step + fragment.delay < steps:
                assert applied[number, step] == bool(due)


@given(schedules())
def test_schedules_are_values(schedule: PeriodicSchedule) -> None:
    copies = [
        PeriodicSchedule.from_json(schedule.to_json()),
        pickle.loads(pickle.dumps(schedule)),
        dataclasses.replace(schedule),
    ]
    assert {schedule, *copies} == {schedule}
    assert all(str(copy) == str(schedule) for copy in copies)
    assert repr(schedule) in schedule._repr_html_()


@given(schedules(), st.data())
def test_mutants_are_rejected(schedule: PeriodicSchedule, data: st.DataObject) -> None:
    events = [*schedule.events]
    number = data.draw(st.integers(0, len(events) - 1))
    event = events[number]
    kind = data.draw(
        st.sampled_from(
            ["leave out", "twice", "other kind", "other step", "other fragment", "axes"]
        )
    )
    if kind == "leave out":
        del events[number]
    elif kind == "twice":
        events.insert(number, event)
    elif kind == "other kind":
        events[number] = event._replace(kind="apply" if event.kind == "start" else "start")
    elif kind == "axes":
        events[number] = event._replace(axes=(*event.axes, "other"))
    elif kind == "other step":
        other = data.draw(st.integers(0, schedule.cycle))
        if other == event.position:
            return
        events[number] = event._replace(position=other)
        events.sort(key=lambda one: one.position)
    else:
        other = data.draw(st.integers(0, len(schedule.fragments) - 1))
        if other == event.fragment:
            return
        events[number] = event._replace(fragment=other)
    if sorted(events) == sorted(schedule.events):
        return
    with pytest.raises(ScheduleError, match=r"fragment \d+.*step"):
        fddp.check_schedule(dataclasses.replace(schedule, events=tuple(events)))


HALVES = make_periodic_schedule(
    leaves(3),
    [
        Fragment((0, 2), Periodic(4, warmup_steps=1), delay=2, mixing=0.5),
        Fragment((1,), Periodic(4, warmup_steps=3)),
    ],
)


def test_what_is_due() -> None:
    seen = [[(e.kind, e.fragment) for e in HALVES.due(step)] for step in range(8)]
    start, apply = [("start", 0)], [("apply", 0)]
    second = [("start", 1), ("apply", 1)]
    assert seen == [[], start, [], apply + second, [], start, [], apply + second]


def test_table() -> None:
    assert (
        str(HALVES)
        == """\
PeriodicSchedule(2 fragments, 3 leaves, 4 events in 4 steps)
fragment  leaves  first  last   size  period  first step  delay  mixing
       0       2  leaf0  leaf2  16 B  4                1      2     0.5
       1       1  leaf1  leaf1   8 B  4                3      0       0"""
    )


def with_fragments(*fragments: Fragment) -> PeriodicSchedule:
    return make_periodic_schedule(leaves(3), fragments)


def with_events(*events: Event) -> PeriodicSchedule:
    return dataclasses.replace(HALVES, events=events)


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (
            with_fragments(Fragment((0, 1), Periodic(2)), Fragment((1, 2), Periodic(2))),
            "leaf 'leaf1' is in fragments 0 and 1; each leaf must be in one fragment",
        ),
        (
            with_fragments(Fragment((0, 1, 1, 2), Periodic(2))),
            "leaf 'leaf1' is in fragment 0 twice",
        ),
        (
            with_fragments(Fragment((0, 2), Periodic(2))),
            "1 leaf would never be averaged, the first of which is 'leaf1'",
        ),
        (with_fragments(Fragment((0, 1, 2, 3), Periodic(2))), "has leaf 3, and there are 3 leaves"),
        (
            with_fragments(Fragment((0, 1, 2), Periodic(2)), Fragment((), Periodic(2))),
            "fragment 1 has no leaves; leave it out",
        ),
        (
            with_fragments(Fragment((0, 1, 2), Periodic(2, warmup_steps=5), delay=3)),
            "fragment 0, leaves 'leaf0' to 'leaf2': its delay of 3 steps is longer than its period "
            "of 2, so that its collective would be in flight when it is started again",
        ),
        (
            dataclasses.replace(HALVES, cycle=6),
            "its period of 4 does not divide the cycle of 6 steps",
        ),
        (with_events(*HALVES.events[::-1]), "positions must be ascending and below the cycle"),
        (
            with_events(HALVES.events[0], *HALVES.events[2:]),
            "fragment 0, leaves 'leaf0' to 'leaf2', after step 9: it is started while",
        ),
        (
            with_events(*HALVES.events[:2]),
            "fragment 1, leaf 'leaf1', after step 11: it is not started, and Periodic",
        ),
        (
            with_events(*HALVES.events[:-1]),
            "fragment 1, leaf 'leaf1', after step 11: it is started while its collective",
        ),
        (
            with_events(HALVES.events[0], *HALVES.events[2:], HALVES.events[1]),
            "",
        ),
    ],
)
def test_errors_of_the_proof(schedule: PeriodicSchedule, text: str) -> None:
    if not text:  # the order of fragments within a step is free, but the same on all ranks
        fddp.check_schedule(schedule)
        return
    with pytest.raises(ScheduleError) as caught:
        fddp.check_schedule(schedule)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"leaves": (-1,)}, "leaves must be a tuple of leaf indices"),
        ({"when": 3}, "when must be a Periodic, got 3"),
        ({"delay": -1}, "delay must be an int of at least 0, got -1"),
        ({"mixing": 1.5}, "mixing must be a number from 0 to 1, got 1.5"),
        ({"mixing": True}, "mixing must be a number"),
    ],
)
def test_invalid_fragments(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Fragment(**{"leaves": (0,), "when": Periodic(1), **fields})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"leaves": ("w",)}, "leaves must be a tuple of LeafSpec"),
        ({"fragments": ((0, 1),)}, "fragments must be a tuple of Fragment"),
        ({"cycle": 0}, "cycle must be an int of at least 1, got 0"),
        ({"events": ((0, "start", 0, ()),)}, "events must be a tuple of Event"),
        ({"events": (Event(0, "stop", 0, ()),)}, r"events\[0\] is no event"),  # type: ignore[arg-type]
        ({"events": (Event(0, "start", 7, ()),)}, "of fragment 7, and there are 2 fragments"),
    ],
)
def test_invalid_schedules(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(HALVES, **fields)


@pytest.mark.parametrize("text", ["", "{}", '{"format":"fddp.Schedule/2"}'])
def test_invalid_json(text: str) -> None:
    with pytest.raises(ValueError, match="periodic schedule JSON"):
        PeriodicSchedule.from_json(text)


# Simulation


@given(schedules(), st.floats(0.0, 1.0), st.floats(0.0, 1e-2), st.integers(1, 5))
def test_simulated_bytes_and_waits(
    schedule: PeriodicSchedule, step_s: float, beta: float, ranks: int
) -> None:
    steps = 2 * schedule.cycle + 20
    found = simulate_periodic(
        schedule, CostModel(0.0, beta), ranks=ranks, step_s=step_s, steps=steps
    )
    starts = [
        schedule.nbytes(event.fragment)
        for step in range(steps)
        for event in schedule.due(step)
        if event.kind == "start"
    ]
    share = 2 * (ranks - 1) / ranks
    assert found.sent_bytes == pytest.approx(share * sum(starts))
    assert found.waited_s >= -1e-9
    assert found.total_s <= steps * step_s + beta * found.sent_bytes + 1e-9
    ordered = sorted(found.spans, key=lambda span: span.start_s)
    for before, after in pairwise(ordered):  # one after the other
        assert before.end_s <= after.start_s + 1e-9


def test_simulated_diloco_needs_the_published_bandwidth() -> None:
    """At most a step of the grid of arXiv 2501.18512, Table 4, more: 1B parameters, H of 100, 0.1 s
    a step, bfloat16."""
    whole = Fragment((0,), Periodic(100, warmup_steps=99))
    schedule = make_periodic_schedule([LeafSpec("w", (10**9,), "bfloat16")], [whole])
    for published, target in ((1.4, 0.5), (6.2, 0.8), (13.3, 0.9)):
        gbit_s = published * 1.207
        cost = CostModel(0.0, 8e-9 / gbit_s)
        found = simulate_periodic(schedule, cost, ranks=2, step_s=0.1)
        assert found.utilisation >= target


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"step_s": -1.0}, "step_s must be a number from 0"),
        ({"bits": 0}, "bits must be above 0 and at most 64, got 0"),
        ({"steps": 10**7}, "steps must be from 1 to 1000000, got 10000000"),
    ],
)
def test_invalid_simulations(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        simulate_periodic(HALVES, "nvlink4", **{"ranks": 2, "step_s": 1.0, **options})
