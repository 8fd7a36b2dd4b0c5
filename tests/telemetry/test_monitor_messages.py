"""JSON messages between monitors: round trips, or errors that name the rank and the field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fddp.core.timeline import BucketTimes, Interval, StepTimes
from fddp.telemetry.perfetto import chrome_trace, steps_from_json, steps_to_json
from fddp.telemetry.phases import IntervalIndex, step_phases
from fddp.telemetry.stragglers import RankSummary, StepRecord, summarize
from tests.support.json_documents import places, replaced

_seconds = st.floats(0.0, 1e6)
_intervals = st.lists(_seconds, max_size=8, unique=True).map(
    lambda times: tuple(zip(*[iter(sorted(times))] * 2, strict=False))
)
_buckets = st.lists(
    st.builds(BucketTimes, st.integers(0, 99), st.integers(0, 2**40), _seconds, _seconds, _seconds),
    max_size=3,
).map(tuple)
_times = st.builds(
    StepTimes,
    buckets=_buckets,
    backward_start_s=_seconds,
    backward_end_s=_seconds,
    end_s=_seconds,
    begun_s=_seconds,
    waits=_intervals,
    hooks=_intervals,
)
_records = st.lists(
    st.builds(
        StepRecord,
        st.integers(0, 1000),
        st.dictionaries(
            st.sampled_from(["input", "forward", "wait", "least", "step", "é"]), _seconds
        ),
        _times,
    ),
    min_size=1,
    max_size=3,
)


class Reader(NamedTuple):
    """Reader of a message as rank 3's, and its writer."""

    read: Callable[[str], Any]
    write: Callable[[Any], str]
    problem: str


SUMMARY = Reader(
    lambda text: RankSummary.from_json(text, 3),
    RankSummary.to_json,
    "rank 3 sent a malformed 'summary' message: ",
)
STEPS = Reader(
    lambda text: steps_from_json(text, 3),
    steps_to_json,
    "rank 3 sent a malformed 'steps' message: ",
)


def texts(records: list[StepRecord]) -> list[tuple[Reader, str]]:
    ordered = [record._replace(step=n) for n, record in enumerate(records)]
    return [(SUMMARY, summarize(3, ordered).to_json()), (STEPS, steps_to_json(records))]


@given(_records)
@settings(max_examples=40)
def test_messages_round_trip(records: list[StepRecord]) -> None:
    for reader, text in texts(records):
        assert reader.write(reader.read(text)) == text
    assert STEPS.read(steps_to_json(records)) == records
    json.loads(chrome_trace({0: records, 1: records}), parse_constant=pytest.fail)


_json = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=5),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(_records, st.data())
@settings(max_examples=120)
def test_malformed_messages_are_refused_by_rank(records: list[StepRecord], data: Any) -> None:
    reader, text = data.draw(st.sampled_from(texts(records)))
    document = json.loads(text)
    place = data.draw(st.sampled_from(places(document)))
    changed = json.dumps(replaced(document, place, lambda _: data.draw(_json)))
    cut = text[: data.draw(st.integers(0, len(text) - 1))]
    for given_text in (changed, cut):
        problem, read = outcome(reader, given_text)
        assert not problem or (problem.startswith(reader.problem) and len(problem) < 600)
        if not problem:
            # It is one that a rank may write.
            assert reader.read(reader.write(read)) == read
            if reader is STEPS:
                json.loads(chrome_trace({0: read}), parse_constant=pytest.fail)


def outcome(reader: Reader, text: str) -> tuple[str, Any]:
    """Why a text was refused, or what was read."""
    try:
        return "", reader.read(text)
    except ValueError as error:
        return str(error), None


def changed(place: tuple[Any, ...], value: Any, reader: Reader) -> str:
    phases_s = {"input": 0.5, "backward": 2.0, "wait": 1.0}
    times = StepTimes((BucketTimes(0, 8, 1.0, 1.0, 2.0),), 1.0, 3.0, 4.0, begun_s=0.5)
    found = dict(texts([StepRecord(0, phases_s, times)]))
    return json.dumps(replaced(json.loads(found[reader]), place, lambda _: value))


FIELDS = "rank, first, last, phases, own, step, buckets"


@pytest.mark.parametrize(
    ("reader", "place", "value", "problem"),
    [
        (SUMMARY, (), [], f"the value is [], expected an object with the fields {FIELDS}"),
        (SUMMARY, ("rank",), 2, "it is of rank 2"),
        (SUMMARY, ("first",), -7, "first is -7, expected 0 or more"),
        (SUMMARY, ("last",), True, ".last is True, expected an int"),
        (SUMMARY, ("own",), [0.0, 1], ".own is [0.0, 1], expected a list of 4"),
        (SUMMARY, ("own", 3), 0, "steps is 0, expected 1 or more"),
        (SUMMARY, ("own", 0), -1.0, "median_s is -1.0, expected 0 or more"),
        (SUMMARY, ("phases", "wait"), None, ".phases.'wait' is None, expected a list of 4"),
        (SUMMARY, ("buckets", 0, 1), "x", ".buckets[0][1] is 'x', expected a number"),
        (SUMMARY, ("buckets", 0, 1), math.inf, "inf is not a finite number below 2**63"),
        (STEPS, (), {}, "the value is {}, expected a list"),
        (STEPS, (0, 0), -1, "step is -1, expected 0 or more"),
        (STEPS, (0, 6), 1e300, "1e+300 is not a finite number below 2**63"),
        (STEPS, (0, 1, "wait"), -0.5, "wait is -0.5, expected 0 or more"),
        (STEPS, (0, 2, 0, 1), 0.5, "[0][2][0][1] is 0.5, expected an int"),
        (STEPS, (0, 7), [[1.0]], "[0][7][0] is [1.0], expected a list of 2"),
    ],
)
def test_errors_name_the_field(
    reader: Reader, place: tuple[Any, ...], value: Any, problem: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(reader.problem)) as caught:
        reader.read(changed(place, value, reader))
    assert str(caught.value) == f"{reader.problem}{problem}"


# Phases


@given(_intervals, _seconds, _seconds)
def test_interval_overlap(intervals: tuple[Interval, ...], one: float, other: float) -> None:
    start_s, end_s = sorted((one, other))
    expected = sum(max(0.0, min(e, end_s) - max(s, start_s)) for s, e in intervals)
    assert IntervalIndex(intervals).within(start_s, end_s) == pytest.approx(expected, abs=1e-6)


@given(st.lists(st.floats(0.0, 100.0), min_size=16, max_size=16, unique=True))
def test_phases_add_up_to_the_step(moments: list[float]) -> None:
    """Waits lie within hooks or apart from them, as those of real steps do."""
    m = sorted(moments)
    waits = ((m[1], m[2]), (m[5], m[6]), (m[9], m[10]), (m[13], m[14]))
    hooks = ((m[4], m[7]), (m[12], m[15]))
    times = StepTimes((), m[3], m[8], m[15], begun_s=m[0], waits=waits, hooks=hooks)
    phases_s = step_phases(times)
    assert sum(phases_s.values()) == pytest.approx(m[15] - m[0])
    assert phases_s["wait"] == pytest.approx(sum(e - s for s, e in waits))
    assert phases_s["hook"] == pytest.approx(
        sum(e - s for s, e in hooks) - (m[6] - m[5]) - (m[14] - m[13])
    )
    assert phases_s["sync"] == pytest.approx(m[12] - m[8] - (m[10] - m[9]))
