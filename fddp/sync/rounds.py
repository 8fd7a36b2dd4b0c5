"""Rounds of a loop over uneven inputs, and the value in place of a missing batch."""

from __future__ import annotations

from typing import Final

from fddp.errors import UnevenError


class Exhausted:
    """Type of `EXHAUSTED`."""

    def __repr__(self) -> str:
        return "fddp.EXHAUSTED"

    def __reduce__(self) -> str:
        return "EXHAUSTED"


EXHAUSTED: Final = Exhausted()
"""What a rank without a batch gets in a round; a step accepts it in the batch's place."""


class Round:
    """One turn of a loop: what a `GradSync` needs to know of it.

    Attributes:
        number: from 0.
        has_next: whether this rank has input for another round.
        synced: how often the loop's body has synchronised.
        any_next: whether any rank has input for another round, once the body has synchronised.
        over: whether the body has synchronised and no rank has input for another round.
    """

    def __init__(self, number: int, has_next: bool) -> None:
        self.number = number
        self.has_next = has_next
        self.synced = 0
        self.any_next = False
        self.over = False

    def problem(self) -> UnevenError:
        """The error of a body that has not synchronised once."""
        return UnevenError(
            f"round {self.number} of fddp.uneven synchronised {self.synced} times instead of once; "
            f"call the step exactly once in the loop's body, with fddp.EXHAUSTED too, and group "
            f"micro-batches with every=k"
        )
