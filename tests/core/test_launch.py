"""Laws of the launch rule, for any schedule and any arrivals on any rank."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fddp.core.protocol.expected_counts import Arrivals, expected_counts
from fddp.core.protocol.launch import TraceAction, may_launch, replay
from fddp.core.schedule.op import is_collective
from fddp.core.schedule.schedule import Schedule
from tests.support.schedules import built


class Case(NamedTuple):
    """One step: what each rank expects and then receives."""

    schedule: Schedule
    expected: list[list[int]]
    arrivals: list[list[int]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Per rank any counts, repeats, omissions and orders."""
    schedule = draw(built())
    leaves = len(schedule.plan.leaves)
    ranks = draw(st.integers(1, 4))
    counts = st.lists(st.integers(0, 3), min_size=leaves, max_size=leaves)
    arrivals = st.lists(st.integers(0, leaves - 1), max_size=3 * leaves)
    return Case(
        schedule,
        draw(st.lists(counts, min_size=ranks, max_size=ranks)),
        draw(st.lists(arrivals, min_size=ranks, max_size=ranks)),
    )


@given(cases())
def test_all_ranks_act_in_the_order_of_the_schedule(case: Case) -> None:
    expected = [TraceAction("launch", bucket) for bucket in case.schedule.sequence]
    for arrivals, counts in zip(case.arrivals, case.expected, strict=True):
        events = replay(case.schedule, arrivals, counts).events
        assert [event for event in events if isinstance(event, int)] == arrivals
        actions = [event for event in events if isinstance(event, TraceAction)]
        assert actions.count(TraceAction("control")) == 1
        assert [action for action in actions if action.kind == "launch"] == expected


@given(cases())
def test_a_bucket_is_launched_as_soon_as_it_is_complete(case: Case) -> None:
    """The last bucket waits for the end of backward. What comes after a launch is late."""
    schedule, sequence = case.schedule, case.schedule.sequence
    members = {b: schedule.plan.buckets[b].leaves for b in sequence}
    for arrivals, counts in zip(case.arrivals, case.expected, strict=True):
        events, late = replay(schedule, arrivals, counts)
        left, launched, seen = list(counts), 0, set[int]()
        for position, event in enumerate(events):
            is_complete = launched < len(sequence) and all(
                left[leaf] <= 0 for leaf in members[sequence[launched]]
            )
            if isinstance(event, int):
                assert not is_complete or launched == len(sequence) - 1
                left[event] -= 1
                seen.update(b for b in sequence[:launched] if event in members[b])
            elif any(isinstance(after, int) for after in events[position:]):
                assert is_complete
                assert launched < len(sequence) - 1
            launched += isinstance(event, TraceAction) and event.kind == "launch"
        assert late == seen


@given(built(), st.data())
def test_only_free_operations_wait_or_read_the_control_word(
    schedule: Schedule, data: st.DataObject
) -> None:
    buckets, positions = range(len(schedule.plan.buckets)), range(len(schedule.ops))
    done = data.draw(st.sets(st.sampled_from(positions)))
    for position, op in enumerate(schedule.ops):
        waits = any(dep not in done and is_collective(schedule.ops[dep]) for dep in op.deps)
        reads = op.when != "always" or op.kind in ("gather", "unpack")
        allowed = {
            phase: may_launch(schedule, position, buckets, done, phase)
            for phase in ("backward", "complete", "free")
        }
        assert allowed["free"]
        assert not (allowed["backward"] and not allowed["complete"])
        if op.kind == "control":
            assert (allowed["backward"], allowed["complete"]) == (False, True)
        else:
            assert allowed["complete"] == (not waits and not reads)


@pytest.mark.parametrize(
    ("visible", "opaque", "previous", "expected"),
    [
        pytest.param([1, 0], False, None, [1, 0], id="counts known from the graph"),
        pytest.param([1, 0], True, None, [1, 1], id="hidden leaves may still come"),
        pytest.param([1, 1], False, Arrivals([1, 1], [1, 0]), [1, 0], id="in view, no gradient"),
        pytest.param([1, 1], False, Arrivals([1, 0], [1, 0]), [1, 1], id="newly in view"),
        pytest.param([1, 0], True, Arrivals([1, 0], [1, 2]), [1, 2], id="learned counts"),
        pytest.param([1, 1], True, Arrivals([1, 0], [2, 0]), [2, 1], id="learned and new"),
    ],
)
def test_expected_counts(
    visible: list[bool], opaque: bool, previous: Arrivals | None, expected: list[int]
) -> None:
    assert expected_counts(visible, opaque=opaque, previous=previous) == expected
