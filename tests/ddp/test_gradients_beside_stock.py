"""Programs of two ranks, run with stock DDP and with fddp's: the same values after every step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

import fddp
import tests.support.parity_runs as runs
from tests.support.parity_models import MODELS, MixedDtypes, loss_of
from tests.support.ranks import RankPool

DDP = Callable[..., Any]
Program = Callable[[DDP, int], Iterator[Any]]
CONV = MODELS["conv with batch norm"]


def plain_hook(seen, bucket):  # without annotations, which DDP compares as objects
    """Takes the mean, and notes the dtype and the parameters' shapes of each bucket."""
    shapes = [tuple(p.shape) for p in bucket.parameters()]
    seen.append((bucket.index(), bucket.is_last(), bucket.buffer().dtype, shapes))
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


# Strides


def converted(ddp: DDP, rank: int, make: Any, **options: Any) -> Iterator[runs.Shot]:
    """Steps before and after the parameters take another memory format.

    After its second forward pass, stock DDP returns gradients whose elements are permuted.
    """
    module = runs.built(CONV, 0)
    model = ddp(module)
    optimizer = make(model.parameters(), lr=0.1, **options)
    for step in range(4):
        if step == 1:
            model.to(memory_format=torch.channels_last)
        optimizer.zero_grad(set_to_none=step != 3)
        loss_of(model(CONV.batch(rank, step))).backward()
        yield runs.shot(module)
        optimizer.step()


# TorchScript


def scripted(ddp: DDP, rank: int, make: Callable[[], nn.Module]) -> Iterator[runs.Shot]:
    """Steps of modules that have their parameters in C++."""
    torch.manual_seed(0)
    module = make()
    model = ddp(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 3), 1.0 + rank + step)).square().sum().backward()
        yield runs.shot(module)
        optimizer.step()


# Order of buckets


def first_buckets(ddp: DDP, rank: int, make: Callable[[], nn.Module]) -> Iterator[Any]:
    """Buckets of the first plan, as a hook sees them."""
    module = make()
    seen: list[Any] = []
    model = ddp(module)
    model.register_comm_hook(seen, plain_hook)
    loss_of(model(MODELS["mixed dtypes"].batch(rank, 0))).backward()
    yield sorted(seen)
    yield runs.shot(module)


class Layers(nn.Module):
    """Four layers, of these dtypes."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        widths = (6, 9, 4, 5, 3)
        self.layers = nn.ModuleList(
            nn.Linear(before, after, dtype=dtype)
            for before, after, dtype in zip(widths[:-1], widths[1:], dtypes, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


PROGRAMS: dict[str, Program] = {
    "channels last, fused SGD": lambda ddp, rank: converted(
        ddp, rank, torch.optim.SGD, momentum=0.9, fused=True
    ),
    "channels last, fused Adam": lambda ddp, rank: converted(
        ddp, rank, torch.optim.Adam, fused=True
    ),
    "a scripted module": lambda ddp, rank: scripted(
        ddp, rank, lambda: torch.jit.script(nn.Linear(3, 2))
    ),
    "a scripted part": lambda ddp, rank: scripted(
        ddp, rank, lambda: nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 2)))
    ),
    "a traced part": lambda ddp, rank: scripted(
        ddp,
        rank,
        lambda: nn.Sequential(torch.jit.trace(nn.Linear(3, 3), torch.ones(1, 3)), nn.Linear(3, 2)),
    ),
    "first buckets, mixed dtypes": lambda ddp, rank: first_buckets(ddp, rank, MixedDtypes),
    "first buckets, one dtype around another": lambda ddp, rank: first_buckets(
        ddp, rank, lambda: Layers(torch.float32, torch.float64, torch.float64, torch.float32)
    ),
    "first buckets, dtypes in turn": lambda ddp, rank: first_buckets(
        ddp, rank, lambda: Layers(*[torch.float64, torch.float32] * 2)
    ),
}


def run(rank: int, world_size: int, name: str) -> list[str]:
    """Differences between the two classes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the buffers' layout; nothing unused
        found = []
        for ddp in (StockDDP, fddp.DistributedDataParallel):
            torch.manual_seed(0)
            found.append(list(PROGRAMS[name](ddp, rank)))
    assert len(found[0]) == len(found[1]) > 0
    return [difference(a, b) for a, b in zip(*found, strict=True)]


def difference(theirs: Any, ours: Any) -> str:
    if isinstance(theirs, dict):
        return runs.first_difference([theirs], [ours])
    return "" if theirs == ours else f"{theirs} against {ours}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_as_stock(ranks: RankPool, name: str) -> None:
    for rank, differences in enumerate(ranks.run(2, run, name)):
        for step, text in enumerate(differences):
            assert not text, f"rank {rank}, value {step}: {text}"
