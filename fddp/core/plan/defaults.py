"""Defaults and limits of arguments that several rooms share."""

from __future__ import annotations

CAP_MB = 25.0
"""MiB at which a bucket is closed."""

FIRST_MB = 1.0
"""MiB at which the first bucket is closed."""

MAX_TIMEOUT_S = 10**7
"""Longest timeout in seconds; more overflows the clocks of backends."""
