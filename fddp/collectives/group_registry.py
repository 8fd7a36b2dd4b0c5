"""Objects that belong to process groups and are closed with them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from fddp.core.schedule.topology import Topology
from fddp.transport.lifetime.finalizer import on_finalize
from fddp.transport.torch_private import process_groups

T = TypeVar("T")  # has a method `close`


class GroupRegistry(Generic[T]):
    """Objects by group and topology.

    Holds only weak references to groups. Objects are closed soon after their group is garbage
    collected. torch keeps some destroyed groups alive; objects of such a group are closed when a
    new group is looked up.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._made: weakref.WeakKeyDictionary[Any, dict[Topology | None, T]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, group: Any) -> dict[Topology | None, T]:
        """Objects of a group, by topology. The caller may add some."""
        known = self._made.get(group)
        if known is not None:
            return known
        with self._lock:
            for other in [other for other in self._made if is_destroyed(other)]:
                _close_all(self._made.pop(other))
            known = self._made.setdefault(group, {})
            on_finalize(group, partial(_close_all, known))
            return known

    def get(self, group: Any, topology: Topology | None, make: Callable[[], T]) -> T:
        """The object of a group and topology. Calls `make` if there is none; it must be quick."""
        with self._lock:
            known = self.of(group)
            if topology not in known:
                known[topology] = make()
            return known[topology]


def is_destroyed(group: Any) -> bool:
    """Return True if torch has destroyed the process group."""
    return type(group) is dist.ProcessGroup and group not in process_groups()


def _close_all(made: dict[Topology | None, Any]) -> None:
    while made:
        made.popitem()[1].close()
