"""What elements hold, as a value: which contributions, summed along which axes, how often.

Every rank carries out the same operations, so that one combination stands for what all of them
hold. It is made of terms. A term names contributions (those that were there when the bucket was
packed, say), the axes along which they have been summed, and the axes along which the element is a
copy of its owner's. Reducing along an axis adds that axis to a term; where it is there already, all
ranks along it hold the same, and the term is counted once for each of them. So nothing here
depends on the number of ranks but the factors.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal, NamedTuple

from fddp.core.schedule.op import When
from fddp.core.schedule.schedule import RETAINED_DTYPES, Schedule

Source = Literal["packed", "unfit", "late", "shard"]
"""Contributions: what was there when a bucket was packed, in a fit or perhaps an unfit unit of
weight, what came late, and, where shards are gathered, the shards."""


class Term(NamedTuple):
    """Contributions of some ranks.

    Attributes:
        source: of which kind.
        summed: axes along which it is the sum over all ranks.
        owned: axes along which it is a copy of the value of the rank that owned the element.
    """

    source: Source
    summed: frozenset[str] = frozenset()
    owned: frozenset[str] = frozenset()


Value = frozenset[tuple[Term, Fraction]]
"""A linear combination: terms, each once, with their factors."""


class Branch(NamedTuple):
    """What the control word may say of one bucket.

    Attributes:
        whens: which operations run.
        late: whether anything came late.
        unfit: whether the unit of weight may not have fitted what was packed first.
        text: the same in words, for errors; empty where nothing is out of the ordinary.
    """

    whens: frozenset[When]
    late: bool
    unfit: bool
    text: str


_ON_TIME = Branch(frozenset({"always"}), False, False, "")
_LATE = Branch(frozenset({"always", "late", "again"}), True, False, " where gradients came late")
_UNFIT = Branch(
    frozenset({"always", "again"}), False, True, " where weights do not fit the agreed unit"
)


def branches(schedule: Schedule, bucket: int) -> tuple[Branch, ...]:
    """All ways that differ. A bucket of a narrow format has two reasons to be reduced again.

    Where gradients of such a bucket come late, the unit may be unfit as well; the same operations
    run, so that one branch, with the stricter demand, stands for both. Of wider formats a sum in an
    unfit unit is corrected by one factor, so that nothing differs.
    """
    if schedule.result == "replicated" or schedule.plan.buckets[bucket].sparse:
        return (_ON_TIME,)
    is_narrow = schedule.wire_dtypes[bucket] in RETAINED_DTYPES
    return (_ON_TIME, _UNFIT, _LATE._replace(unfit=True)) if is_narrow else (_ON_TIME, _LATE)


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
        # Buckets go through the same few values: 10,000 operations need some ten of these.
        self._reduced: dict[tuple[Value, tuple[str, ...]], Value] = {}

    def packed(self, when: When, branch: Branch) -> Value:
        """What a pack puts in."""
        if self._shards:
            return frozenset({(Term("shard"), Fraction(1))})
        sources: tuple[Source, ...] = ("late",)
        if when == "always":
            sources = ("unfit" if branch.unfit else "packed",)
        elif when == "again":
            sources = ("packed", "late") if branch.late else ("packed",)
        return frozenset((Term(source), self._before) for source in sources)

    def gathered_sparse(self, branch: Branch) -> Value:
        """What a sparse bucket holds once it is gathered: the sum, brought to scale as by pack."""
        return frozenset((term, factor / self._after) for term, factor in self.expected(branch))

    def reduced(self, value: Value, axes: tuple[str, ...]) -> Value:
        """What a reducing collective leaves of it."""
        key = (value, axes)
        if key not in self._reduced:
            self._reduced[key] = self._reduce(value, self.axes.intersection(axes))
        return self._reduced[key]

    def _reduce(self, value: Value, axes: frozenset[str]) -> Value:
        total: dict[Term, Fraction] = {}
        for term, factor in value:
            same = axes & (term.summed | term.owned)  # ranks along these hold the same already
            new = term._replace(summed=term.summed | (axes - same))
            factor *= self._topology.size(same)
            if self._average:
                factor /= self._topology.size(axes)
            total[new] = total.get(new, Fraction(0)) + factor
        return frozenset(total.items())

    def gathered(self, value: Value, axes: tuple[str, ...]) -> Value:
        """The same on all ranks along `axes`: what was not summed along them is its owner's."""
        wide = self.axes.intersection(axes)
        return frozenset(
            (term._replace(owned=term.owned | (wide - term.summed)), factor)
            for term, factor in value
        )

    def added(self, one: Value, other: Value) -> Value:
        """Their sum."""
        total = dict(one)
        for term, factor in other:
            total[term] = total.get(term, Fraction(0)) + factor
        return frozenset(total.items())

    def unpacked(self, value: Value) -> Value:
        """What results hold."""
        return frozenset((term, factor * self._after) for term, factor in value)

    def expected(self, branch: Branch) -> Value:
        """What results must hold."""
        if self._shards:
            return frozenset({(Term("shard", owned=self.axes), Fraction(1))})
        sources: tuple[Source, ...] = ("packed", "late") if branch.late else ("packed",)
        factor = Fraction(1, self._topology.world_size)
        return frozenset((Term(source, self.axes), factor) for source in sources)
