"""Handling of inherited transports in forked processes.

[Note: forks]
A forked process, such as a data loader worker, inherits its parent's objects and connections but
none of its threads. Freeing an inherited backend waits for threads that do not exist or ends the
process; using it corrupts the parent's messages. In a forked process all inherited transports are
therefore marked as closed without informing other ranks, inherited groups can't be used for new
ones, and inherited backends are never freed: the operating system reclaims their resources when the
process ends.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

from fddp.errors import ClosedError
from fddp.transport.torch_private import process_groups

IN_A_FORK = "it belongs to the process that this one was forked from"

_owned: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_inherited: weakref.WeakSet[Any] = weakref.WeakSet()  # groups
_is_registered = False


class ForkAware(Protocol):
    """An object that only the process which created it may use."""

    def disown(self) -> None:
        """Invalidate the object in a forked process. Must not take locks: a thread that exists only
        in the parent may hold them."""


def register_fork_owner(owner: ForkAware) -> None:
    """Call `owner.disown` in forked processes. Holds only a weak reference."""
    global _is_registered
    if not _is_registered:
        _is_registered = True
        os.register_at_fork(after_in_child=_disown_all)
    _owned.add(owner)


def check_not_inherited(group: Any) -> None:
    """Raise ClosedError if `group` was created before this process was forked."""
    if group in _inherited:
        raise ClosedError(
            "this process was forked from a rank and can't use its process group; communicate only "
            "in the rank itself, or start processes that communicate by spawn"
        )


def _disown_all() -> None:
    _inherited.update(process_groups())
    for owned in list(_owned):
        owned.disown()
    _owned.clear()
