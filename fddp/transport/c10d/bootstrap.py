"""Communicators over which the ranks of a group open their transports.

[Note: communicators of openings] Ranks that open a transport exchange texts before they know
whether they share memory. The communicator for this has threads and sockets. If the transport then
uses shared memory, its communicator is left to the next opening on the group. A rank whose opening
fails, or whose transports on the group are all closed, frees it. Ranks therefore compare in each
opening which one they have kept (`Membership.open`), and connect a new one unless all have kept the
same.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fddp.transport.c10d.communicator import Communicator
    from fddp.transport.liveness.status import TransportStatus

_lock = threading.RLock()  # reentrant: a handler of signals may close a transport meanwhile


class KeptCommunicator(NamedTuple):
    """A communicator that no transport uses."""

    number: int  # of the opening that connected it, the same on all ranks
    communicator: Communicator


class Bootstrap:
    """The communicator that a group has kept for its next opening."""

    def __init__(self) -> None:
        self._kept: KeptCommunicator | None = None
        self._users: set[TransportStatus] = set()

    def enter(self, user: TransportStatus) -> None:
        """Keep communicators as long as `user`, a transport of the group, is open."""
        with _lock:
            self._users.add(user)

    def leave(self, user: TransportStatus) -> list[Communicator]:
        """Return what is to be freed because `user` was closed; a second call does nothing."""
        with _lock:
            self._users.discard(user)
            return [] if self._users else self._exchange(None)

    def take(self) -> KeptCommunicator | None:
        """Take the kept communicator, if there is one."""
        with _lock:
            kept, self._kept = self._kept, None
            return kept

    def keep(self, kept: KeptCommunicator) -> list[Communicator]:
        """Keep a communicator, and return what is to be freed instead."""
        with _lock:
            return self._exchange(kept) if self._users else [kept.communicator]

    def _exchange(self, kept: KeptCommunicator | None) -> list[Communicator]:
        before, self._kept = self._kept, kept
        return [] if before is None else [before.communicator]


_bootstraps: weakref.WeakKeyDictionary[Any, Bootstrap] = weakref.WeakKeyDictionary()


def bootstrap_of(group: Any) -> Bootstrap:
    """Return that of a group."""
    with _lock:
        return _bootstraps.setdefault(group, Bootstrap())
