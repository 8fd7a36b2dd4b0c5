"""The ring of the flight recorder, against a plain list of operations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fddp
from fddp.native import extension
from fddp.telemetry.flight.recorder import SIZE, FlightRecord, Recorder

if TYPE_CHECKING:
    from fddp._C import FlightEntry

_CALLS = ["launch", "wait", "done", "fail"]


@dataclass
class Operation:
    """What the ring is to know of an operation."""

    step: int
    has_waited: bool = False
    state: str = "launched"


@given(
    size=st.integers(1, 4),
    calls=st.lists(st.tuples(st.sampled_from(_CALLS), st.integers(0, 9)), max_size=30),
)
def test_a_ring_keeps_the_newest_operations(size: int, calls: list[tuple[str, int]]) -> None:
    ring = extension.compiled.FlightRing(size)
    entries: list[FlightEntry] = []
    known: list[Operation] = []
    for call, argument in calls:
        if call == "launch":
            entries.append(ring.launch(7, argument, 3))
            known.append(Operation(argument))
        elif call == "fail":
            ring.fail()
            for operation in known:
                operation.state = "failed" if operation.state == "launched" else operation.state
        elif argument < len(entries):
            operation = known[argument]
            if call == "wait":
                entries[argument].note_wait()
                operation.has_waited = True
            else:
                entries[argument].note_done()
                operation.state = "done"
    records = [FlightRecord(*fields) for fields in ring.records()]
    kept = [*enumerate(known)][-size:]
    assert [record.number for record in records] == [number for number, _ in kept]
    for record, (number, operation) in zip(records, kept, strict=True):
        assert (record.source, record.step, record.position) == (7, operation.step, 3)
        assert record.launched_s == entries[number].launched_s
        assert (record.waited_s > 0.0) == operation.has_waited
        ended = "failed" if math.isinf(record.done_s) else "done"
        assert operation.state == (ended if record.done_s else "launched")


def test_the_first_wait_counts() -> None:
    ring = extension.compiled.FlightRing(2)
    entry = ring.launch(0, 0, 0)
    entry.note_wait()
    (before,) = ring.records()
    entry.note_wait()
    assert ring.records() == [before]
    ring.entry(0).note_done()
    assert FlightRecord(*ring.records()[0]).done_s > before[4]


@pytest.mark.parametrize("size", [0, -1])
def test_a_ring_has_room(size: int) -> None:
    with pytest.raises(ValueError, match=f"size must be at least 1, got {size}"):
        extension.compiled.FlightRing(size)


def test_descriptions_are_freed_after_their_operations() -> None:
    def run(group: Any) -> tuple[int, list[str]]:
        with fddp.GradSync({"w": torch.zeros(2)}, group=group) as sync:
            recorder: Recorder = sync._engine.recorder
            for number in range(5 * SIZE):
                recorder.launched(f"operation {number}", -1, 0)
            return len(recorder._sources), [op.kind for op in fddp.flight(sync).logs[0].ops]

    for sources, kinds in fddp.loopback(1, run):
        assert sources <= 2 * SIZE
        assert kinds == [f"operation {number}" for number in range(4 * SIZE, 5 * SIZE)]
