"""Times at which Python's garbage collector ran."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fddp.extend import Interval

_KEPT = 4096
_LEAST_S = 1e-4  # shorter collections, of young objects, are part of any Python code


def collections_during(owner: object) -> deque[Interval]:
    """Return the newest intervals in which the garbage collector ran on this thread, on the clock
    of `time.perf_counter`, except the shortest. They are recorded as long as `owner` lives."""
    newest: deque[Interval] = deque(maxlen=_KEPT)
    thread, start_s = threading.get_ident(), 0.0

    def note(phase: str, _: object) -> None:
        nonlocal start_s
        if threading.get_ident() != thread:
            return
        now_s = time.perf_counter()
        if phase == "start":
            start_s = now_s
        elif now_s - start_s > _LEAST_S:
            newest.append((start_s, now_s))

    gc.callbacks.append(note)
    weakref.finalize(owner, gc.callbacks.remove, note).atexit = False
    return newest
