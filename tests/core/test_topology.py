"""Topologies: ranks as a grid with named axes."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fddp
from fddp.core.schedule.topology import Topology
from tests.support.on_ranks import on_processes

topologies = st.dictionaries(
    st.sampled_from(["pod", "host", "local", "core"]), st.integers(1, 4), min_size=1
).map(lambda axes: Topology(**axes))


def test_topology_is_a_value() -> None:
    grid = Topology(host=4, local=8)
    assert grid.world_size == 32
    assert grid.axes == (("host", 4), ("local", 8))
    assert grid.names == ("host", "local")
    assert repr(grid) == "Topology(host=4, local=8)"
    assert grid == Topology(host=4, local=8) != Topology(local=8, host=4)
    assert hash(grid) == hash(Topology(host=4, local=8))
    assert pickle.loads(pickle.dumps(grid)) == grid
    with pytest.raises(dataclasses.FrozenInstanceError):
        grid.axes = ()  # type: ignore[misc]


@given(topologies)
def test_ranks_are_numbered_row_by_row(topology: Topology) -> None:
    places = [*product(*(range(size) for _, size in topology.axes))]
    assert [topology.coordinates(r) for r in range(topology.world_size)] == places
    assert eval(repr(topology), {"Topology": Topology}) == topology


@given(topologies, st.data())
def test_groups_are_the_ranks_that_differ_in_their_axes_only(
    topology: Topology, data: st.DataObject
) -> None:
    axes = data.draw(st.sets(st.sampled_from(topology.names)))
    rank = data.draw(st.integers(0, topology.world_size - 1))
    fixed = [i for i, name in enumerate(topology.names) if name not in axes]

    def place(r: int) -> list[int]:
        return [topology.coordinates(r)[i] for i in fixed]

    group = topology.group(axes, rank)
    assert group == tuple(r for r in range(topology.world_size) if place(r) == place(rank))
    assert topology.size(axes) == len(group)
    assert rank in group


def test_an_axis_that_is_not_there() -> None:
    with pytest.raises(KeyError):
        Topology(world=2).size(("host",))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Topology(), r"^a topology needs at least one axis, such as Topology\(world=4\)$"),
        (lambda: Topology(world=0), r"^axis 'world' needs an int of at least 1 as size, got 0$"),
        (lambda: Topology(host=2, local=True), r"^axis 'local' needs an int .* got True$"),
        (lambda: Topology(world=2.0), r"got 2\.0$"),  # type: ignore[arg-type]
        (
            lambda: Topology(host=2**16, local=2**15),
            r"^Topology\(host=65536, local=32768\) has 2147483648 ranks; the limit is 2147483647$",
        ),
    ],
)
def test_errors(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


# From groups


def test_of_a_group_of_threads() -> None:
    assert fddp.loopback(2, Topology.from_group) == [Topology(world=2)] * 2


@on_processes(4)
def test_of_groups_and_meshes(rank: int, world_size: int) -> None:
    some, single = dist.new_group([0, 1, 2]), dist.new_group([3])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "local"))
    alone = rank == 3
    for group, topology in (
        (dist.group.WORLD, Topology(world=4)),
        (single if alone else some, Topology(world=1 if alone else 3)),
        (mesh, Topology(host=2, local=2)),
        (DeviceMesh("cpu", [[0, 1], [2, 3]]), Topology(dim0=2, dim1=2)),
        (mesh["local"], Topology(local=2)),
    ):
        assert Topology.from_group(group) == topology


@pytest.mark.parametrize("thing", [None, "gloo", 4, SimpleNamespace(size="large")])
def test_a_group_of_another_type(thing: object) -> None:
    text = (
        rf"^group must be a process group or DeviceMesh, got {type(thing).__name__}; for "
        r"the default group pass torch\.distributed\.group\.WORLD$"
    )
    with pytest.raises(TypeError, match=text):
        Topology.from_group(thing)
