"""Waits for what happens on another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable


def soon(holds: Callable[[], object]) -> bool:
    """Whether it holds now, or does before 20 seconds are over."""
    deadline_s = time.monotonic() + 20.0
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return bool(holds())
