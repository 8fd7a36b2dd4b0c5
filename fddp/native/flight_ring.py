"""Typed interface of the ring of the flight recorder."""

from __future__ import annotations

from typing import NamedTuple, Protocol, cast

from fddp.native import extension


class FlightEntry(Protocol):
    """An operation in a ring. Once newer ones have replaced it, calls do nothing.

    Attributes:
        launched_s: time of the launch, on the clock of `time.perf_counter`.
    """

    launched_s: float

    def note_wait(self) -> None:
        """Record that this rank waits for the operation from now on; a second call does nothing."""

    def note_done(self) -> None:
        """Record that the operation has finished."""


class FlightRecord(NamedTuple):
    """State of an operation. Times are on the clock of `time.perf_counter`; 0.0 stands for not yet,
    and infinity for never.

    Attributes:
        number: counts the operations of the ring.
        source: number of the schedule of the operation, or of its description.
        step: number of the step.
        position: position in the schedule, or the number of bytes.
        launched_s, waited_s, done_s: times of the launch, of the start of the wait, and of the end.
    """

    number: int
    source: int
    step: int
    position: int
    launched_s: float
    waited_s: float
    done_s: float


class FlightRing(Protocol):
    """The newest operations of a `GradSync` or communicator."""

    def launch(self, source: int, step: int, position: int) -> FlightEntry:
        """Record an operation about to be started; arguments as in `FlightRecord`."""

    def entry(self, number: int) -> FlightEntry:
        """Return a recorded operation, without the time of its launch."""

    def fail(self) -> None:
        """Mark all operations in flight as failed."""

    def records(self) -> list[tuple[int, int, int, int, float, float, float]]:
        """Return the newest operations, with the fields of `FlightRecord`."""


def new_flight_ring(size: int) -> FlightRing:
    """Return an empty ring that keeps the newest `size` operations."""
    return cast("FlightRing", extension.load().FlightRing(size))
