"""Runs of two ranks that get each other's values."""

from __future__ import annotations

from fddp.extend import result_of_two
from fddp.testing.replication.observers import Reads, first_difference
from fddp.testing.replication.runs import Outcome, Program


def exchanged(checked: Program, alone: Outcome) -> tuple[Outcome, Outcome]:
    """The usual run, and that of another rank with its results.

    If the ranks make different calls, they may do so because a result says how they go on, such as
    the longest sequence of all ranks, and should have had the values of both. They run again with
    these, as long as that makes them agree on more calls.

    Args:
        checked: the step.
        alone: the usual run, in which all ranks send the same.
    """
    usual, agreed = alone, -1
    while True:
        other = checked.run(frozenset(checked.causes), earlier=usual.collectives, reads=Reads())
        pairs = list(zip(usual.collectives, other.collectives, strict=False))
        equal = next((n for n, (own, one) in enumerate(pairs) if not own.is_like(one)), len(pairs))
        differs = first_difference(usual.collectives, other.collectives) or other.error
        if not differs or equal <= agreed:
            return usual, other
        of_both = [
            own._replace(result=result_of_two(own.rendezvous, own.sent, one.sent))
            for own, one in pairs[:equal]
        ]
        again = checked.run(frozenset(), earlier=of_both, reads=Reads())
        if again.error is not None:
            return usual, other
        usual, agreed = again, equal
