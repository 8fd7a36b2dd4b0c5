"""Which transport a group of `torch.distributed` gets."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fddp.errors import PlanMismatchError
from fddp.transport.liveness.failure import check_titles
from fddp.transport.shm.host_discovery import discover_hosts
from fddp.transport.shm.transport import ShmTransport

if TYPE_CHECKING:
    from fddp.transport.base import Transport
    from fddp.transport.c10d.transport import C10dTransport

_log = logging.getLogger("fddp")


def choose(c10d: C10dTransport, wanted: str, title: str = "transport") -> Transport:
    """The transport that is `wanted` of a group over which a c10d transport is open already.

    Every rank calls this, with the same name, and gets the same kind. `c10d` is part of what is
    returned, or all of it; it is closed where this raises.

    Args:
        c10d: over the ranks in question.
        wanted: "auto", "shm" or "c10d".
        title: what it is for, in a word.

    Raises:
        DesyncError: ranks want one for something else; on every rank.
        PlanMismatchError: ranks want different ones; on every rank.
        ValueError: "shm" is wanted and can't be had; on every rank.
        FddpError: as an operation that fails.
    """
    try:
        received = [
            text.decode().split("\n") for text in c10d.exchange(f"{wanted}\n{title}".encode())
        ]
        check_titles({rank: theirs for rank, (_, theirs) in enumerate(received)})
        c10d.set_title(title)
        names = [name for name, _ in received]
        for rank, name in enumerate(names):
            if name != names[0]:
                raise PlanMismatchError(
                    f"transport is {names[0]} on rank 0 and {name} on rank {rank}; "
                    "pass the same transport on every rank"
                )
        chosen = _chosen(c10d, wanted)
    except BaseException:
        c10d.close()
        raise
    _log.info(
        "rank %d of %d: transport %s, because %s",
        chosen.rank,
        chosen.world_size,
        chosen.name,
        chosen.reason,
    )
    return chosen


def _chosen(c10d: C10dTransport, wanted: str) -> Transport:
    if wanted == "c10d":
        return c10d
    if c10d.control_device.type != "cpu":
        c10d.reason = "the group has no backend for the CPU, whose memory alone can be shared"
    elif wanted == "auto" and c10d.world_size == 1:
        c10d.reason = "the group has one rank, which exchanges nothing"
    else:
        neighbours = discover_hosts(c10d)
        shm = ShmTransport(c10d, neighbours)
        if shm.name == "shm" or (wanted == "auto" and len(neighbours.hosts) < c10d.world_size):
            return shm
        c10d.reason = shm.reason
        shm.dismiss()
    if wanted == "shm":
        raise ValueError(
            f"transport='shm' can't be had on rank {c10d.rank}: {c10d.reason}; pass 'auto', which "
            "takes it where it can"
        )
    return c10d
