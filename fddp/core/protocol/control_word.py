"""The control word: one small vector, summed over ranks once in every step.

Every rank learns the same facts from the sums in the same step: the leaves that any rank used, the
buckets that received a gradient after their launch, the number of active ranks and their total
weight, the number of ranks with more input, and the number of ranks with a non-finite contribution,
a failure or a request to stop. None of this needs a flag from the caller. Squared norms of
gradients are part of it where the caller asks for them.

[Note: limbs]
In the tail of a float32 bucket, and wherever the sum must not depend on the order of addition,
numbers are split into limbs: digits with so few bits that the sum over all ranks is an integer that
the format represents exactly. An integer takes a few limbs. A weight is a fixed-point number that
covers the range of float64, so its sum is exact too. It is rounded once, on decoding.
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
"""Dtype of the elements of a control word."""

MOST_RANKS = 2**16
"""Maximum world size of a float32 word. Beyond it, limbs have so few bits that a weight takes
thousands of them."""

MOST_LEAVES = 2**24
"""Maximum number of leaves whose order a float32 word represents."""

_SIGNIFICANT_BITS: dict[Format, int] = {"float32": 24, "float64": 53}
_KEPT_WEIGHTS = 64
_FINGERPRINT_BITS = 32
_LOWEST_EXPONENT = -1074  # of float64; bit 0 of a weight
_UNITS_IN_ONE = 1 << -_LOWEST_EXPONENT
_WEIGHT_BITS = 1024 - _LOWEST_EXPONENT + 1  # the extra bit represents infinity


def limb_bits(fmt: Format, world_size: int) -> int:
    """Return the largest number of bits per limb for which the sum over all ranks is exact.

    Example:
        >>> limb_bits("float32", 2), limb_bits("float32", 64), limb_bits("float64", 5)
        (23, 18, 50)
    """
    return _SIGNIFICANT_BITS[fmt] - (world_size - 1).bit_length()


@dataclass(frozen=True)
class ControlLayout:
    """Positions of the fields in the vector.

    Attributes:
        leaves: number of reduced leaves.
        buckets: number of buckets.
        with_order: True if rank 0's ready order is included (until the plan was rebuilt from it).
        format: dtype of the elements.
        limb_bits: bits per limb; 0 if fingerprint and weights take one element each, as float64
            represents sums of token counts exactly. See [Note: limbs].
        groups: number of groups of leaves whose squared norms are included, of one element each:
            their sums are rounded, but have the same bits on all ranks.

    Example:
        >>> ControlLayout(leaves=2, buckets=1).size
        15
        >>> ControlLayout(leaves=2, buckets=1, format="float32", limb_bits=23).size
        198
    """

    leaves: int
    buckets: int
    with_order: bool = False
    format: Format = "float64"
    limb_bits: int = 0
    groups: int = 0

    @cached_property
    def size(self) -> int:
        return int(self.fields["squares"].stop)

    @cached_property
    def fields(self) -> dict[str, slice]:
        """Slice of the vector for each field."""
        lengths = {
            "fingerprint": self._limbs(_FINGERPRINT_BITS),
            "active": 1,
            "method": 3,  # number of ranks with a method; the method; its square
            "weight": self._limbs(_WEIGHT_BITS),
            "weight_squared": self._limbs(_WEIGHT_BITS),
            "has_next": 1,
            "nonfinite": 1,
            "large": 1,
            "failed": 1,
            "stop": 1,
            "late": self.buckets,
            "used": self.leaves,
            "order": self.leaves if self.with_order else 0,
            "measured": 1 if self.groups else 0,
            "squares": self.groups,
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
    """Report of one rank on one step.

    Attributes:
        fingerprint: integer below 2**32 that must be equal on all ranks (plan and step).
        weight: this rank's weight; 0 contributes nothing.
        method: number below 16 that must be equal on all ranks with a positive weight; 0 is
            compatible with any.
        used: for each reduced leaf, True if this rank has a gradient for it.
        late: for each bucket, True if a gradient arrived after its launch.
        has_next: True if this rank has input for another step.
        nonfinite: True if one of its gradients contains NaN or infinity.
        may_overflow: True unless its gradients are known to be small enough for a finite sum.
        failed: True if this rank could not complete the step.
        stop: True if this rank asks all ranks to stop.
        order: reduced leaves in the order in which their gradients arrived; only on rank 0.
        squares: for each group of leaves, the squared norm of this rank's gradient times its
            weight; () if it has not measured them.
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
    stop: bool = False
    order: Sequence[int] = ()
    squares: Sequence[float] = ()


