"""Waits for other threads and processes."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds until a process that should have ended counts as hung. A loaded machine may need most of
#: a minute to start one. Less than pytest's own limit, so that the error can name what hung.
HANG_S = 240.0

#: Seconds within which what waits for nobody ends, on a machine that is busy with other things.
PROMPT_S = 30.0
#: Time limit of what might wait in vain: above `PROMPT_S`, so that an end by it is noticed.
LONG_S = 3 * PROMPT_S


def soon(holds: Callable[[], object]) -> bool:
    """Return True once `holds()` is true, False if it is not within a minute."""
    deadline_s = time.monotonic() + 60.0
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return bool(holds())
