"""Choice of the transport for a group of `torch.distributed`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fddp.core.protocol.differences import check_equal
from fddp.transport.liveness.failure import check_titles
from fddp.transport.shm.host_discovery import discover_hosts
from fddp.transport.shm.transport import ShmTransport

if TYPE_CHECKING:
    from fddp.transport.base import Transport
    from fddp.transport.c10d.transport import C10dTransport

_log = logging.getLogger("fddp")


def choose(c10d: C10dTransport, wanted: str, title: str = "transport") -> Transport:
    """Return the `wanted` transport ("auto", "shm" or "c10d") for the group of an open c10d
    transport, labelled with its `title`.

    A collective call. All ranks get the same kind. The result takes ownership of `c10d`, which is
    closed if this function raises.

    Raises:
        DesyncError: ranks passed different titles; on every rank.
        PlanMismatchError: ranks passed different names; on every rank.
        ValueError: "shm" is wanted and not available; on every rank.
        FddpError: a failed operation.
    """
    try:
        received = [
            text.decode().split("\n") for text in c10d.exchange(f"{wanted}\n{title}".encode())
        ]
        check_titles({rank: theirs for rank, (_, theirs) in enumerate(received)})
        c10d.set_title(title)
        names = [name for name, _ in received]
        check_equal("transport", names, "pass the same transport on every rank")
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
        c10d.reason = "the group has no backend for the CPU, and only CPU memory can be shared"
    elif wanted == "auto" and c10d.world_size == 1:
        c10d.reason = "the group has only one rank"
    else:
        host_groups = discover_hosts(c10d)
        shm = ShmTransport(c10d, host_groups)
        if shm.name == "shm" or (wanted == "auto" and len(host_groups.hosts) < c10d.world_size):
            return shm
        c10d.reason = shm.reason
        shm.dismiss()
    if wanted == "shm":
        raise ValueError(
            f"transport='shm' is not available on rank {c10d.rank}: {c10d.reason}; pass 'auto' to "
            "use it only where it is available"
        )
    return c10d
