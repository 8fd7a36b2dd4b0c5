"""Resolution of the `group` and `mesh` arguments into a group and a topology."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fddp.core.schedule.topology import Topology
from fddp.transport import Group

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


def _group_of(mesh: DeviceMesh, ranks: list[int]) -> dist.ProcessGroup:
    if mesh.ndim == 1:
        return mesh.get_group()
    if dist.group.WORLD is not None and len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return mesh._flatten().get_group()
