"""Symbolic values of elements: linear combinations of gradients.

Every rank runs the same operations, so one value describes the elements of all ranks. A value is a
sum of terms with factors. A term has a source (such as the gradients that were packed in time), the
axes along which it is summed, and the axes along which it is a copy of its owner's element. A
reduction along an axis adds the axis to the term. If the term has the axis already, all ranks along
it hold the same, so the factor is multiplied by their number. Only factors depend on the number of
ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from fractions import Fraction
from functools import cache
from typing import Literal, NamedTuple

from fddp.core.schedule.op import When
from fddp.core.schedule.schedule import Schedule

Source = Literal["packed", "late", "shard"]
"""Gradients packed in time; late gradients; shards to be gathered."""


class Term(NamedTuple):
    """Gradients or shards of some ranks."""

    source: Source
    summed: frozenset[str] = frozenset()  # axes along which it is the sum over all ranks
    owned: frozenset[str] = frozenset()  # axes along which it is a copy of the owner's element


Value = frozenset[tuple[Term, Fraction]]
"""Linear combination: distinct terms with factors."""


class Branch(NamedTuple):
    """Decision of the control word about one bucket."""

    whens: frozenset[When]  # conditions whose operations run
    late: bool  # True if gradients were late
    text: str  # description for errors; empty for a step without repairs

    @property
    def sources(self) -> tuple[Source, ...]:
        """Gradients that the result must hold."""
        return ("packed", "late") if self.late else ("packed",)


_ON_TIME = Branch(frozenset({"always"}), False, "")
_LATE = Branch(frozenset({"always", "late", "again"}), True, " if gradients are late")


def branches(schedule: Schedule, bucket: int) -> tuple[Branch, ...]:
    """Return all distinct branches of a bucket."""
    if schedule.result == "replicated" or schedule.plan.buckets[bucket].sparse:
        return (_ON_TIME,)
    return (_ON_TIME, _LATE)


class Algebra:
    """Arithmetic with values, for one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._topology = schedule.topology
        self._average = schedule.scaling == "average"
        self._shards = schedule.result == "replicated"
        self.axes = frozenset(name for name, size in schedule.topology.axes if size > 1)
        ranks = 1 if self._shards else schedule.topology.world_size
        self._before = Fraction(1, ranks if schedule.scaling == "before" else 1)
        self._after = Fraction(1, ranks if schedule.scaling == "after" else 1)
        #: value after a reduction along axes; cached, as buckets share about ten values
        self.reduced = cache(self._reduce)

    def packed(self, when: When, branch: Branch) -> Value:
        """Value after packing."""
        if self._shards:
            return frozenset({(Term("shard"), Fraction(1))})
        sources: tuple[Source, ...] = ("late",)
        if when == "always":
            sources = ("packed",)
        elif when == "again":
            sources = branch.sources
        return frozenset((Term(source), self._before) for source in sources)

    def gathered_sparse(self, branch: Branch) -> Value:
        """Value of a gathered sparse bucket: the sum, scaled as by packing."""
        return frozenset((term, factor / self._after) for term, factor in self.expected(branch))

    def _reduce(self, value: Value, axes: tuple[str, ...]) -> Value:
        wide = self.axes.intersection(axes)
        reduced = []
        for term, factor in value:
            same = wide & (term.summed | term.owned)  # ranks along these axes hold the same
            factor *= self._topology.size(same)
            if self._average:
                factor /= self._topology.size(wide)
            reduced.append((term._replace(summed=term.summed | (wide - same)), factor))
        return _total(reduced)

    def gathered(self, value: Value, axes: tuple[str, ...]) -> Value:
        """Value after an all-gather along `axes`: elements not summed are copies of the owner's."""
        wide = self.axes.intersection(axes)
        return frozenset(
            (term._replace(owned=term.owned | (wide - term.summed)), factor)
            for term, factor in value
        )

    def added(self, one: Value, other: Value) -> Value:
        """Sum of two values."""
        return _total((*one, *other))

    def unpacked(self, value: Value) -> Value:
        """Value of results after unpacking."""
        return frozenset((term, factor * self._after) for term, factor in value)

    def expected(self, branch: Branch) -> Value:
        """Required value of results."""
        if self._shards:
            return frozenset({(Term("shard", owned=self.axes), Fraction(1))})
        factor = Fraction(1, self._topology.world_size)
        return frozenset((Term(source, self.axes), factor) for source in branch.sources)


def _total(terms: Iterable[tuple[Term, Fraction]]) -> Value:
    total: defaultdict[Term, Fraction] = defaultdict(Fraction)
    for term, factor in terms:
        total[term] += factor
    return frozenset(total.items())
