"""Opening of backends in shared memory among ranks that share a host."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fddp.core.protocol.messages import Schema
from fddp.core.text import counted
from fddp.native import extension
from fddp.transport.shm.host_discovery import StagedExchange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fddp._C import ShmBackend
    from fddp.transport.shm.host_discovery import Exchange, HostGroups

_CONTROL_BLOCKS: Schema = [([int], int)]
"""Groups, and the offset of the control block of each."""


class OpenedGroups(NamedTuple):
    """Result of `open_shm_groups`.

    Attributes:
        own: backends of this rank, by ranks.
        everywhere: ranks of all groups opened; the same on all ranks.
        problems: errors that stopped ranks, by rank; the same on all ranks.
        remarks: `remark` of each rank; None where the rank had a problem.
    """

    own: dict[tuple[int, ...], ShmBackend]
    everywhere: list[tuple[int, ...]]
    problems: dict[int, str]
    remarks: list[bool | None]


def open_shm_groups(
    transport: Exchange,
    host_groups: HostGroups,
    groups: Sequence[tuple[int, ...]],
    timeout_s: float,
    *,
    remark: bool = False,
) -> OpenedGroups:
    """Open a backend for each of these groups of this rank; a collective call of `transport`.

    The ranks of each group must share a host. Groups in which a rank fails are not opened on any
    rank. `remark` is exchanged together with the outcomes.
    """
    exchange = StagedExchange(transport)
    opened: dict[tuple[int, ...], ShmBackend] = {}

    def make_control_blocks() -> list[tuple[tuple[int, ...], int]]:
        return [
            (ranks, _make_control_block(host_groups, ranks))
            for ranks in groups
            if ranks[0] == transport.rank
        ]

    def join() -> bool:
        for ranks in groups:
            if not exchange.stopped(ranks):
                opened[ranks] = _join(host_groups, ranks, transport.rank, offsets[ranks], timeout_s)
        return remark

    control_blocks = exchange.stage(make_control_blocks, _CONTROL_BLOCKS)
    offsets = {tuple(ranks): offset for made in control_blocks for ranks, offset in made or ()}
    remarks = exchange.stage(join)
    for ranks in [ranks for ranks in opened if exchange.stopped(ranks)]:
        opened.pop(ranks).shutdown()
    everywhere = [ranks for ranks in offsets if not exchange.stopped(ranks)]
    return OpenedGroups(opened, everywhere, exchange.problems, remarks)


def _make_control_block(host_groups: HostGroups, ranks: tuple[int, ...]) -> int:
    arena = host_groups.arena
    offset = None if arena is None else arena.make_control_block(len(ranks))
    if offset is None:
        raise OSError(
            f"no memory can be reserved for a control block of {counted(len(ranks), 'rank')}"
        )
    return offset


def _join(
    host_groups: HostGroups, ranks: tuple[int, ...], rank: int, offset: int, timeout_s: float
) -> ShmBackend:
    if host_groups.arena is None:
        raise OSError("this rank has no shared memory")
    return extension.compiled.ShmBackend(
        host_groups.arena,
        [host_groups.views.get(other) for other in ranks],
        ranks.index(rank),
        offset,
        timeout_s,
        max(len(host) for host in host_groups.hosts if rank in host),
    )
