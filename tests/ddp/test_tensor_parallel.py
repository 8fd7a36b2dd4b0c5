"""Data parallelism over a tensor-parallel module: the local parts are the parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import fddp
from fddp.ddp.tensor_parallel import make_local_
from tests.support.models import rand, same_bits
from tests.support.ranks import RankPool

NAMES = ["up.weight", "up.bias", "down.weight", "down.bias"]


class Model(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(3, 4)
        self.down = nn.Linear(4, 2)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.up, x, use_reentrant=False) if self.checkpointed else self.up(x)
        y = self.down(torch.tanh(hidden))
        assert isinstance(y, Tensor)
        return y


def split(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return module


def square(world_size: int) -> DeviceMesh:
    names = ("data", "tensor")
    return init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=names)


def test_parameters_are_local_except_while_the_module_runs(ranks: RankPool) -> None:
    ranks.run(2, judge_local)


def judge_local(rank: int, world_size: int) -> None:
    from torch.distributed.tensor import DTensor

    mesh = square(world_size)
    module = split(Model(), mesh["tensor"])
    module.up.weight.requires_grad_(False)
    make_local_(module, None)
    make_local_(module, mesh)
    assert all(isinstance(p, DTensor) for p in module.parameters())
    make_local_(module, mesh["data"])
    own = dict(module.named_parameters())
    assert list(own) == NAMES
    assert not any(isinstance(p, DTensor) for p in own.values())
    assert [p.requires_grad for p in own.values()] == [False, True, True, True]
    assert own["up.weight"].shape == (2, 3)
    seen: list[bool] = []
    module.up.register_forward_hook(lambda part, *_: seen.append(isinstance(part.weight, DTensor)))
    expected = Model()(rand(5, 3, seed=0).float())
    torch.testing.assert_close(module(rand(5, 3, seed=0).float()), expected)
    assert seen == [True]
    again = dict(module.named_parameters())
    assert all(again[name] is own[name] for name in NAMES)
    twin = copy.deepcopy(module)
    torch.testing.assert_close(twin(rand(5, 3, seed=0).float()), expected)
    assert list(dict(twin.named_parameters())) == NAMES


def test_a_shared_parameter_stays_shared(ranks: RankPool) -> None:
    ranks.run(2, judge_shared)


def judge_shared(rank: int, world_size: int) -> None:
    mesh = square(world_size)
    module = split(Model(), mesh["tensor"])
    module.register_parameter("tied", module.up.weight)
    make_local_(module, mesh["data"])
    assert module.tied is module.up.weight
    module(rand(5, 3, seed=0).float())
    assert module.tied is module.up.weight


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_those_of_torch(ranks: RankPool, checkpointed: bool) -> None:
    for ours, torchs in ranks.run(4, both_wrappers, checkpointed):
        assert same_bits([ours, torchs])


def both_wrappers(rank: int, world_size: int, checkpointed: bool) -> list[Any]:
    return [
        trained(wrap, world_size, checkpointed) for wrap in (fddp.DistributedDataParallel, TorchDDP)
    ]


def trained(wrap: Any, world_size: int, checkpointed: bool) -> list[list[Tensor]]:
    """The gradients of three steps."""
    mesh = square(world_size)
    # Torch's wrapper has no parameters left for parts that run again.
    ours = wrap is fddp.DistributedDataParallel
    module = split(Model(checkpointed and ours), mesh["tensor"])
    ddp = wrap(module, device_mesh=mesh["data"])
    parameters = list(ddp.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        x = rand(5, 3, seed=10 * step + mesh.get_local_rank("data")).float()
        ddp(x).square().mean().backward()
        seen.append([p.grad.clone() for p in parameters if p.grad is not None])
        optimizer.step()
    assert all(len(grads) == len(NAMES) for grads in seen)
    if ours:
        assert list(ddp.state_dict()) == [f"module.{name}" for name in NAMES]
    return seen
