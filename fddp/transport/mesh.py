"""Resolution of the `group`, `mesh` and `transport` arguments."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fddp.core.schedule.topology import Topology
from fddp.transport import Group, LoopbackGroup, Transport, TransportName

Mesh: TypeAlias = Topology | DeviceMesh


class GroupAndTopology(NamedTuple):
    """A group and its axes."""

    group: Group | None  # None for the default one
    topology: Topology | None  # None for a single axis
    problem: Exception | None = None  # of the mesh argument, raised once all ranks know of it


def resolve_mesh(group: Group | None, mesh: Mesh | None) -> GroupAndTopology:
    """Return the group to communicate on and its topology.

    Args:
        group: as for `GradSync`.
        mesh: a `DeviceMesh`, which has its own group, or the axes of `group` as a `Topology`.

    Raises:
        ValueError: this rank is not in the `DeviceMesh`.
    """
    if mesh is None or isinstance(mesh, Topology):
        return GroupAndTopology(group, mesh)
    if not isinstance(mesh, DeviceMesh):
        found = type(mesh).__name__
        return GroupAndTopology(
            group, None, TypeError(f"mesh must be a Topology or a DeviceMesh, got {found}")
        )
    if group is not None:
        problem = (
            "a DeviceMesh brings its own group; leave group= out, or pass the axes of the group "
            "as a Topology"
        )
        return GroupAndTopology(group, None, ValueError(problem))
    ranks = mesh.mesh.flatten().tolist()
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not a member of the DeviceMesh of ranks {ranks}; build the "
            f"GradSync only on the ranks that belong to it"
        )
    own = _group_of(mesh, ranks)
    if ranks != sorted(ranks):
        problem = (
            f"the DeviceMesh numbers its ranks {ranks}, and a topology needs ascending ranks; "
            f"build it as init_device_mesh does"
        )
        return GroupAndTopology(own, None, ValueError(problem))
    return GroupAndTopology(own, Topology.from_group(mesh))


def usable_transport(name: str, group: Group | None) -> TransportName:
    """Return the requested transport; "auto" if the group has no transport of this name."""
    if isinstance(group, LoopbackGroup) or name not in ("shm", "c10d"):
        return "auto"
    return name  # type: ignore[return-value]


def transport_error(name: str, transport: Transport) -> ValueError | None:
    """Return the error of a requested transport that differs from the opened one."""
    if name in ("auto", transport.name):
        return None
    return ValueError(
        f"transport={name!r} does not fit this group; pass 'auto' or {transport.name!r}"
    )


def _group_of(mesh: DeviceMesh, ranks: list[int]) -> dist.ProcessGroup:
    if mesh.ndim == 1:
        return mesh.get_group()
    if dist.group.WORLD is not None and len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return mesh._flatten().get_group()
