"""Phases of a step, and the messages between monitors."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fddp
from fddp.extend import BucketTimes, Interval, Schema, StepTimes, exchange, optional
from fddp.watch import RankSummary, StepRecord
from fddp.watch.monitor import REPORT
from fddp.watch.phases import overlap_s, step_phases, without
from fddp.watch.stragglers import SUMMARY
from fddp.watch.trace import STEPS, chrome_trace, trace_message
from tests.support.endings import ending
from tests.support.monitored import record_of

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


def returned(value: Any, schema: Schema) -> Any:
    """The value as another rank receives it."""
    return fddp.loopback(1, lambda group: exchange(value, schema, group))[0][0]


@given(_records)
@settings(max_examples=40)
def test_messages_round_trip(records: list[StepRecord]) -> None:
    summary = RankSummary.of(3, records)
    assert RankSummary.from_message(returned(asdict(summary), SUMMARY)) == summary
    message = trace_message(records)
    trace = chrome_trace([message])
    json.loads(trace, parse_constant=pytest.fail)
    assert chrome_trace([returned(message, STEPS)]) == trace


@pytest.mark.parametrize("change", [{"first": 0.5}, {"own": [0.0, 1]}, {"phases": {"wait": None}}])
def test_damaged_summary_is_refused_by_rank(change: dict[str, Any]) -> None:
    record = record_of(0, {"input": 0.5, "wait": 1.0})

    def run(group: Any) -> str:
        if group.rank == 0:
            monitor = fddp.watch.Monitor(group)
            monitor._steps.append(record)
            return ending(monitor.report).text
        sent = {"summary": {**asdict(RankSummary.of(1, [record])), **change}, "sent": []}
        return ending(lambda: exchange(sent, optional(REPORT), group, topic="monitor")).text

    for text in fddp.loopback(2, run):
        assert text.startswith("rank 1 sent a malformed 'monitor' message: the value is {")
        assert "expected None or an object with the fields summary, sent" in text


@given(_intervals, _seconds, _seconds)
def test_interval_overlap(intervals: tuple[Interval, ...], one: float, other: float) -> None:
    start_s, end_s = sorted((one, other))
    expected = sum(max(0.0, min(e, end_s) - max(s, start_s)) for s, e in intervals)
    assert overlap_s(intervals, start_s, end_s) == pytest.approx(expected, abs=1e-6)


@given(_intervals, _intervals, _seconds, _seconds)
def test_intervals_without_others(
    intervals: tuple[Interval, ...], holes: tuple[Interval, ...], one: float, other: float
) -> None:
    start_s, end_s = sorted((one, other))
    left = without(intervals, holes)
    common_s = sum(overlap_s(intervals, max(a, start_s), min(b, end_s)) for a, b in holes)
    expected_s = overlap_s(intervals, start_s, end_s) - common_s
    assert overlap_s(left, start_s, end_s) == pytest.approx(expected_s, abs=1e-6)
    assert all(start < end for start, end in left)


@given(_intervals, _intervals, _intervals, st.lists(_seconds, min_size=4, max_size=4))
def test_every_moment_counts_for_one_phase(
    waits: tuple[Interval, ...],
    collections: tuple[Interval, ...],
    hooks: tuple[Interval, ...],
    moments: list[float],
) -> None:
    """Of several, waiting comes first, and then the garbage collector."""
    begun_s, start_s, backward_end_s, end_s = sorted(moments)
    times = StepTimes((), start_s, backward_end_s, end_s, (), begun_s, waits, hooks, collections)
    phases_s = step_phases(times)
    assert sum(phases_s.values()) == pytest.approx(end_s - begun_s, abs=1e-6)
    assert phases_s["wait"] == overlap_s(waits, begun_s, end_s)
    of_collector = overlap_s(without(collections, waits), begun_s, end_s)
    assert phases_s.get("gc", 0.0) == of_collector
    assert ("gc" in phases_s) == bool(collections)


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
