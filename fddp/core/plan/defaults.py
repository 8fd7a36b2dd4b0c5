"""Units, default values and limits of arguments that several packages share."""

from __future__ import annotations

MIB = 1024 * 1024
"""Bytes per MB, as DDP counts them."""

CAP_MB = 25.0
"""Cap of a bucket in MiB."""

FIRST_MB = 1.0
"""Cap of the first bucket in MiB."""

MAX_TIMEOUT_S = 10**7
"""Longest timeout in seconds. Longer ones overflow the clocks of backends."""


def timeout_error(timeout_s: object) -> ValueError | None:
    """Return the error of an invalid timeout. None for a valid one, or for None.

    Example:
        >>> timeout_error(None), timeout_error(60.0)
        (None, None)
        >>> timeout_error(0)
        ValueError('timeout_s must be above 0 and at most 10000000 seconds, got 0')
    """
    if timeout_s is None:
        return None
    if isinstance(timeout_s, int | float) and 0 < timeout_s <= MAX_TIMEOUT_S:
        return None
    return ValueError(
        f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S} seconds, got {timeout_s!r}"
    )
