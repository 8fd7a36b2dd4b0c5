"""Reconfiguration of a group, torch's interface for ranks that end, return and join.

From torch 2.14 on, `init_process_group("fddp", enable_reconfigure=True)` makes a group that is not
connected. `torch.distributed._reconfigure(uuid, handles)` opens it for the ranks with these
handles, and opens it again for others. Ranks meet in a part of the group's store that is named by
the uuid.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from fddp.core.protocol.differences import check_equal
from fddp.core.protocol.messages import Schema, decode, decode_all, optional
from fddp.errors import DesyncError, FddpError
from fddp.native import extension
from fddp.transport.backend.choice import (
    ALONE,
    BackendChoice,
    note_choice,
    open_in_memory,
    open_over_gloo,
)
from fddp.transport.backend.store_exchange import StoreExchange
from fddp.transport.c10d.rendezvous import connect_with_abort
from fddp.transport.shm.host_discovery import HostGroups, discover_hosts

if TYPE_CHECKING:
    from fddp._C import ReconfigurableBackend, ShmArena, ShmBackend, ShmView

_GREETING: Schema = (str, optional(int))
"""Digest of the handles that a rank passed, and the call that mapped its memory."""


class _Memory(NamedTuple):
    """Memory that ranks of a host have mapped, and keep for later calls.

    Attributes:
        uuid: that of the call in which they did.
        arena: this rank's memory.
        views: memory of the others, by handle.
    """

    uuid: int
    arena: ShmArena
    views: dict[str, ShmView]


def reconfigurable_backend(
    store: dist.Store, name: str, rank: int, size: int, timeout_s: float
) -> ReconfigurableBackend:
    """Return a backend that is not connected, which `torch.distributed._reconfigure` opens.

    Args:
        store: of the group; outlives the ranks.
        name: of the group.
        rank, size: of the group until then.
        timeout_s: time limit of operations, in seconds.
    """
    handle = f"fddp:{secrets.token_hex(8)}"
    opening = _Opening(store, name, handle)
    return extension.compiled.ReconfigurableBackend(opening.open, handle, rank, size, timeout_s)


class _Opening:
    """Opens a group for the ranks with some handles. This rank's `handle` lasts as long as its
    group."""

    def __init__(self, store: dist.Store, name: str, handle: str) -> None:
        self._store, self._name, self._handle = store, name, handle
        self._memory: _Memory | None = None

    def open(self, uuid: int, handles: list[str], timeout_s: float, group_timeout_s: float) -> Any:
        """Return a backend of the ranks with these handles; a call of all of them; blocks.

        Args:
            uuid: not used before in this store.
            handles: by rank.
            timeout_s: time limit of the call, in seconds.
            group_timeout_s: time limit of operations, in seconds.

        Raises:
            FddpError: the uuid was used before; on all ranks that have used it.
            DesyncError: the ranks passed different handles, or one sent a malformed message.
            SyncTimeoutError: some ranks did not make the call in time.
        """
        rank, size = handles.index(self._handle), len(handles)
        store = dist.PrefixStore(f"reconfigure/{uuid}", self._store)
        # Not by a message, since those of the call before may still be there.
        used = store.add(f"claims/{self._handle}", 1) > 1
        if store.add("claims", 1) > size or used:
            raise FddpError(
                f"_reconfigure({uuid}) on rank {rank}: uuid {uuid} was already used; pass one that "
                f"was not"
            )

        def meet(store: dist.Store) -> tuple[ShmBackend | None, BackendChoice]:
            exchange = StoreExchange(
                store, rank, size, timeout_s, names=handles, call=f"_reconfigure({uuid})"
            )
            mapped_by = self._greet(exchange, handles)
            if size == 1:
                exchange.close()
                return extension.compiled.ShmBackend.alone(group_timeout_s), ALONE
            if mapped_by is None:
                host_groups = discover_hosts(exchange)
                self._keep(uuid, handles, host_groups)
            else:
                host_groups = self._mapped(handles)
            opened = open_in_memory(exchange, host_groups, group_timeout_s)
            exchange.close()
            return opened

        (opened, choice), _ = connect_with_abort(meet, store, timeout_s, lambda: None)
        backend: Any = opened
        if opened is None:
            backend = open_over_gloo(store, rank, range(size), self._name, timeout_s)
            backend.set_timeout(timedelta(seconds=group_timeout_s))
        note_choice(self._name, rank, size, choice)
        return backend

    def _greet(self, exchange: StoreExchange, handles: list[str]) -> int | None:
        """Check that all ranks make the same call. Return the uuid of the call in which all of them
        have mapped each other's memory; None if there is none."""
        memory = self._memory
        knows_all = memory is not None and {*handles} <= {self._handle, *memory.views}
        digest = hashlib.sha256("\n".join(handles).encode()).hexdigest()[:16]
        greeting = [digest, memory.uuid if memory is not None and knows_all else None]
        texts = exchange.exchange(json.dumps(greeting).encode())
        received = decode_all(texts, lambda text: decode(text, _GREETING), "reconfigure")
        check_equal(
            "the digest of the handles",
            [passed for passed, _ in received],
            "pass the same handles in the same order on all ranks",
            DesyncError,
        )
        mapped = {by for _, by in received}
        return mapped.pop() if len(mapped) == 1 else None

    def _keep(self, uuid: int, handles: list[str], found: HostGroups) -> None:
        """Keep memory that all ranks have mapped."""
        self._memory = None
        if found.arena is not None and found.hosts == (tuple(range(len(handles))),):
            views = {handles[rank]: view for rank, view in found.views.items()}
            self._memory = _Memory(uuid, found.arena, views)

    def _mapped(self, handles: list[str]) -> HostGroups:
        """Return the memory of these ranks, which all of them have mapped before."""
        assert self._memory is not None
        _, arena, views = self._memory
        kept = {handle: views[handle] for handle in handles if handle != self._handle}
        self._memory = self._memory._replace(views=kept)
        by_rank = {handles.index(handle): view for handle, view in kept.items()}
        return HostGroups((tuple(range(len(handles))),), {}, arena, by_rank)
