"""End of a process that has not destroyed its groups; see [Note: exits].

Works that complete later would run the callbacks of their futures, and release tensors of Python,
on a thread of the group. The handler leaves all groups, which joins these threads. It is registered
with the first group, so handlers that are registered later can still use groups.
"""

from __future__ import annotations

import atexit
from functools import cache

from fddp.native import extension


@cache
def leave_groups_at_exit() -> None:
    """Register the handler; a second call does nothing."""
    atexit.register(_leave_groups)


def _leave_groups() -> None:
    extension.load().leave_open_groups()
