"""Measured samples: their structure, and that all ranks have the same. Times are not asserted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

import fddp
from fddp.core.schedule.topology import Topology
from fddp.core.sim.cost import CostModel
from fddp.errors import PlanMismatchError
from fddp.sync import measure
from fddp.sync.measure import measure_axes, measure_cost
from fddp.transport import LoopbackGroup, open_transport

if TYPE_CHECKING:
    from fddp.core.sim.cost import Sample
    from fddp.transport import Group
    from tests.support.ranks import Launch, RankPool

SQUARE = Topology(host=2, local=2)
SIZES_BYTES = (1, 1000, 70_000)


def small_on_rank(group: Group) -> tuple[Sample, ...]:
    return measure_cost(group, sizes_bytes=SIZES_BYTES, repeats=2, timeout_s=20)


@pytest.mark.parametrize("world_size", [2, 3])
def test_samples_of_a_group(launch: Launch, world_size: int) -> None:
    samples, *others = launch(world_size, small_on_rank)
    assert all(other == samples for other in others)
    numels = [max(1, size // 4 // world_size) * world_size for size in SIZES_BYTES]
    assert [(s.kind, s.nbytes, s.ranks, s.busy) for s in samples] == [
        ("all_reduce", 4 * numel, world_size, busy) for busy in (False, True) for numel in numels
    ] * 2
    assert all(0.0 < sample.time_s < math.inf for sample in samples)
    cost = CostModel.fit(samples)
    assert 0.0 < cost.overlap <= 1.0


def test_the_slowest_ranks_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_time_s", lambda link, probe: 1.0 + link.transport.rank)
    samples = fddp.loopback(3, small_on_rank)[0]
    assert {sample.time_s for sample in samples} == {3.0}


def axes_on_rank(group: Group) -> dict[str, tuple[Sample, ...]]:
    with open_transport(group, timeout_s=20) as transport:
        transport.open_subgroups(SQUARE, [("local",)])
        by_axis = measure_axes(transport, SQUARE, sizes_bytes=SIZES_BYTES, repeats=1)
        total = torch.ones(1)
        transport.all_reduce(total, axes=("local",)).wait("a group that was open before")
        assert total.item() == 2
    whole = measure_cost(group, mesh=SQUARE, sizes_bytes=SIZES_BYTES, repeats=1, timeout_s=20)
    assert whole.keys() == by_axis.keys()
    return by_axis


def test_samples_of_each_axis(launch: Launch) -> None:
    first, *others = launch(4, axes_on_rank)
    assert all(other == first for other in others)
    assert list(first) == ["host", "local"]
    for samples in first.values():
        assert {sample.ranks for sample in samples} == {2}
        assert [(s.kind, s.busy) for s in samples[:: len(SIZES_BYTES)]] == [
            ("all_reduce", False),
            ("reduce_scatter", False),
            ("all_gather", False),
            ("all_reduce", True),
        ]
        assert CostModel.fit(samples).algorithm == "ring"


def mesh_on_rank(rank: int, world_size: int) -> list[str]:
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("host", "local"))
    by_axis = measure_cost(mesh=mesh, sizes_bytes=(64,), repeats=1)
    assert all(sample.kind == "all_reduce" for sample in by_axis["local"])
    return list(by_axis)


def test_a_device_mesh_brings_its_axes(ranks: RankPool) -> None:
    assert ranks.run(2, mesh_on_rank) == [["local"], ["local"]]


def mistakes_on_rank(group: Group) -> None:
    for wrong in ({"repeats": 0}, {"repeats": 1.5}, {"sizes_bytes": (4, -4)}):
        (name, value), *_ = wrong.items()
        with pytest.raises(ValueError, match=f"{name}: .* is no int of at least 1"):
            measure_cost(group, timeout_s=20, **{name: value})  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="has 4 ranks and the transport 2"):
        measure_cost(group, mesh=SQUARE, timeout_s=20)
    with pytest.raises(TypeError, match="mesh must be a Topology or a DeviceMesh, got str"):
        measure_cost(group, mesh="local")  # type: ignore[call-overload]


def test_mistakes_are_named(launch: Launch) -> None:
    launch(2, mistakes_on_rank)


def test_disagreeing_ranks_are_named_with_the_difference() -> None:
    def differ(group: LoopbackGroup) -> None:
        with pytest.raises(PlanMismatchError, match=r"rank 0 and \[64\], 2 and cpu on rank 1"):
            measure_cost(group, sizes_bytes=(64,), repeats=1 + group.rank)

    fddp.loopback(2, differ)


def test_one_rank_has_nothing_to_measure() -> None:
    with pytest.raises(ValueError, match="a group of one rank has nothing to measure"):
        fddp.loopback(1, measure_cost)
