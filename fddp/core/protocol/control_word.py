"""The control word: one small vector, summed over ranks with the last bucket of every step.

From its sums every rank learns the same facts in the same step: which leaves were used anywhere,
which buckets received a gradient after they were launched, how many ranks took part and with what
weight, who has more input, whether a contribution was not finite, and whether a rank failed. No
flag of the caller's and no further collective is needed for any of them.

[Note: limbs]
Where the word travels in the tail of a float32 bucket, or its sum must not depend on the order in
which ranks are added up, numbers are cut into limbs: digits of so few bits that the sum of all
ranks' is an integer that the format holds exactly. An integer takes a few of them. A weight is a
fixed-point number over all that a float64 can be, so that its sum is exact, too, and is rounded
once, when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Format = Literal["float32", "float64"]
"""What the elements of a word can be."""

MOST_RANKS = 2**16
"""That a word of float32 is for: with more, a limb would have so few bits that weights took
thousands of them."""

MOST_LEAVES = 2**24
"""Of which float32 holds the order."""

_SIGNIFICANT_BITS: dict[Format, int] = {"float32": 24, "float64": 53}
_KEPT_WEIGHTS = 64
_FINGERPRINT_BITS = 32
_LOWEST_EXPONENT = -1074  # of a float64; bit 0 of a weight
_UNITS_IN_ONE = 1 << -_LOWEST_EXPONENT
_WEIGHT_BITS = 1024 - _LOWEST_EXPONENT + 1  # one above the largest: infinity


def limb_bits(fmt: Format, world_size: int) -> int:
    """How many bits a limb may have for the sum of all ranks' to be exact.

    Example:
        >>> limb_bits("float32", 2), limb_bits("float32", 64), limb_bits("float64", 5)
        (23, 18, 50)
    """
    return _SIGNIFICANT_BITS[fmt] - (world_size - 1).bit_length()


@dataclass(frozen=True)
class ControlLayout:
    """Where each field lies in the vector.

    Attributes:
        leaves: number of reduced leaves.
        buckets: number of buckets.
        with_order: whether rank 0's ready order rides along (until a plan has been rebuilt by it).
        format: what the elements are.
        limb_bits: bits of a limb; 0 where fingerprint and weights are one element each, in which
            float64 holds sums of token counts. See [Note: limbs].

    Example:
        >>> ControlLayout(leaves=2, buckets=1).size
        14
        >>> ControlLayout(leaves=2, buckets=1, format="float32", limb_bits=23).size
        197
    """

    leaves: int
    buckets: int
    with_order: bool = False
    format: Format = "float64"
    limb_bits: int = 0

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return int(self.fields["order"].stop)

    @cached_property
    def fields(self) -> dict[str, slice]:
        """Where each field lies."""
        lengths = {
            "fingerprint": self._limbs(_FINGERPRINT_BITS),
            "active": 1,
            "method": 3,  # how many ranks have one, its number, and the square of that
            "weight": self._limbs(_WEIGHT_BITS),
            "weight_squared": self._limbs(_WEIGHT_BITS),
            "has_next": 1,
            "nonfinite": 1,
            "large": 1,
            "failed": 1,
            "late": self.buckets,
            "used": self.leaves,
            "order": self.leaves if self.with_order else 0,
        }
        fields, start = {}, 0
        for name, length in lengths.items():
            fields[name] = slice(start, start + length)
            start += length
        return fields

    def _limbs(self, bits: int) -> int:
        return -(-bits // self.limb_bits) if self.limb_bits else 1


@dataclass(frozen=True)
class ControlWord:
    """What one rank reports of a step.

    Attributes:
        fingerprint: integer below 2**32 that must be the same on all ranks (plan and step).
        weight: this rank's weight; 0 contributes nothing.
        method: a number below 16 that must be the same on all ranks whose weight is above 0; 0 goes
            with any.
        used: for each reduced leaf, whether this rank has a gradient for it.
        late: for each bucket, whether a gradient arrived after its launch.
        has_next: whether this rank has input for another step.
        nonfinite: whether one of its gradients holds NaN or infinity.
        may_overflow: whether its gradients are so large that a sum may overflow, or not known to be
            less.
        failed: whether this rank could not complete the step.
        order: reduced leaves in the order in which their gradients arrived; only rank 0 gives it.
    """

    fingerprint: int
    weight: float
    used: Sequence[bool]
    late: Sequence[bool]
    method: int = 0
    has_next: bool = True
    nonfinite: bool = False
    may_overflow: bool = False
    failed: bool = False
    order: Sequence[int] = ()


@dataclass(frozen=True)
class ControlReport:
    """What all ranks know after the reduction; the same on each.

    Attributes:
        agreed: whether all ranks had the same fingerprint, and those that bring something the same
            method.
        active: number of ranks with a weight above zero.
        total_weight: sum of weights.
        total_squared: sum of squared weights.
        has_next: number of ranks with input for another step.
        nonfinite: number of ranks with a gradient that is not finite.
        may_overflow: number of ranks with gradients so large that a sum may overflow.
        failed: number of ranks that failed.
        users: for each reduced leaf, the number of ranks that used it.
        late: indices of the buckets that some rank has to repair.
        order: rank 0's ready order of the leaves that it saw; empty where it rode not along.
    """

    agreed: bool
    active: int
    total_weight: float
    total_squared: float
    has_next: int
    nonfinite: int
    may_overflow: int
    failed: int
    users: tuple[int, ...]
    late: tuple[int, ...]
    order: tuple[int, ...] = ()

    @property
    def used(self) -> tuple[bool, ...]:
        """For each reduced leaf, whether any rank used it."""
        return tuple(count > 0 for count in self.users)


def encode(layout: ControlLayout, word: ControlWord) -> npt.NDArray[np.floating[Any]]:
    """One rank's summand, shape `(layout.size,)`, in the layout's format.

    Example:
        >>> layout = ControlLayout(leaves=2, buckets=1)
        >>> word = ControlWord(fingerprint=7, weight=3.0, used=(True, False), late=(False,))
        >>> encode(layout, word)
        array([7., 1., 0., 0., 0., 3., 9., 1., 0., 0., 0., 0., 1., 0.])
    """
    vector = np.zeros(layout.size, dtype=layout.format)
    fields, bits = layout.fields, layout.limb_bits
    if bits:
        prints = fields["fingerprint"]
        vector[prints] = _limbs_of(word.fingerprint, bits, prints.stop)
        weights = ("weight", word.weight), ("weight_squared", word.weight * word.weight)
        for name, value in weights:
            lowest, limbs = _fixed_limbs(value, bits)
            first = fields[name].start + lowest
            vector[first : first + len(limbs)] = limbs
    else:
        vector[fields["fingerprint"].start] = word.fingerprint
        vector[fields["weight"].start] = word.weight
        vector[fields["weight_squared"].start] = word.weight * word.weight
    if word.weight > 0.0:
        vector[fields["active"]] = 1.0
        vector[fields["method"]] = word.method > 0, word.method, word.method**2
    start = fields["has_next"].start
    vector[start : start + 4] = word.has_next, word.nonfinite, word.may_overflow, word.failed
    vector[fields["late"]] = word.late
    vector[fields["used"]] = word.used
    if layout.with_order and len(word.order):
        # Positions count from one: zero says that the leaf was not seen.
        seats = fields["order"].start + np.asarray(word.order)
        vector[seats] = np.arange(1, len(word.order) + 1)
    return vector


def decode(
    layout: ControlLayout,
    total: npt.NDArray[np.floating[Any]],
    *,
    fingerprint: int,
    world_size: int,
) -> ControlReport:
    """Reads the sum over ranks.

    Args:
        layout: the layout that all ranks encoded with.
        total: the summed vector, shape `(layout.size,)`, in the layout's format.
        fingerprint: this rank's own; every rank notices when one differs, because the sum then
            is not `world_size` times its own.
        world_size: number of ranks in the sum.

    Methods are alike where the sum of their squares is no more than it must be (Cauchy and
    Schwarz), which holds for the ranks that bring something without knowing which these are.
    """
    fields, bits = layout.fields, layout.limb_bits
    own = _limbs_of(fingerprint, bits or _FINGERPRINT_BITS, fields["fingerprint"].stop)
    weight, squared = total[fields["weight"]], total[fields["weight_squared"]]
    callers, methods, squares = total[fields["method"]].tolist()
    prints = [limb * world_size for limb in own]
    has_next, nonfinite, may_overflow, failed = total[fields["has_next"].start :][:4].tolist()
    order: Sequence[int] = ()
    if layout.with_order:
        seats = total[fields["order"]]
        order = np.argsort(seats, kind="stable")[np.count_nonzero(seats == 0.0) :].tolist()
    return ControlReport(
        agreed=total[fields["fingerprint"]].tolist() == prints and callers * squares == methods**2,
        active=int(total[fields["active"].start]),
        total_weight=_read(layout, weight),
        total_squared=_read(layout, squared),
        has_next=int(has_next),
        nonfinite=int(nonfinite),
        may_overflow=int(may_overflow),
        failed=int(failed),
        users=tuple(total[fields["used"]].astype(np.int64).tolist()),
        late=tuple(total[fields["late"]].nonzero()[0].tolist()),
        order=tuple(order),
    )


def _limbs_of(number: int, bits: int, count: int) -> list[int]:
    """The limbs of an integer that is not below 0, the lowest first."""
    mask = (1 << bits) - 1
    return [(number >> shift) & mask for shift in range(0, bits * count, bits)]


# Most steps have the weights of the step before: what was worked out for these is kept.
@lru_cache(maxsize=_KEPT_WEIGHTS)
def _fixed_limbs(value: float, bits: int) -> tuple[int, tuple[int, ...]]:
    """A weight from 0 to infinity as a fixed-point number: the limbs that may differ from 0, and
    the position of the first of them."""
    if value == math.inf:
        number, lowest = 1, _WEIGHT_BITS - 1
    else:
        number, divisor = value.as_integer_ratio()
        lowest = -_LOWEST_EXPONENT - divisor.bit_length() + 1
        if divisor == 1:  # large ones are shortened to their significant bits
            excess = max(0, number.bit_length() - _SIGNIFICANT_BITS["float64"])
            number, lowest = number >> excess, lowest + excess
    limb, shift = divmod(lowest, bits)
    number <<= shift
    return limb, tuple(_limbs_of(number, bits, -(-number.bit_length() // bits)))


def _read(layout: ControlLayout, field: npt.NDArray[np.floating[Any]]) -> float:
    """A weight."""
    if not layout.limb_bits:
        return float(field[0])
    return _read_fixed(field.tobytes(), layout.format, layout.limb_bits)


@lru_cache(maxsize=_KEPT_WEIGHTS)
def _read_fixed(sums: bytes, fmt: Format, bits: int) -> float:
    """The number that the limbs' sums amount to, rounded once."""
    number, limbs = 0, np.frombuffer(sums, dtype=fmt)
    positions = limbs.nonzero()[0]
    for position, limb in zip(positions.tolist(), limbs[positions].tolist(), strict=True):
        number += int(limb) << (bits * position)
    try:
        return number / _UNITS_IN_ONE  # of integers, which rounds once
    except OverflowError:
        return math.inf
