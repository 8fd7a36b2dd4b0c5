"""What a process that was forked off inherits of communicators, and leaves alone.

[Note: forks]
A forked process, such as a worker that loads data, has its parent's objects and connections, but
none of its threads. A backend that is freed there waits for threads that do not exist, or ends the
process; one that is used there writes into what its parent sends. So in a forked process all
transports are closed, without a word to other ranks, none is opened on a group from before, and
backends are never freed: the system takes back what they hold when the process ends.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

from torch.distributed import distributed_c10d

from fddp.errors import ClosedError

IN_A_FORK = "it belongs to the process that this one was forked from"

_owned: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_inherited: weakref.WeakSet[Any] = weakref.WeakSet()  # groups
_is_registered = False


class ForkAware(Protocol):
    """What belongs to one process alone."""

    def disown(self) -> None:
        """This process was forked off from the owner's. Takes no lock: a thread that is not here
        may have it."""


def register_fork_owner(owner: ForkAware) -> None:
    """Lets `owned` know in each process that is forked off from this one. Holds no reference."""
    global _is_registered
    if not _is_registered:
        _is_registered = True
        os.register_at_fork(after_in_child=_disown_all)
    _owned.add(owner)


def check_not_inherited(group: Any) -> None:
    """Raises where a group is another process's.

    Raises:
        ClosedError: it was made before this process was forked off.
    """
    if group in _inherited:
        raise ClosedError(
            "this process was forked off from a rank, whose process group it can't use; leave what "
            "communicates to the rank, and start processes that are to communicate by spawn"
        )


def _disown_all() -> None:
    _inherited.update(distributed_c10d._world.pg_map)
    for owned in list(_owned):
        owned.disown()
    _owned.clear()
