"""Traces of monitors: events of all ranks on one clock."""

from __future__ import annotations

import math
from typing import Any

import pytest

import fddp
from fddp.extend import BucketTimes, StepTimes
from fddp.watch import StepRecord
from fddp.watch.trace import chrome_trace, trace_message
from tests.support.monitored import check_events, train_monitored


def test_a_trace_holds_all_ranks_and_steps() -> None:
    def run(group: Any) -> str:
        return train_monitored(group, 6).trace(4)

    one, two = fddp.loopback(2, run)
    assert one == two
    spans = check_events(one)
    assert {span["pid"] for span in spans} == {0, 1}
    assert {span["args"]["step"] for span in spans} == {2, 3, 4, 5}
    for rank in (0, 1):
        names = [s["name"] for s in spans if s["pid"] == rank and s["args"]["step"] == 5]
        assert {"input", "forward", "backward", "sync", "bucket 0"} <= set(names)
    assert all(span["args"]["bytes"] > 0 for span in spans if span["tid"] == 1)


def message_from_clock(zero_s: float, numbers: range, rest_s: float = 0.1) -> dict[str, Any]:
    """Steps of a rank whose clock starts at a time; the rest follows the last collective."""
    steps = []
    for n in numbers:
        at_s = zero_s + n
        buckets = (BucketTimes(0, 8, at_s + 0.4, at_s + 0.4, at_s + 0.7),)
        end_s = at_s + 0.7 + rest_s
        times = StepTimes(buckets, at_s + 0.3, at_s + 0.5, end_s, begun_s=at_s + 0.1)
        phases_s = {"input": 0.1, "forward": 0.2, "backward": 0.2, "wait": 0.2, "sync": rest_s}
        steps.append(StepRecord(n, phases_s, times))
    return trace_message(steps)


def starts_us(trace: str) -> dict[Any, list[float]]:
    """Starts of spans on each rank that has it, by step and name."""
    starts: dict[Any, list[float]] = {}
    for span in check_events(trace):
        starts.setdefault((span["args"]["step"], span["name"]), []).append(span["ts"])
    return starts


def test_clocks_are_set_by_the_ends_of_collectives() -> None:
    """Not by those of steps, after which ranks may be busy for different times."""
    messages = [message_from_clock(1e5, range(3)), message_from_clock(3.0, range(3), 0.15)]
    for first, second in starts_us(chrome_trace(messages)).values():
        assert first == pytest.approx(second, abs=1.0)


def test_clocks_are_set_by_common_steps() -> None:
    messages = [message_from_clock(10.0, range(3)), message_from_clock(7.0, range(1, 4))]
    starts = starts_us(chrome_trace(messages))
    assert len(starts[0, "forward"]) == len(starts[3, "forward"]) == 1
    for step in (1, 2):
        first, second = starts[step, "forward"]
        assert first == pytest.approx(second, abs=1.0)
    messages[1] = message_from_clock(12.0, range(5, 6))
    starts = starts_us(chrome_trace(messages))
    (first,), (other,) = starts[0, "forward"], starts[5, "forward"]
    assert other - first == pytest.approx(7e6, abs=1.0), "as on their own clocks"


def test_a_trace_of_no_rank_is_empty() -> None:
    assert check_events(chrome_trace([])) == []


def test_steps_without_info_have_no_beginning() -> None:
    assert math.isnan(StepTimes((), 1.0, 2.0, 3.0).begun_s)
