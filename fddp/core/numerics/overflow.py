"""How large gradients may be for their sums to be finite, so that nobody has to look at the sums.

Packing tells the largest magnitude that goes into a bucket. If it is below `max_safe_magnitude` on
every rank, no sum over ranks overflows, in whatever order and however it is rounded, nor does the
result after the correction that may follow. The control word says so in one number; results are
looked at only where it says otherwise.
"""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from typing import NamedTuple

MOST_AFTER = 4.0
"""The largest factor after the sum that `max_safe_magnitude` allows for."""


class Range(NamedTuple):
    """Of a floating dtype: its largest number, and the distance from 1 to the next above."""

    largest: float
    epsilon: float


RANGES = {
    "float16": Range(65504.0, 2.0**-10),
    "bfloat16": Range((2.0 - 2.0**-7) * 2.0**127, 2.0**-7),
    "float32": Range((2.0 - 2.0**-23) * 2.0**127, 2.0**-23),
    "float64": Range(sys.float_info.max, 2.0**-52),
}
# Complex numbers are summed by parts.
RANGES |= {"complex64": RANGES["float32"], "complex128": RANGES["float64"]}


@lru_cache
def max_safe_magnitude(wire: str, result: str, ranks: int) -> float:
    """The magnitude up to which every rank's contributions make finite sums.

    Args:
        wire: dtype that sums are made in.
        result: dtype of the results.
        ranks: how many contribute.

    Returns:
        The bound; 0 for a dtype that is not known.

    Example:
        >>> max_safe_magnitude("float16", "float16", ranks=2)
        8172.0...
        >>> max_safe_magnitude("float32", "float16", ranks=2) > 8187.9
        True
    """
    if wire not in RANGES or result not in RANGES:
        return 0.0
    largest = min(RANGES[wire].largest, RANGES[result].largest)
    # Each addition rounds up by at most this share, on partial sums that have been rounded.
    growth = math.exp(-ranks * math.log1p(RANGES[wire].epsilon))
    return largest / MOST_AFTER / ranks * growth


def stays_finite(source: str, wire: str, factor: float) -> bool:
    """Whether every finite number of one dtype, times a factor, is finite in another.

    Example:
        >>> stays_finite("float32", "bfloat16", 0.5), stays_finite("float32", "float32", 16.0)
        (True, False)
    """
    if source not in RANGES or wire not in RANGES:
        return False
    return RANGES[source].largest * factor <= RANGES[wire].largest
