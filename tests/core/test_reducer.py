"""Laws of the pure reducer, for any arrivals on any rank."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fddp.core.protocol.expected_counts import Arrivals, expected_counts
from fddp.core.protocol.readiness import (
    Action,
    ReducerState,
    on_backward_end,
    on_control,
    on_ready,
    start,
)
from fddp.errors import InternalError


class Case(NamedTuple):
    """One step: buckets, and what each rank expects and then receives."""

    bucket_of: tuple[int, ...]
    sequence: tuple[int, ...]
    expected: list[list[int]]
    arrivals: list[list[int]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Leaves in and out of buckets; per rank any counts, repeats, omissions and orders."""
    buckets = draw(st.integers(1, 5))
    leaves = draw(st.integers(1, 12))
    ranks = draw(st.integers(1, 4))
    bucket_of = draw(st.lists(st.integers(-1, buckets - 1), min_size=leaves, max_size=leaves))
    sequence = draw(st.permutations(range(buckets)))
    counts = st.lists(st.integers(0, 3), min_size=leaves, max_size=leaves)
    arrivals = st.lists(st.integers(0, leaves - 1), max_size=3 * leaves)
    return Case(
        tuple(bucket_of),
        tuple(sequence),
        draw(st.lists(counts, min_size=ranks, max_size=ranks)),
        draw(st.lists(arrivals, min_size=ranks, max_size=ranks)),
    )


class Run(NamedTuple):
    """One rank's step up to the control word."""

    state: ReducerState
    actions: list[Action]
    packed: Counter[int]  # gradients of each leaf that went with their bucket
    after: Counter[int]  # gradients of each leaf that came after it


def run_backward(case: Case, rank: int) -> Run:
    state, acted = start(case.sequence, case.bucket_of, case.expected[rank])
    actions, here = list(acted), Counter[int]()
    packed, after = Counter[int](), Counter[int]()

    def pack(launches: tuple[Action, ...]) -> None:
        for action in launches:
            for leaf, bucket in enumerate(case.bucket_of):
                if action.kind == "launch" and bucket == action.bucket:
                    packed[leaf] = here[leaf]

    pack(acted)
    for leaf in case.arrivals[rank]:
        launched = {a.bucket for a in actions}
        (after if case.bucket_of[leaf] in launched else here)[leaf] += 1
        state, acted = on_ready(state, leaf)
        actions += acted
        pack(acted)
    state, acted = on_backward_end(state)
    pack(acted)
    return Run(state, [*actions, *acted], packed, after)


@given(cases())
def test_every_gradient_is_reduced_exactly_once(case: Case) -> None:
    runs = [run_backward(case, rank) for rank in range(len(case.arrivals))]
    late = sorted(set().union(*(run.state.late for run in runs)))
    for rank, run in enumerate(runs):
        arrived = Counter(leaf for leaf in case.arrivals[rank] if case.bucket_of[leaf] >= 0)
        assert +(run.packed + run.after) == arrived
        # What was not packed is in a bucket that all ranks repair.
        assert {case.bucket_of[leaf] for leaf in run.after if case.bucket_of[leaf] >= 0} <= set(
            late
        )
        _, actions = on_control(run.state, late)
        assert sorted(a.bucket for a in actions if a.kind == "repair") == late
        assert actions[-1] == Action("finish")


@given(cases())
def test_all_ranks_issue_the_same_collectives(case: Case) -> None:
    runs = [run_backward(case, rank) for rank in range(len(case.arrivals))]
    late = sorted(set().union(*(run.state.late for run in runs)))
    sequences = [[*run.actions, *on_control(run.state, late).actions] for run in runs]
    assert all(sequence == sequences[0] for sequence in sequences)
    launches = [a.bucket for a in sequences[0] if a.kind == "launch"]
    assert launches == list(case.sequence)
    assert [a.kind for a in sequences[0] if a.kind == "control"] == ["control"]


@given(cases())
def test_a_bucket_is_never_launched_before_its_gradients(case: Case) -> None:
    state, actions = start(case.sequence, case.bucket_of, case.expected[0])
    for leaf in case.arrivals[0]:
        for action in actions:
            assert state.complete(action.bucket)
        state, actions = on_ready(state, leaf)
    assert state.launched < len(case.sequence), "the last bucket waits for the end of backward"


@given(cases())
def test_a_ready_bucket_is_launched_at_once(case: Case) -> None:
    state, _ = start(case.sequence, case.bucket_of, case.expected[0])
    for leaf in case.arrivals[0]:
        state, _ = on_ready(state, leaf)
        head = case.sequence[state.launched]
        assert state.launched == len(case.sequence) - 1 or not state.complete(head)


def test_broken_protocols_are_internal_errors() -> None:
    state, _ = start([0], [0], [1])
    with pytest.raises(InternalError, match="before the end of backward"):
        on_control(state, [])
    ended, _ = on_backward_end(state)
    with pytest.raises(InternalError, match="leaf 0 arrived after backward had ended"):
        on_ready(ended, 0)
    with pytest.raises(InternalError, match="ended twice"):
        on_backward_end(ended)
    finished, _ = on_control(ended, [])
    with pytest.raises(InternalError, match="or twice"):
        on_control(finished, [])


def test_a_late_bucket_must_be_in_the_control_word() -> None:
    state, _ = start([0, 1], [0, 1], [1, 1])
    state, _ = on_ready(state, 0)
    state, _ = on_ready(state, 0)
    state, _ = on_backward_end(state)
    assert state.late == {0}
    with pytest.raises(InternalError, match=r"buckets \[0\] are late here"):
        on_control(state, [])


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
