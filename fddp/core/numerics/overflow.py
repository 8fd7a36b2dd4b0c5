"""Bounds on gradients under which sums are finite, so that results need not be scanned.

Packing returns the largest magnitude that was written to a bucket. If it is at most
`max_safe_magnitude` on every rank, no sum over ranks overflows, in any order and rounding, and
neither does the result after the final correction. One number of the control word reports it.
Results are scanned only if the bound is exceeded.
"""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from typing import NamedTuple

MOST_AFTER = 4.0
"""Largest factor after the sum that `max_safe_magnitude` allows for."""


class Range(NamedTuple):
    """Largest finite number of a floating dtype, and the distance from 1 to the next number."""

    largest: float
    epsilon: float


RANGES = {
    "float16": Range(65504.0, 2.0**-10),
    "bfloat16": Range((2.0 - 2.0**-7) * 2.0**127, 2.0**-7),
    "float32": Range((2.0 - 2.0**-23) * 2.0**127, 2.0**-23),
    "float64": Range(sys.float_info.max, 2.0**-52),
}
# Complex numbers are summed by real and imaginary parts.
RANGES |= {"complex64": RANGES["float32"], "complex128": RANGES["float64"]}


@lru_cache
def max_safe_magnitude(wire: str, result: str, ranks: int) -> float:
    """Return the largest magnitude of contributions of `ranks` ranks for which sums in the dtype
    `wire` and results in the dtype `result` are finite; 0 if a dtype is unknown.

    Example:
        >>> max_safe_magnitude("float16", "float16", ranks=2)
        8172.0...
        >>> max_safe_magnitude("float32", "float16", ranks=2) > 8187.9
        True
    """
    if wire not in RANGES or result not in RANGES:
        return 0.0
    largest = min(RANGES[wire].largest, RANGES[result].largest)
    # Each addition rounds a partial sum up by at most a factor of 1 + epsilon.
    growth = math.exp(-ranks * math.log1p(RANGES[wire].epsilon))
    return largest / MOST_AFTER / ranks * growth


def stays_finite(source: str, wire: str, factor: float) -> bool:
    """Return True if every finite number of one dtype, times a factor, is finite in another.

    Example:
        >>> stays_finite("float32", "bfloat16", 0.5), stays_finite("float32", "float32", 16.0)
        (True, False)
    """
    if source not in RANGES or wire not in RANGES:
        return False
    return RANGES[source].largest * factor <= RANGES[wire].largest
