"""Times at which this thread waited for other ranks.

[Note: time spent waiting] Every wait for an operation of a transport, or for the future of a torch
hook, is recorded here: in a step, in a hook, in an operator of a loss function or in a vote between
steps. The rest of a step's time is the rank's own. Recording a wait takes two readings of the clock
and an append; waits that end at once are dropped. Waits are stored by thread, as ranks may be
threads, and only the newest are kept.

Work of a transport during a wait (sums over shared memory, copies) counts as waiting. It is the
same on all ranks.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fddp.core.timeline import Interval

KEPT = 4096
"""Waits kept per thread. Older ones count as the rank's own time."""

LEAST_S = 2e-6  # shortest recorded wait, about the duration of the call itself


class _Waits(threading.local):
    def __init__(self) -> None:
        self.newest: deque[Interval] = deque(maxlen=KEPT)


_own = _Waits()


def note_wait(start_s: float, end_s: float) -> None:
    """Record a finished wait, on the clock of `time.perf_counter`."""
    if end_s - start_s > LEAST_S:
        newest = _own.newest
        while newest and newest[-1][0] >= start_s:
            newest.pop()  # nested in this one
        newest.append((start_s, end_s))


def waits_since(start_s: float) -> tuple[Interval, ...]:
    """Return this thread's waits that began after a time, in order and without overlap.

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
