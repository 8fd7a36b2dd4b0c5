"""Choice of the communicators for a group of `torch.distributed`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from fddp.core.protocol.differences import check_equal
from fddp.core.protocol.messages import decode_all
from fddp.transport.liveness.failure import check_titles
from fddp.transport.shm.host_discovery import discover_hosts

if TYPE_CHECKING:
    from fddp.transport.base import Transport
    from fddp.transport.c10d.transport import C10dTransport

_log = logging.getLogger("fddp")


def choose(c10d: C10dTransport, wanted: str, title: str = "transport") -> Transport:
    """Make a transport that was just opened the `wanted` one ("auto", "shm" or "c10d"), labelled
    with its `title`, and return it.

    A collective call. All ranks get the same kind. The transport is closed if this function raises.

    Raises:
        DesyncError: ranks passed different titles, or one sent a malformed text; on every rank.
        PlanMismatchError: ranks passed different names; on every rank.
        ValueError: "shm" is wanted and not available; on every rank.
        FddpError: a failed operation.
    """
    try:
        generation, order = c10d.history
        texts = c10d.exchange(f"{wanted}\n{title}\n{generation}\n{order}".encode())
        received = decode_all(texts, _opening, "opening")
        check_titles({rank: opening.title for rank, opening in enumerate(received)})
        c10d.set_title(title)
        names = [opening.name for opening in received]
        check_equal("transport", names, "pass the same transport on every rank")
        c10d.open_nccl([opening.history for opening in received])
        if wanted != "c10d":
            _use_memory(c10d, wanted)
        c10d.end_bootstrap()
    except BaseException as error:
        c10d.end_opening(error)
        raise
    _log.info(
        "rank %d of %d: transport %s, because %s",
        c10d.rank,
        c10d.world_size,
        c10d.name,
        c10d.reason,
    )
    return c10d


class _Opening(NamedTuple):
    """Message of a rank that opens a transport."""

    name: str
    title: str
    history: tuple[int, int]  # of NCCL backends


def _opening(text: bytes) -> _Opening:
    name, title, generation, order = text.decode().split("\n")
    return _Opening(name, title, (int(generation), int(order)))


def _use_memory(c10d: C10dTransport, wanted: str) -> None:
    """Share memory where this is possible."""
    if c10d.control_device.type != "cpu":
        c10d.reason = "torch has no gloo here, and only CPU memory can be shared"
    elif wanted == "auto" and c10d.world_size == 1:
        c10d.reason = "the group has only one rank"
    else:
        host_groups = discover_hosts(c10d)
        c10d.share_memory(host_groups)
        if c10d.name == "shm" or (wanted == "auto" and len(host_groups.hosts) < c10d.world_size):
            return
        c10d.dismiss_memory()
    if wanted == "shm":
        raise ValueError(
            f"transport='shm' is not available on rank {c10d.rank}: {c10d.reason}; pass 'auto' to "
            "use it only where it is available"
        )
