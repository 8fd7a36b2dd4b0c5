"""Communicators of compiled programs.

[Note: channels]
A compiled program runs on threads of XLA while the thread that started it continues. So compiled
programs over a group use another communicator, a channel, than eager operators: the two never wait
for each other, and their collectives are never mismatched. Tracing does not open a channel;
compiling the first program with a reduction over the group does, on all ranks, because
communicators of one group are matched by the order in which the caller's threads open them. A
channel is closed with its group, see [Note: communicators of groups].
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fddp import Communicator, Topology
from fddp.errors import ClosedError
from fddp.extend import (
    Group,
    GroupRegistry,
    LoopbackGroup,
    Mesh,
    communicator_of,
    resolve,
    resolve_mesh,
)

_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, JitCommunicator] = weakref.WeakValueDictionary()
_of_groups: GroupRegistry[JitCommunicator] = GroupRegistry()


class JitCommunicator:
    """Channel of the compiled programs of one group and mesh.

    Attributes:
        number: identifies the channel in traced programs.
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
        """Open the communicator if it is not open. A collective call.

        Raises:
            Exception: any error of the constructor of `Communicator`.
        """
        group = self._living()
        if isinstance(group, Communicator):
            return
        with self._lock:
            if self._communicator is None or self._communicator.closed is not None:
                self._communicator = Communicator(group, mesh=self.topology)

    @property
    def communicator(self) -> Communicator:
        """The communicator that runs the programs.

        Raises:
            ClosedError: the communicator is closed, or its group is gone.
        """
        group = self._living()
        found = group if isinstance(group, Communicator) else self._communicator
        if found is None or found.closed is not None:
            why = "never opened" if found is None else found.closed
            way_out = (
                "make a new one on every rank, and trace anew with it"
                if found is group
                else "call jax.clear_caches() on every rank, so that recompiled programs reopen it"
            )
            raise ClosedError(
                f"the communicator of a compiled program is closed ({why}); {way_out}"
            )
        return found

    def _living(self) -> Any:
        group = self._group()
        if group is None:
            raise _gone(self.number)
        return group

    @property
    def is_alone(self) -> bool:
        """True if the group has one rank."""
        group = self._living()
        if isinstance(group, Communicator):
            return group.world_size == 1
        return bool((group.size if isinstance(group, LoopbackGroup) else group.size()) == 1)

    @property
    def threads(self) -> bool:
        """True if ranks are threads of one process."""
        group = self._group()
        if isinstance(group, Communicator):
            return group.transport.name == "loopback"
        return isinstance(group, LoopbackGroup)

    def close(self) -> None:
        """Close the communicator that this channel opened, if any."""
        if self._communicator is not None:
            self._communicator.close()


def jit_communicator_of(group: Group | Communicator | None, mesh: Mesh | None) -> JitCommunicator:
    """The channel of a group and mesh. Does not communicate.

    Raises:
        TypeError: `group` is not a group.
        FddpError: there is no default group.
        ClosedError: `group` is a closed `Communicator`.
        ValueError: `mesh` does not fit the group.
    """
    if isinstance(group, Communicator):
        return _jit_communicator(communicator_of(group, mesh), group.topology)
    if group is not None and not isinstance(group, dist.ProcessGroup | DeviceMesh | LoopbackGroup):
        raise TypeError(
            f"group must be a process group, a DeviceMesh of one dimension, a Communicator or the "
            f"group of fddp.loopback, got a {type(group).__name__}; a group can't be an argument "
            f"of a traced or batched function: let the function close over it"
        )
    span = resolve_mesh(group, mesh)
    if span.problem is not None:
        raise span.problem
    return _jit_communicator(resolve(span.group), span.topology)


def communicator_by_id(number: int) -> JitCommunicator:
    """The channel with this number.

    Raises:
        ClosedError: it no longer exists.
    """
    found = _by_number.get(number)
    if found is None:
        raise _gone(number)
    return found


def _jit_communicator(group: Any, topology: Topology | None) -> JitCommunicator:
    return _of_groups.get(group, topology, lambda: JitCommunicator(group, topology))


def _gone(number: int) -> ClosedError:
    return ClosedError(
        f"the group of channel {number} is gone, and a compiled program reduces over it; trace "
        f"anew (a new jax.jit, or jax.clear_caches()) with a group that exists"
    )
