"""torch's `DeviceMesh` in place of a group: its axes become the topology's."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fddp
from fddp import Topology
from fddp.testing import assert_mean
from tests.support.endings import Ending, ending
from tests.support.models import rand, same_bits
from tests.support.ranks import RankPool

ALGORITHMS = ("all_reduce", "hierarchical", "reduce_scatter")


def trees(ranks: list[int]) -> list[dict[str, Tensor]]:
    return [{"a": rand(7, 3, seed=r), "b": rand(5, seed=50 + r).float()} for r in ranks]


def checked(mesh: Any, ranks: list[int], algorithm: Any) -> tuple[str, Any]:
    """The topology, and the mean over these ranks as asserted."""
    with fddp.GradSync(trees([0])[0], mesh=mesh, algorithm=algorithm) as sync:
        assert sync.world_size == len(ranks)
        assert sync.rank == ranks.index(dist.get_rank())
        return str(sync.schedule.topology), assert_mean(sync, trees(ranks))


def without_names(rank: int, world_size: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2))
    return [checked(mesh, [0, 1, 2, 3], algorithm) for algorithm in ALGORITHMS]


def test_dimensions_without_names_are_numbered(ranks: RankPool) -> None:
    for results in zip(*ranks.run(4, without_names), strict=True):
        assert {topology for topology, _ in results} == {"Topology(dim0=2, dim1=2)"}
        assert same_bits([mean for _, mean in results])


def sub_meshes(rank: int, world_size: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "pp", "tp"))
    everyone = [0, 1, 2, 3]
    own_host, own_place = [0, 1] if rank < 2 else [2, 3], [rank % 2, rank % 2 + 2]
    return [
        checked(mesh, everyone, "hierarchical")[0],
        checked(mesh["dp", "tp"], everyone, "hierarchical")[0],
        checked(mesh["pp", "tp"], own_host, "hierarchical")[0],
        checked(mesh["dp", "pp"], own_place, "reduce_scatter")[0],
        checked(mesh["dp"], own_place, "all_reduce")[0],
        checked(mesh["tp"], own_host, "reduce_scatter")[0],
        checked(mesh["pp"], [rank], "all_reduce")[0],
    ]


def test_sub_meshes_reduce_over_their_own_ranks(ranks: RankPool) -> None:
    for topologies in ranks.run(4, sub_meshes):
        assert topologies == [
            "Topology(dp=2, pp=1, tp=2)",
            "Topology(dp=2, tp=2)",
            "Topology(pp=1, tp=2)",
            "Topology(dp=2, pp=1)",
            "Topology(dp=2)",
            "Topology(tp=2)",
            "Topology(pp=1)",
        ]


def part_of_the_world(rank: int, world_size: int) -> str | None:
    """A mesh of three of four ranks."""
    mesh = DeviceMesh("cpu", [0, 1, 3], mesh_dim_names=("dp",))
    if rank == 2:
        return ending(lambda: fddp.GradSync(trees([0])[0], mesh=mesh)).kinds[0]
    return checked(mesh, [0, 1, 3], "reduce_scatter")[0]


def test_a_mesh_of_some_ranks(ranks: RankPool) -> None:
    *members, last = ranks.run(4, part_of_the_world)
    assert members == ["Topology(dp=3)", "Topology(dp=3)", "ValueError"]
    assert last == "Topology(dp=3)"


def groups_and_topologies(rank: int, world_size: int) -> list[str]:
    """A topology laid over a group that is not the default one."""
    own = [0, 1] if rank < 2 else [2, 3]
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    outcome = []
    for mesh in (Topology(a=1, b=2), Topology(a=2, b=1)):
        with fddp.GradSync(
            trees([0])[0], group=groups[rank // 2], mesh=mesh, algorithm="hierarchical"
        ) as sync:
            assert_mean(sync, trees(own))
            outcome.append(str(sync.schedule.topology))
    return outcome


def test_a_topology_over_a_group(ranks: RankPool) -> None:
    for outcome in ranks.run(4, groups_and_topologies):
        assert outcome == ["Topology(a=1, b=2)", "Topology(a=2, b=1)"]


# Bad input


def bad_meshes(rank: int, world_size: int) -> dict[str, Ending]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "local"))
    shuffled = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("host", "local"))
    params = trees([0])[0]
    group = dist.group.WORLD
    outcome = {
        "with a group": ending(lambda: fddp.GradSync(params, group=group, mesh=mesh)),
        "as a group": ending(lambda: fddp.GradSync(params, group=mesh)),
        "shuffled": ending(lambda: fddp.GradSync(params, mesh=shuffled)),
        "mixed": ending(lambda: fddp.GradSync(params, mesh=mesh if rank else shuffled)),
        "of one axis": ending(
            lambda: fddp.GradSync(params, mesh=mesh["host"], algorithm="hierarchical")
        ),
    }
    checked(mesh, [0, 1, 2, 3], "hierarchical")
    return outcome


BAD = {
    "with a group": ("ValueError", "a DeviceMesh brings its own group; leave group= out"),
    "as a group": (
        "ValueError",
        "2 dimensions ('host', 'local'); pass one dimension of it (mesh[name])",
    ),
    "shuffled": ("ValueError", "numbers its ranks [0, 2, 1, 3]"),
    "of one axis": ("ValueError", "at least two axes"),
}


def test_bad_meshes(ranks: RankPool) -> None:
    for rank, outcome in enumerate(ranks.run(4, bad_meshes)):
        for name, (kind, text) in BAD.items():
            assert outcome[name].kinds[0] == kind
            assert text in outcome[name].text
        assert outcome["mixed"].kinds[0] == ("PlanMismatchError" if rank else "ValueError")
