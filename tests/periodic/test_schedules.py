"""Periodic schedules: what is due when, what is no schedule, and simulated steps."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fddp import CostModel, ScheduleError
from fddp.periodic import (
    Fragment,
    Periodic,
    PeriodicSchedule,
    local_sgd,
    simulate_periodic,
    streaming_diloco,
)


@st.composite
def schedules(draw: st.DrawFn) -> PeriodicSchedule:
    """Schedules with any offsets and delays."""
    fragments = []
    for number in range(draw(st.integers(1, 4))):
        period = draw(st.integers(1, 6))
        when = Periodic(period, warmup_steps=draw(st.integers(0, 15)))
        paths = tuple(f"leaf{number}.{n}" for n in range(draw(st.integers(1, 3))))
        nbytes = draw(st.integers(0, 100))
        fragments.append(Fragment(paths, nbytes, when, draw(st.integers(0, period))))
    return PeriodicSchedule(tuple(fragments))


@given(schedules())
def test_each_fragment_is_started_and_applied_once_in_each_period(
    schedule: PeriodicSchedule,
) -> None:
    """Counted step by step, from the first step on."""
    steps = 3 * schedule.cycle + 20
    starts: Counter[tuple[int, int]] = Counter()
    applied: Counter[tuple[int, int]] = Counter()
    in_flight: dict[int, int] = {}
    for step in range(steps):
        for event in schedule.due(step):
            if event.kind == "start":
                assert event.fragment not in in_flight
                in_flight[event.fragment] = step
                starts[event.fragment, step] += 1
            else:
                started = in_flight.pop(event.fragment)
                applied[event.fragment, started] += 1
                assert step - started == schedule.fragments[event.fragment].delay
    for number, fragment in enumerate(schedule.fragments):
        for step in range(steps):
            due = fragment.when.due(step)
            assert starts[number, step] == due
            if step + fragment.delay < steps:
                assert applied[number, step] == due


@given(schedules(), st.integers(0, 100))
def test_events_repeat_after_a_cycle(schedule: PeriodicSchedule, step: int) -> None:
    step += schedule.warmup_steps + max(fragment.delay for fragment in schedule.fragments)
    assert schedule.due(step) == schedule.due(step + schedule.cycle)


@given(schedules())
def test_schedules_are_values(schedule: PeriodicSchedule) -> None:
    copies = [pickle.loads(pickle.dumps(schedule)), dataclasses.replace(schedule)]
    assert {schedule, *copies} == {schedule}


@pytest.mark.parametrize(
    ("period", "warmup", "text"),
    [
        (0, 0, "period must be an int of at least 1, got 0"),
        (2.0, 0, "got 2.0"),
        (True, 0, "got True"),
        (1, -1, "warmup_steps must be an int of at least 0, got -1"),
    ],
)
def test_invalid_periods(period: Any, warmup: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Periodic(period, warmup_steps=warmup)


HALVES = PeriodicSchedule(
    (
        Fragment(("a", "c"), 16, Periodic(4, warmup_steps=1), delay=2, mixing=0.5),
        Fragment(("b",), 8, Periodic(4, warmup_steps=3)),
    )
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
PeriodicSchedule(2 fragments, 3 leaves, repeats after 4 steps)
a .. c (2 leaves, 16 B): after step 1 and every 4 steps, delay 2, mixing 0.5
b .. b (1 leaf, 8 B): after step 3 and every 4 steps, delay 0, mixing 0"""
    )


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: PeriodicSchedule((*HALVES.fragments, HALVES.fragments[1])),
            "leaf 'b' is in fragments 1 and 2; each leaf must be in one fragment",
        ),
        (
            lambda: PeriodicSchedule((Fragment(("a", "b", "b"), 8, Periodic(2)),)),
            "leaf 'b' is in fragment 0 twice",
        ),
        (lambda: Fragment((), 0, Periodic(2)), "a fragment has no leaves; leave it out"),
        (
            lambda: Fragment(("a", "b"), 8, Periodic(2, warmup_steps=5), delay=3),
            "fragment of leaves 'a' to 'b': its delay of 3 steps is longer than its period of 2, "
            "so that its collective would be in flight when it is started again",
        ),
    ],
)
def test_what_is_no_schedule(make: Any, text: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        make()
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"nbytes": -1}, "nbytes must be an int of at least 0, got -1"),
        ({"delay": -1}, "delay must be an int of at least 0, got -1"),
        ({"mixing": 1.5}, "mixing must be a number from 0 to 1, got 1.5"),
    ],
)
def test_invalid_fragments(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Fragment(**{"paths": ("w",), "nbytes": 4, "when": Periodic(1), **fields})


def test_a_layer_ends_at_the_first_number_of_its_paths() -> None:
    tree = {"layers": [{"experts": [torch.zeros(2), torch.zeros(2)]} for _ in range(2)]}
    schedule = streaming_diloco(tree, 10, fragments=2)
    assert [fragment.paths for fragment in schedule.fragments] == [
        ("layers.0.experts.0", "layers.0.experts.1"),
        ("layers.1.experts.0", "layers.1.experts.1"),
    ]


# Simulation


@given(schedules(), st.floats(0.0, 1.0), st.floats(0.0, 1e-2), st.integers(1, 5))
def test_simulated_bytes_and_waits(
    schedule: PeriodicSchedule, step_s: float, beta: float, ranks: int
) -> None:
    steps = 2 * schedule.cycle + 20
    found = simulate_periodic(
        schedule, CostModel(0.0, beta), ranks=ranks, step_s=step_s, steps=steps
    )
    started = sum(
        schedule.fragments[event.fragment].nbytes
        for step in range(steps)
        for event in schedule.due(step)
        if event.kind == "start"
    )
    assert found.sent_bytes == pytest.approx(2 * (ranks - 1) / ranks * started)
    assert found.waited_s >= -1e-9
    assert found.total_s <= steps * step_s + beta * found.sent_bytes + 1e-9


def test_simulated_diloco_needs_the_published_bandwidth() -> None:
    """At most a step of the grid of arXiv 2501.18512, Table 4, more: 1B parameters, H of 100, 0.1 s
    a step, bfloat16."""
    tree = {"w": torch.empty(10**9, dtype=torch.bfloat16, device="meta")}
    for published, target in ((1.4, 0.5), (6.2, 0.8), (13.3, 0.9)):
        gbit_s = published * 1.207
        cost = CostModel(0.0, 8e-9 / gbit_s)
        found = simulate_periodic(local_sgd(tree, 100), cost, ranks=2, step_s=0.1)
        assert found.utilisation >= target


def test_a_delay_hides_the_collective() -> None:
    """Of 0.2 s in each period of two steps of 0.1 s, on two ranks."""
    tree = {"layers": [torch.zeros(25), torch.zeros(25)]}
    link = CostModel(0.0, 1e-3)
    waits = []
    for delay in range(3):
        schedule = streaming_diloco(tree, 2, fragments=2, delay=delay)
        found = simulate_periodic(schedule, link, ranks=2, step_s=0.1, steps=101)
        waits.append(found.waited_s)
    assert waits[0] == pytest.approx(0.1 * 101)
    assert waits[1] <= 1e-6 >= waits[2]


def test_collectives_that_start_together_share_the_link() -> None:
    """Two ranks send the 100 bytes of each fragment in 0.1 s, one fragment after the other."""
    halves = PeriodicSchedule(tuple(Fragment((path,), 100, Periodic(2)) for path in "ab"))
    found = simulate_periodic(halves, CostModel(0.0, 1e-3), ranks=2, step_s=1.0, steps=1)
    assert found.waited_s == pytest.approx(0.2)


def test_an_average_waits_for_no_collective_after_its_own() -> None:
    """The first fragment is due while the second, which takes 10 s, is in flight."""
    fragments = (
        Fragment(("a",), 100, Periodic(100), delay=2),
        Fragment(("b",), 10_000, Periodic(100, warmup_steps=1), delay=50),
    )
    link = CostModel(0.0, 1e-3)
    found = simulate_periodic(PeriodicSchedule(fragments), link, ranks=2, step_s=1.0, steps=10)
    assert found.waited_s == 0.0


def test_default_steps_and_bits_of_a_simulation() -> None:
    """Ten cycles of 4 steps after the first starts, which are complete in step 3; on two ranks each
    sends a quarter of the float32 of 11 and 10 starts."""
    found = simulate_periodic(HALVES, CostModel(0.0, 1e-3), ranks=2, step_s=1.0, bits=8.0)
    assert found.steps == 43
    assert found.sent_bytes == pytest.approx((11 * 16 + 10 * 8) / 4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"step_s": -1.0}, "step_s must be a number from 0"),
        ({"bits": 0}, "bits must be above 0 and at most 64, got 0"),
        ({}, "got 'nvlink9'; did you mean 'nvlink4'?"),
        ({"steps": 10**7}, "steps must be from 1 to 1000000, got 10000000"),
    ],
)
def test_invalid_simulations(options: dict[str, Any], text: str) -> None:
    cost = "nvlink4" if options else "nvlink9"
    with pytest.raises(ValueError, match=text):
        simulate_periodic(HALVES, cost, **{"ranks": 2, "step_s": 1.0, **options})