@dataclass(frozen=True)
class ControlReport:
    """Content of the reduced control word, equal on all ranks.

    Attributes:
        agreed: True if all ranks had the same fingerprint, and all active ranks the same method.
        active: number of ranks with a positive weight.
        total_weight: sum of weights.
        total_squared: sum of squared weights.
        has_next: number of ranks with input for another step.
        nonfinite: number of ranks with a non-finite gradient.
        may_overflow: number of ranks with gradients so large that a sum may overflow.
        failed: number of ranks that failed.
        stop: number of ranks that ask to stop.
        users: for each reduced leaf, the number of ranks that used it.
        late: indices of the buckets that some rank has to repair.
        order: rank 0's ready order of the leaves it used; empty if the layout does not include it.
        measured: number of ranks that have measured squared norms.
        squares: for each group of leaves, the sum of squared norms times weights over these ranks.
    """

    agreed: bool
    active: int
    total_weight: float
    total_squared: float
    has_next: int
    nonfinite: int
    may_overflow: int
    failed: int
    stop: int
    users: tuple[int, ...]
    late: tuple[int, ...]
    order: tuple[int, ...] = ()
    measured: int = 0
    squares: tuple[float, ...] = ()

    @property
    def used(self) -> tuple[bool, ...]:
        """For each reduced leaf, True if any rank used it."""
        return tuple(count > 0 for count in self.users)


def encode(layout: ControlLayout, word: ControlWord) -> npt.NDArray[np.floating[Any]]:
    """Return one rank's summand, shape `(layout.size,)`, in the layout's format.

    Example:
        >>> layout = ControlLayout(leaves=2, buckets=1)
        >>> word = ControlWord(fingerprint=7, weight=3.0, used=(True, False), late=(False,))
        >>> encode(layout, word)
        array([7., 1., 0., 0., 0., 3., 9., 1., 0., 0., 0., 0., 0., 1., 0.])
    """
    vector = np.zeros(layout.size, dtype=layout.format)
    fields, bits = layout.fields, layout.limb_bits
    prints = fields["fingerprint"]
    vector[prints] = _limbs_of(word.fingerprint, bits or _FINGERPRINT_BITS, prints.stop)
    for name, value in ("weight", word.weight), ("weight_squared", word.weight * word.weight):
        lowest, limbs = _fixed_limbs(value, bits) if bits else (0, (value,))
        first = fields[name].start + lowest
        vector[first : first + len(limbs)] = limbs
    if word.weight > 0.0:
        vector[fields["active"]] = 1.0
        vector[fields["method"]] = word.method > 0, word.method, word.method**2
    start = fields["has_next"].start
    flags = word.has_next, word.nonfinite, word.may_overflow, word.failed, word.stop
    vector[start : start + len(flags)] = flags
    vector[fields["late"]] = word.late
    vector[fields["used"]] = word.used
    if layout.with_order and len(word.order):
        # Positions count from one; zero marks an unused leaf.
        seats = fields["order"].start + np.asarray(word.order)
        vector[seats] = np.arange(1, len(word.order) + 1)
    if len(word.squares):
        vector[fields["measured"]] = 1.0
        write_squares(layout, vector, word.squares)
    return vector


def write_squares(
    layout: ControlLayout, vector: npt.NDArray[np.floating[Any]], squares: Sequence[float]
) -> None:
    """Write squared norms into the summand of a rank that has measured them."""
    with np.errstate(over="ignore"):  # infinity in float32
        vector[layout.fields["squares"]] = squares


def read_squares(layout: ControlLayout, total: npt.NDArray[np.floating[Any]]) -> tuple[float, ...]:
    """Return the sums of squared norms by group of leaves."""
    return tuple(total[layout.fields["squares"]].tolist())


