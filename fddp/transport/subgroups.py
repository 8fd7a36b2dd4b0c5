"""Groups of ranks along axes of a topology."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from fddp.core.protocol.differences import check_equal
from fddp.core.protocol.messages import decode_all
from fddp.core.text import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fddp.core.schedule.topology import Topology

#: names of axes; () stands for all ranks
Axes = tuple[str, ...]


class Subgroups(NamedTuple):
    """Groups of this rank that `Transport.open_subgroups` has opened."""

    topology: Topology | None = None  # None before the first call
    #: members of this rank's group along each tuple of axes, in ascending order
    ranks: Mapping[Axes, tuple[int, ...]] = MappingProxyType({})

    def members(self, kind: str, axes: Axes, rank: int) -> tuple[int, ...]:
        """Return the members of the group along `axes`; ValueError if it was not opened."""
        members = self.ranks.get(axes)
        if members is None:
            opened = ", ".join(map(repr, self.ranks)) or "none"
            raise ValueError(
                f"{kind} on rank {rank}: no group along {axes!r} was opened; open: {opened}; "
                "pass these axes to open_subgroups"
            )
        return members

    def adding(self, topology: Topology, ranks: Mapping[Axes, tuple[int, ...]]) -> Subgroups:
        """Return these groups and further ones. Groups of another topology are dropped."""
        known = self.ranks if topology == self.topology else {}
        return Subgroups(topology, {**known, **ranks})


def own_groups(
    rank: int, topology: Topology, groups: Sequence[Axes], requests: Sequence[bytes]
) -> dict[Axes, tuple[int, ...]]:
    """Check the arguments of `Transport.open_subgroups`, described by each rank in `requests`.

    Returns:
        Members of `rank`'s groups by axes, including the group along all axes.
    """
    way_out = "pass the same topology and groups on every rank"
    received = decode_all(requests, bytes.decode, "open_subgroups")
    check_equal(f"open_subgroups on rank {rank}: the mesh", received, way_out)
    if topology.world_size != len(requests):
        raise ValueError(
            f"open_subgroups on rank {rank}: {topology} has "
            f"{counted(topology.world_size, 'rank')} and the transport {len(requests)}; pass a "
            f"topology of the transport's ranks"
        )
    for axes in groups:
        if len(set(axes) & set(topology.names)) != len(axes):
            raise ValueError(
                f"open_subgroups on rank {rank}: {axes!r} are not distinct axes of {topology}; "
                f"choose among {topology.names!r}"
            )
    return {axes: topology.group(axes, rank) for axes in (*groups, topology.names)}
