"""When this thread has waited for other ranks.

[Note: time spent waiting] Each wait for a transport's operation, and for what a hook of torch's
kind returns, is noted here, whoever waits: a step, a hook, an operator in a loss function, a vote
between steps. What is left of a step's time is then the rank's own. Noting a wait is two readings
of the clock and an append; one that is over at once is not noted. Waits are kept by thread, because
ranks may be threads, and the newest only.

What a transport computes while it is waited for (sums over shared memory, copies) counts as
waiting; it is alike on all ranks.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fddp.core.timeline import Interval

KEPT = 4096
"""Waits that are kept of each thread; what is older counts as the rank's own time."""

LEAST_S = 2e-6  # of one that is over at once, about what calling it takes


class _Waits(threading.local):
    def __init__(self) -> None:
        self.newest: deque[Interval] = deque(maxlen=KEPT)


_own = _Waits()


def note_wait(start_s: float, end_s: float) -> None:
    """Takes note of a wait that is over; on the clock of `time.perf_counter`."""
    if end_s - start_s > LEAST_S:
        newest = _own.newest
        while newest and newest[-1][0] >= start_s:
            newest.pop()  # it lay within this one
        newest.append((start_s, end_s))


def waits_since(start_s: float) -> tuple[Interval, ...]:
    """This thread's waits that began after a moment, in order; none overlap.

    Example:
        >>> note_wait(1.0, 2.0), note_wait(3.0, 3.5), note_wait(4.0, 4.0)
        (None, None, None)
        >>> waits_since(2.5)
        ((3.0, 3.5),)
    """
    found = []
    for wait in reversed(_own.newest):
        if wait[0] < start_s:
            break
        found.append(wait)
    return tuple(reversed(found))
