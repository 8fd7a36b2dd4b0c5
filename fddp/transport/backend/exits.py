"""End of a process that has not destroyed its groups; see [Note: exits].

Works that complete later would run the callbacks of their futures, and release tensors of Python,
on a thread of the group. A finalizer leaves all groups, which joins these threads. It is created
with the first group, and called after `atexit` handlers.
"""

from __future__ import annotations

import weakref
from functools import cache

from fddp.native import extension


@cache
def leave_groups_at_exit() -> None:
    """Create the finalizer; a second call does nothing."""
    weakref.finalize(leave_groups_at_exit, _leave_groups)


def _leave_groups() -> None:
    extension.compiled.leave_open_groups()
