"""Steps under a monitor, and a check of its traces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest

import fddp
from fddp.extend import StepTimes
from fddp.watch import StepRecord
from tests.support.models import batch, mlp, mlp_loss

DELAY_S = 0.05
STEPS = 10


def record_of(step: int, phases_s: dict[str, float]) -> StepRecord:
    """Return the record of a step without buckets."""
    return StepRecord(step, phases_s, StepTimes((), 1.0, 2.0, 3.0, begun_s=0.5))


def train_monitored(group: Any, steps: int, **options: Any) -> fddp.watch.Monitor:
    with fddp.GradSync(mlp(), group=group) as sync:
        step = sync.value_and_grad(mlp_loss, with_info=True)
        monitor = fddp.watch.Monitor(group, **options)
        for number in range(steps):
            monitor.observe(step(mlp(), batch(group.rank, number))[2])
        return monitor


def check_steps_add_up(steps: Sequence[StepRecord]) -> None:
    """Check that phases add up to the time since the end of the previous step."""
    for before, record in itertools.pairwise(steps):
        took_s = record.times.end_s - before.times.end_s
        assert sum(record.phases_s.values()) == pytest.approx(took_s)
        assert all(s >= 0.0 for s in record.phases_s.values())


def check_events(text: str) -> list[dict[str, Any]]:
    """Check a trace against the Trace Event Format, in its JSON object form; return its spans.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    trace = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert set(trace) <= {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    spans = []
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            assert event["args"]
        else:
            assert event["ph"] == "X"
            assert event["ts"] >= 0.0
            assert event["dur"] >= 0.0
            assert isinstance(event["cat"], str)
            spans.append(event)
    for lane in {(event["pid"], event["tid"]) for event in spans}:
        open_until: list[float] = []
        for event in sorted(
            (e for e in spans if (e["pid"], e["tid"]) == lane), key=lambda e: (e["ts"], -e["dur"])
        ):
            while open_until and open_until[-1] <= event["ts"] + 1e-2:
                open_until.pop()
            end = event["ts"] + event["dur"]
            if open_until:
                # Collectives follow each other; of two that end together, one may have no length.
                assert (
                    event["name"] in ("gc", "hook", "wait")
                    if event["tid"] == 0
                    else not event["dur"]
                )
                assert end <= open_until[-1] + 1e-2, "spans of a thread nest, or follow each other"
            open_until.append(end)
    return spans
