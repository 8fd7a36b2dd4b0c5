"""Programs of stock torch over the backend "fddp": the results of the same programs over gloo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.support.pages import run_script
from tests.support.ranks import RankPool

_FEATURES, _STEPS = 64, 4


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(_FEATURES, 1000), nn.ReLU(), nn.Linear(1000, _FEATURES), nn.ReLU()
    )


def _trained(model: nn.Module, optimizer: Any = None) -> list[torch.Tensor]:
    """The parameters after some steps on this rank's data."""
    chosen = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(_STEPS):
        chosen.zero_grad()
        model(torch.randn(8, _FEATURES, generator=generator)).square().mean().backward()
        chosen.step()
    return [
        (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for p in model.parameters()
    ]


def _ddp(mesh: DeviceMesh, folder: str) -> list[torch.Tensor]:
    return _trained(nn.parallel.DistributedDataParallel(_network()))


def _zero(mesh: DeviceMesh, folder: str) -> list[torch.Tensor]:
    # Not on top: its import warns of a deprecation in torch itself.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(_network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    return _trained(model, optimizer)


def _fsdp_in_shared_memory(mesh: DeviceMesh, folder: str) -> list[torch.Tensor]:
    model = fully_shard(_network(), mesh=mesh)
    if dist.get_backend() == "fddp":
        model.set_allocate_memory_from_process_group_for_comm(True)
    return _trained(model)


def _tensor_parallel(mesh: DeviceMesh, folder: str) -> list[torch.Tensor]:
    model = _network()
    expected = copy.deepcopy(model)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    inputs = torch.ones(3, _FEATURES)
    output = model(inputs)
    torch.testing.assert_close(output, expected(inputs))
    return [output.detach()]


def _checkpoint(mesh: DeviceMesh, folder: str) -> list[torch.Tensor]:
    whole = torch.arange(24.0).reshape(6, 4)
    parts = distribute_tensor(whole, mesh, [Shard(0)])
    path = Path(folder) / dist.get_backend()
    dcp.save({"parts": parts}, checkpoint_id=path)
    loaded = distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)])
    dcp.load({"parts": loaded}, checkpoint_id=path)
    return [loaded.full_tensor(), loaded.redistribute(placements=[Replicate()]).to_local()]


_PROGRAMS = [_ddp, _zero, _fsdp_in_shared_memory, _tensor_parallel, _checkpoint]


def _over_both(
    rank: int,
    world_size: int,
    program: Callable[[DeviceMesh, str], list[torch.Tensor]],
    folder: str,
) -> None:
    results = []
    for backend in ("gloo", "fddp"):
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/{backend} store", world_size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        results.append(program(init_device_mesh("cpu", (world_size,)), folder))
        dist.barrier()
    for over_gloo, over_fddp in zip(*results, strict=True):
        torch.testing.assert_close(over_fddp, over_gloo)


@pytest.mark.parametrize("program", _PROGRAMS, ids=lambda program: program.__name__[1:])
def test_results_are_those_over_gloo(program: Any, ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _over_both, program, str(tmp_path))


@pytest.mark.nightly
def test_page_runs_on_two_ranks(tmp_path: Path) -> None:
    run_script("docs/backend.md", tmp_path)
