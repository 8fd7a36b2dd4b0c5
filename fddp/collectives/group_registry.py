"""What belongs to groups of ranks and goes with them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fddp.core.schedule.topology import Topology
from fddp.transport.lifetime.finalizer import on_finalize


class Closable(Protocol):
    """What is closed when its group goes."""

    def close(self) -> None: ...


T = TypeVar("T", bound=Closable)


class GroupRegistry(Generic[T]):
    """For each group, and the axes laid over it, what was made for them.

    Holds no group. What was made is closed soon after its group is gone; at the latest when a group
    is looked up for the first time after the other was destroyed, because torch keeps some groups
    that it has destroyed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._made: weakref.WeakKeyDictionary[Any, dict[Topology | None, T]] = (
            weakref.WeakKeyDictionary()
        )

    def __len__(self) -> int:
        return len(self._made)

    def of(self, group: Any) -> dict[Topology | None, T]:
        """What was made for a group, by its axes; to be written by the caller."""
        known = self._made.get(group)
        return self._newly_known(group) if known is None else known

    def get(self, group: Any, topology: Topology | None, make: Callable[[], T]) -> T:
        """What was made for a group and axes, or is made now, which must not take long."""
        with self._lock:
            known = self.of(group)
            if topology not in known:
                known[topology] = make()
            return known[topology]

    def _newly_known(self, group: Any) -> dict[Topology | None, T]:
        with self._lock:
            for other in [other for other in self._made if is_destroyed(other)]:
                _close_all(self._made.pop(other))
            known = self._made.setdefault(group, {})
            on_finalize(group, partial(_close_all, known))
            return known


def is_destroyed(group: Any) -> bool:
    """Whether torch has destroyed a process group."""
    return isinstance(group, dist.ProcessGroup) and group not in distributed_c10d._world.pg_map


def _close_all(made: dict[Topology | None, Any]) -> None:
    while made:
        made.popitem()[1].close()
