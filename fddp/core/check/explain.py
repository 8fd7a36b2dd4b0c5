"""Explanations of wrong results."""

from __future__ import annotations

from collections.abc import Collection
from fractions import Fraction
from typing import NamedTuple

from fddp.core.check.symbolic import Term, Value
from fddp.core.schedule.topology import Topology

_SHOWN = 3  # ranks listed in a message


class Problem(NamedTuple):
    """Description of a wrong result."""

    text: str  # continuation of "rank 0 ends with leaf 'w' ..."
    ranks: tuple[int, ...] = ()  # the first ranks whose gradients are missing in it


def explain(topology: Topology, got: Value, expected: Value) -> Problem:
    """Describe the first difference between the value `got` and the expected value `expected`."""
    for term, factor in sorted(expected, key=lambda item: item[0].source, reverse=True):
        found = [(t, f) for t, f in got if t.source == term.source]
        if found != [(term, factor)]:
            break
    if not found:
        return Problem(
            "without the late gradients; pack them into the repair buffer, reduce it like the "
            "bucket, and add it, all with when='late'"
        )
    if len(found) > 1:
        parts = sorted(_in_words(topology, *item) for item in found)
        return Problem(
            f"holding {' plus '.join(parts)} instead of {_in_words(topology, term, factor)}"
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
        way_out = f"reduce it along {_names(topology, missing)} before gathering chunks"
    others = _others(topology, got.summed, missing)
    return Problem(
        f"{summed}: the {late}gradients of {others} are missing; {way_out}",
        _ranks(topology, missing),
    )


def _counted_often(term: Term, got: Fraction, expected: Fraction) -> Problem:
    late = "late " if term.source == "late" else ""
    return Problem(
        f"with each {late}gradient counted {got / expected} times: it holds {got} of the sum "
        f"over ranks instead of {expected}; sum along each axis once, and add a repair once"
    )


def _shard_problem(topology: Topology, got: Term, expected: Term) -> Problem:
    if got.summed:
        along = _names(topology, got.summed)
        return Problem(f"summed along {along}; gather shards, do not reduce them")
    missing = expected.owned - got.owned
    return Problem(
        f"not gathered along {_names(topology, missing)}: the shards of "
        f"{_others(topology, got.owned, missing)} are missing; pack shards and gather them",
        _ranks(topology, missing),
    )


def _in_words(topology: Topology, term: Term, factor: Fraction) -> str:
    along = _names(topology, term.summed)
    return f"{factor} of {f'the sum along {along}' if along else 'the local gradient'}"


def _names(topology: Topology, axes: Collection[str]) -> str:
    return " and ".join(axis for axis in topology.names if axis in axes)


def _ranks(topology: Topology, axes: Collection[str]) -> tuple[int, ...]:
    """Return the first few ranks that differ from rank 0 only in `axes`."""
    count = min(topology.size(axes), 1 + _SHOWN)
    return tuple(_rank(topology, axes, number) for number in range(1, count))


def _rank(topology: Topology, axes: Collection[str], number: int) -> int:
    """Return a rank of rank 0's group along `axes` by its index, without building the group."""
    rank, stride = 0, 1
    for name, size in reversed(topology.axes):
        if name in axes:
            number, place = divmod(number, size)
            rank += place * stride
        stride *= size
    return rank


def _others(topology: Topology, present: Collection[str], missing: Collection[str]) -> str:
    """List the first few ranks outside of rank 0's group along `present`."""
    shown = [str(rank) for rank in _ranks(topology, missing)]
    count = topology.world_size - topology.size(present)
    listed = ", ".join([*shown, "..."] if count > len(shown) else shown)
    return f"ranks {listed}" if count > 1 else f"rank {listed}"
