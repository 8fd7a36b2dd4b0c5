"""A module of layers to be wrapped, its batches, and its mean gradients by one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fddp
from tests.support.backward_calls import call_in_backward
from tests.support.groups import rank_of
from tests.support.models import rand

DDP = fddp.DistributedDataParallel
WIDTH = 6
TINY_CAP_MB = 1e-4  # about one parameter a bucket


def fail_in_backward() -> None:
    """Raise the error of a backward pass that fails."""
    raise ValueError("no backward here")


class Net(nn.Module):
    """Layers by name; `forward` applies those of `through`."""

    def __init__(self) -> None:
        super().__init__()
        self.fails_in_backward = False
        self.layers = nn.ModuleDict(
            {f"l{i}": nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for i in range(3)}
        )

    def forward(self, x: Tensor, through: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        for i in through:
            x = torch.tanh(self.layers[f"l{i}"](x)) + x
            if self.fails_in_backward and i == 0:
                x = call_in_backward(x, fail_in_backward)
        return x


def net() -> Net:
    """The same on all ranks, which may be threads that share torch's generator."""
    model = Net()
    with torch.no_grad():
        for i, param in enumerate(model.parameters()):
            param.copy_(rand(*param.shape, seed=i).double() / 3)
    return model


def batch(rank: int, step: int = 0) -> Tensor:
    return rand(4, WIDTH, seed=100 * step + rank).double()


def run_backward(ddp: nn.Module, group: Any, step: int = 0, **inputs: Any) -> None:
    """Run forward and backward of the mean square, on this rank's batch of a step."""
    ddp(batch(rank_of(group), step), **inputs).square().mean().backward()


def grads(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def mean_of(world_size: int, loss: Callable[[Net, int], Tensor]) -> dict[str, Any]:
    """The mean over ranks of gradients, from one process."""
    model = net()
    total = sum(loss(model, rank) for rank in range(world_size)) / world_size
    assert isinstance(total, Tensor)
    total.backward()
    return grads(model)


def assert_close(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if value is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
