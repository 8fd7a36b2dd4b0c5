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
