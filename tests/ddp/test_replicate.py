"""torch's composable `replicate`, which wraps a module's parameters and not the module."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import tests.support.parity_runs as runs
from tests.support.beside_stock import DDP, beside_stock
from tests.support.models import rand

STEPS = 4


class Scaled(nn.Module):
    """Has an argument by name, a buffer and layers that only rank 0 uses if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor, *, scale: Tensor | None = None, short: bool = False) -> Tensor:
        for layer in self.layers[: 2 if short else 3]:
            x = torch.tanh(layer(self.norm(x)))
        return x if scale is None else x * scale


def whole(model: Any, **arguments: Any) -> list[Any]:
    return [replicate(model, **arguments)]


def without_first(model: Any) -> list[Any]:
    return [replicate(model, ignored_modules=[model.layers[0]])]


def by_layer(model: Any) -> list[Any]:
    return [replicate(layer) for layer in model.layers]


def with_hook(model: Any) -> list[Any]:
    [replica] = whole(model)
    replica.register_comm_hook(None, fp16_compress_hook)
    return [replica]


def replicate(module: Any, **arguments: Any) -> Any:
    return importlib.import_module("torch.distributed._composable.replicate").replicate(
        module, **arguments
    )


WAYS: dict[str, Callable[[Any], list[Any]]] = {
    "whole": whole,
    "device": lambda model: whole(model, device_id=torch.device("cpu")),
    "options": lambda model: whole(model, bucket_cap_mb=1e-5, gradient_as_bucket_view=True),
    "unused": lambda model: whole(model, find_unused_parameters=True),
    "static": lambda model: whole(model, static_graph=True),
    "without a part": without_first,
    "by layer": by_layer,
    "hook": with_hook,
}


@pytest.mark.parametrize("way", WAYS)
@beside_stock()
def test_replicate(ddp: DDP, rank: int, way: str) -> Iterator[runs.Shot]:
    composable = importlib.import_module("torch.distributed._composable.replicate")
    with mock.patch.object(composable, "DistributedDataParallel", ddp):
        model: Any = Scaled()
        replicas = WAYS[way](model)
        for step in range(STEPS):
            for replica in replicas:
                replica.set_requires_gradient_sync(step != 1)
            x = rand(4, 3, seed=10 * step + rank, dtype=torch.float32)
            short = way == "unused" and rank == 1
            model(x, scale=torch.tensor(2.0 + rank), short=short).sum().backward()
            yield runs.shot(model)
        with torch.no_grad():
            model(x)
        yield runs.shot(model)


@beside_stock()
def test_parts_of_forward_return_what_torchs_return(ddp: DDP, rank: int) -> Iterator[str]:
    """Called on their own, as `replicate` calls them."""
    model = ddp(nn.Linear(2, 1))
    inputs = model._pre_forward(torch.ones(1, 2) * rank, scale=2)
    output = model._post_forward(model.module(*inputs[0]))
    output.sum().backward()
    grad = model.module.weight.grad.tolist()
    assert grad == [[0.5, 0.5]]
    yield str((inputs, output.requires_grad, grad))