def decode(
    layout: ControlLayout,
    total: npt.NDArray[np.floating[Any]],
    *,
    fingerprint: int,
    world_size: int,
) -> ControlReport:
    """Decode the sum over ranks.

    Equality of the methods is tested by the Cauchy-Schwarz inequality: `n * sum(m**2)` equals
    `sum(m)**2` only if all `n` methods are equal.

    Args:
        layout: the layout that all ranks encoded with.
        total: the summed vector, shape `(layout.size,)`, in the layout's format.
        fingerprint: this rank's own. If any rank's differs, the sum is not `world_size` times this
            one, on every rank.
        world_size: number of ranks in the sum.
    """
    fields, bits = layout.fields, layout.limb_bits
    own = _limbs_of(fingerprint, bits or _FINGERPRINT_BITS, fields["fingerprint"].stop)
    weight, squared = total[fields["weight"]], total[fields["weight_squared"]]
    callers, methods, squares = total[fields["method"]].tolist()
    prints = [limb * world_size for limb in own]
    has_next, nonfinite, may_overflow, failed, stop = map(
        int, total[fields["has_next"].start :][:5].tolist()
    )
    order: Sequence[int] = ()
    if layout.with_order:
        seats = total[fields["order"]]
        order = np.argsort(seats, kind="stable")[np.count_nonzero(seats == 0.0) :].tolist()
    return ControlReport(
        agreed=total[fields["fingerprint"]].tolist() == prints and callers * squares == methods**2,
        active=int(total[fields["active"].start]),
        total_weight=_read(layout, weight),
        total_squared=_read(layout, squared),
        has_next=has_next,
        nonfinite=nonfinite,
        may_overflow=may_overflow,
        failed=failed,
        stop=stop,
        users=tuple(total[fields["used"]].astype(np.int64).tolist()),
        late=tuple(total[fields["late"]].nonzero()[0].tolist()),
        order=tuple(order),
        measured=int(total[fields["measured"]].sum()),
        squares=read_squares(layout, total),
    )


def _limbs_of(number: int, bits: int, count: int) -> list[int]:
    """Return the limbs of a non-negative integer, lowest first."""
    mask = (1 << bits) - 1
    return [(number >> shift) & mask for shift in range(0, bits * count, bits)]


# Weights rarely change from step to step, so the last results are cached.
@lru_cache(maxsize=_KEPT_WEIGHTS)
def _fixed_limbs(value: float, bits: int) -> tuple[int, tuple[int, ...]]:
    """Return a weight from 0 to infinity in fixed point: the position of its first nonzero limb,
    and the limbs from there on."""
    if value == math.inf:
        number, lowest = 1, _WEIGHT_BITS - 1
    else:
        number, divisor = value.as_integer_ratio()
        lowest = -_LOWEST_EXPONENT - divisor.bit_length() + 1
        if divisor == 1:  # drop the zeros below the significant bits of a large number
            excess = max(0, number.bit_length() - _SIGNIFICANT_BITS["float64"])
            number, lowest = number >> excess, lowest + excess
    limb, shift = divmod(lowest, bits)
    number <<= shift
    return limb, tuple(_limbs_of(number, bits, -(-number.bit_length() // bits)))


def _read(layout: ControlLayout, field: npt.NDArray[np.floating[Any]]) -> float:
    if not layout.limb_bits:
        return float(field[0])
    return _read_fixed(field.tobytes(), layout.format, layout.limb_bits)


@lru_cache(maxsize=_KEPT_WEIGHTS)
def _read_fixed(sums: bytes, fmt: Format, bits: int) -> float:
    """Return the number represented by sums of limbs, rounded once."""
    number, limbs = 0, np.frombuffer(sums, dtype=fmt)
    positions = limbs.nonzero()[0]
    for position, limb in zip(positions.tolist(), limbs[positions].tolist(), strict=True):
        number += int(limb) << (bits * position)
    try:
        return number / _UNITS_IN_ONE  # division of integers, which rounds once
    except OverflowError:
        return math.inf
