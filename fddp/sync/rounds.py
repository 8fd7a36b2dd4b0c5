"""Rounds of a loop over uneven inputs, and the value in place of a missing batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NoReturn

from fddp.core.protocol.control_word import ControlReport
from fddp.core.schedule.schedule import Schedule
from fddp.errors import UnevenError


class Exhausted:
    """Type of `EXHAUSTED`."""

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "this rank's input is exhausted, and fddp.EXHAUSTED can't be unpacked; write "
            "`for batch in fddp.uneven(...): step(params, batch)`, and unpack the batch in the "
            "loss function"
        )

    def __repr__(self) -> str:
        return "fddp.EXHAUSTED"

    def __reduce__(self) -> str:
        return "EXHAUSTED"


EXHAUSTED: Final = Exhausted()
"""Stand-in for a batch on a rank whose input is exhausted. Steps accept it as an argument."""


@dataclass
class Round:
    """One round of a loop over uneven inputs.

    Attributes:
        number: number of the round, from 0.
        has_next: True if this rank has input for another round.
        synced: number of steps in the loop's body so far.
        any_next: True if any rank has input for another round; known after the step.
        over: True if no rank has input for another round; known after the step.
    """

    number: int
    has_next: bool
    synced: int = 0
    any_next: bool = False
    over: bool = False

    def count_step(self) -> None:
        """Count a step of the loop's body."""
        self.synced += 1

    def note(self, report: ControlReport, schedule: Schedule) -> None:
        """Note the ranks that have further input; the same on all ranks, also after a failure."""
        if schedule.result != "replicated":
            self.any_next = report.has_next > 0
            self.over = report.has_next == 0

    def problem(self) -> UnevenError:
        """Return the error of a body with no step, or more than one."""
        return UnevenError(
            f"round {self.number} of fddp.uneven synchronised {self.synced} times instead of once; "
            f"call the step exactly once in the loop's body, with fddp.EXHAUSTED too, and group "
            f"micro-batches with every=k"
        )
