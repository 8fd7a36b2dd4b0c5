"""Memory that a rank of a transport shares with the others of its host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fddp.transport.c10d.shared_memory import ShmCommunicator
from fddp.transport.shm.opening import open_shm_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fddp.transport.base import Transport
    from fddp.transport.shm.host_discovery import HostGroups


class HostMemory:
    """The memory of the ranks of a transport, by hosts, and the communicators that use it.

    Attributes:
        name: "shm" if all ranks share memory, "shm+c10d" if some communicators use it, else "c10d".
        reason: why, in a few words.
        communicators: those of this rank, by ranks.
        serves_others: True if some rank may have tensors on other devices.
    """

    def __init__(self, host_groups: HostGroups, world_size: int) -> None:
        """Take ownership of the result of a discovery."""
        self.name = "shm" if world_size == 1 else "c10d"
        self.communicators: dict[tuple[int, ...], ShmCommunicator] = {}
        self.serves_others = False
        self._host_groups = host_groups
        self._everyone = tuple(range(world_size))
        self._problems = dict(host_groups.problems)
        self._arena = host_groups.arena

    @property
    def reason(self) -> str:
        if self.name == "shm":
            return f"all {len(self._everyone)} ranks share the memory of a host"
        text = self._host_groups.describe(self._problems)
        return text + ("; shm within a host, c10d across" if self.name == "shm+c10d" else "")

    def open(
        self, transport: Transport, groups: Sequence[tuple[int, ...]], serves_others: bool
    ) -> None:
        """Open communicators for those of these groups of this rank whose ranks share a host; a
        collective call. Groups in which a rank fails are not opened on any rank."""
        hosts = self._host_groups
        wanted = [ranks for ranks in groups if hosts.share_host(ranks)]
        opened = open_shm_groups(
            transport, hosts, wanted, transport.timeout_s, remark=serves_others
        )
        for ranks, backend in opened.own.items():
            self.communicators[ranks] = ShmCommunicator(
                backend, transport.rank, ranks, of_all_hosts=len(hosts.hosts) == 1
            )
        self._problems |= opened.problems
        self.serves_others |= any(opened.remarks)
        if self._everyone in opened.everywhere:
            self.name = "shm"
        elif opened.everywhere and self.name == "c10d":
            self.name = "shm+c10d"

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return an uninitialised tensor that communicators use where it is; None if there is no
        communicator, or no pages can be reserved."""
        if self._arena is None or not self.communicators:
            return None
        return self._arena.empty(numel, dtype)

    def free(self) -> None:
        """Free the memory. Tensors still in use keep their own pages."""
        if self._arena is not None:
            self._arena.trim()
            self._arena.close_fd()
            self._arena = None
        self._host_groups = self._host_groups.without_memory()
