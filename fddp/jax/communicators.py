"""Over whom compiled programs reduce: communicators of their own.

[Note: channels]
A compiled program runs on threads of XLA, while the thread that started it goes on. So a group has
another communicator for compiled programs than for operators that are called on tensors: the two
never wait for each other, and neither can take the other's turn. Tracing opens nothing. Compiling
does, at the first program with a reduction over the group, on all ranks: openings over one group
are matched by their order, which only the caller's thread has. A channel goes with its group, as
in [Note: communicators of groups].
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fddp.collectives.communicator import Communicator, communicator_of
from fddp.collectives.group_registry import GroupRegistry
from fddp.core.schedule.topology import Topology
from fddp.errors import ClosedError
from fddp.transport import Group, LoopbackGroup, resolve
from fddp.transport.mesh import Mesh, resolve_mesh

# Of shared memory: what the cores' caches hold from packing until sums are handed out.
_CACHED_BYTES = 1 << 20

_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, JitCommunicator] = weakref.WeakValueDictionary()
_of_groups: GroupRegistry[JitCommunicator] = GroupRegistry()


class JitCommunicator:
    """Where the reductions of compiled programs meet that were given one group and its axes.

    Attributes:
        number: by which traced programs find it.
        topology: the axes of the ranks, or None.
    """

    def __init__(self, group: Any, topology: Topology | None) -> None:
        self.number = next(_numbers)
        self.topology = topology
        self._group = weakref.ref(group)
        self._communicator: Communicator | None = None
        self._lock = threading.Lock()
        _by_number[self.number] = self

    def open(self) -> None:
        """Make it ready for programs that are compiled now; the first call, on all ranks, opens it.

        Raises:
            Exception: as from making a `Communicator`.
        """
        group = self._living()
        if isinstance(group, Communicator):
            return
        with self._lock:
            if self._communicator is None or self._communicator.closed is not None:
                self._communicator = Communicator(group, mesh=self.topology)

    @property
    def communicator(self) -> Communicator:
        """What programs run on.

        Raises:
            ClosedError: it was closed, or its group is gone.
        """
        group = self._living()
        found = group if isinstance(group, Communicator) else self._communicator
        if found is None or found.closed is not None:
            raise _closed(found, given=found is group)
        return found

    def _living(self) -> Any:
        group = self._group()
        if group is None:
            raise _gone(self.number)
        return group

    @property
    def cap_bytes(self) -> int:
        """When a bucket is closed. What the caller made has the caller's cap."""
        communicator = self.communicator
        if communicator is self._communicator and communicator.transport.name == "shm":
            return min(_CACHED_BYTES, communicator.cap_bytes)
        return communicator.cap_bytes

    @property
    def threads(self) -> bool:
        """Whether its ranks are threads of one process."""
        group = self._group()
        if isinstance(group, Communicator):
            return group.transport.name == "loopback"
        return isinstance(group, LoopbackGroup)

    def close(self) -> None:
        """Frees what it has opened."""
        if self._communicator is not None:
            self._communicator.close()


def jit_communicator_of(group: Group | Communicator | None, mesh: Mesh | None) -> JitCommunicator:
    """That of a group and axes over it; communicates nothing.

    Raises:
        TypeError: `group` is nothing to communicate on.
        FddpError: there is no default group.
        ClosedError: a `Communicator` that was closed.
        ValueError: `mesh` does not fit.
    """
    if isinstance(group, Communicator):
        return _jit_communicator(communicator_of(group, mesh), group.topology)
    if group is not None and not isinstance(group, dist.ProcessGroup | DeviceMesh | LoopbackGroup):
        raise TypeError(
            f"group must be a process group, a DeviceMesh of one dimension, a Communicator or the "
            f"group of fddp.loopback, got a {type(group).__name__}; a group is no argument of a "
            f"traced function, and can't be batched: let the function close over it"
        )
    span = resolve_mesh(group, mesh)
    if span.problem is not None:
        raise span.problem
    return _jit_communicator(resolve(span.group), span.topology)


def communicator_by_id(number: int) -> JitCommunicator:
    """The channel of this number.

    Raises:
        ClosedError: it is gone.
    """
    found = _by_number.get(number)
    if found is None:
        raise _gone(number)
    return found


def _jit_communicator(group: Any, topology: Topology | None) -> JitCommunicator:
    return _of_groups.get(group, topology, lambda: JitCommunicator(group, topology))


def _closed(communicator: Communicator | None, given: bool) -> ClosedError:
    why = "never opened" if communicator is None else communicator.closed
    way_out = (
        "make a new one on every rank, and trace anew with it"
        if given
        else "call jax.clear_caches() on every rank, which makes programs open it anew"
    )
    return ClosedError(f"what a compiled program reduces on is closed ({why}); {way_out}")


def _gone(number: int) -> ClosedError:
    return ClosedError(
        f"the group of channel {number} is gone, and a compiled program reduces over it; trace "
        f"anew (a new jax.jit, or jax.clear_caches()) with a group that exists"
    )
