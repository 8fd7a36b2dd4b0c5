"""Says in words what is wrong with what an element holds."""

from __future__ import annotations

from collections.abc import Collection
from fractions import Fraction
from typing import NamedTuple

from fddp.core.check.symbolic import Term, Value
from fddp.core.schedule.topology import Topology

_SHOWN = 3  # ranks in a sentence


class Problem(NamedTuple):
    """What is wrong with a result.

    Attributes:
        text: goes on from "rank 0 ends with leaf 'w' ...".
        ranks: the first of those whose contributions are missing there.
    """

    text: str
    ranks: tuple[int, ...] = ()


def explain(topology: Topology, got: Value, due: Value) -> Problem:
    """The first thing that is wrong with a value that is not what is due."""
    if any(term.source == "unfit" for term, _ in got):
        return Problem(
            "holding a sum in the unit that does not fit, which can't be corrected afterwards; "
            "reduce the bucket anew, by a pack and its collectives that run 'again'"
        )
    for term, factor in sorted(due, key=lambda item: item[0].source, reverse=True):
        found = [(t, f) for t, f in got if t.source == term.source]
        if found != [(term, factor)]:
            break
    if not found:
        return Problem(
            "without what came late, which would be lost; pack it into the repair, reduce that as "
            "the bucket was, and add it, all of it 'late'"
        )
    if len(found) > 1:
        parts = sorted(_in_words(topology, *item) for item in found)
        return Problem(
            f"holding {' plus '.join(parts)}; {_in_words(topology, term, factor)} is due"
        )
    ((got_term, got_factor),) = found
    if term.source == "shard":
        return _shard_problem(topology, got_term, term)
    missing = term.summed - got_term.summed
    if missing:
        return _missing(topology, got_term, missing)
    return _counted_often(term, got_factor, factor)


def _missing(topology: Topology, got: Term, missing: Collection[str]) -> Problem:
    late = "late " if got.source == "late" else ""
    along = _names(topology, got.summed)
    summed = f"summed along {along} only" if along else "not summed over ranks"
    way_out = f"reduce it along {_names(topology, missing)} too"
    if got.owned:
        summed += f", and each element copied from one rank along {_names(topology, got.owned)}"
        way_out = f"reduce it along {_names(topology, missing)} before chunks are joined"
    others = _others(topology, got.summed, missing)
    return Problem(
        f"{summed}: the {late}contributions of {others} are missing; {way_out}",
        _ranks(topology, missing),
    )


def _counted_often(term: Term, got: Fraction, due: Fraction) -> Problem:
    late = "late " if term.source == "late" else ""
    return Problem(
        f"with each {late}contribution counted {got / due} times: it holds {got} of the sum over "
        f"ranks where {due} is due; sum along each axis once, and add a repair once"
    )


def _shard_problem(topology: Topology, got: Term, due: Term) -> Problem:
    if got.summed:
        along = _names(topology, got.summed)
        return Problem(f"summed along {along}: shards are gathered, and never reduced")
    missing = due.owned - got.owned
    return Problem(
        f"not gathered along {_names(topology, missing)}: the shards of "
        f"{_others(topology, got.owned, missing)} are missing; pack shards, and gather these",
        _ranks(topology, missing),
    )


def _in_words(topology: Topology, term: Term, factor: Fraction) -> str:
    along = _names(topology, term.summed)
    return f"{factor} of {f'the sum along {along}' if along else 'the own contribution'}"


def _names(topology: Topology, axes: Collection[str]) -> str:
    return " and ".join(axis for axis in topology.names if axis in axes)


def _ranks(topology: Topology, axes: Collection[str]) -> tuple[int, ...]:
    """The first few that differ from rank 0 in `axes` only; never all, as there may be many."""
    count = min(topology.size(axes), 1 + _SHOWN)
    return tuple(_rank(topology, axes, number) for number in range(1, count))


def _rank(topology: Topology, axes: Collection[str], number: int) -> int:
    """The rank at a place in rank 0's group along `axes`, without making the group."""
    rank, stride = 0, 1
    for name, size in reversed(topology.axes):
        if name in axes:
            number, place = divmod(number, size)
            rank += place * stride
        stride *= size
    return rank


def _others(topology: Topology, present: Collection[str], missing: Collection[str]) -> str:
    """The first few ranks outside of rank 0's group along `present`."""
    shown = [str(rank) for rank in _ranks(topology, missing)]
    count = topology.world_size - topology.size(present)
    listed = ", ".join([*shown, "..."] if count > len(shown) else shown)
    return f"ranks {listed}" if count > 1 else f"rank {listed}"
