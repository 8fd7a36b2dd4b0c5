"""`TokenMean`: gradients of the mean over all tokens, with micro-batches and uneven inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import fddp
from fddp.integrations import TokenMean
from tests.support.ranks import RankPool

STEPS, MICRO = 4, 2
WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "fddp": fddp.DistributedDataParallel,
    "torch": nn.parallel.DistributedDataParallel,
}


def batch(rank: int, step: int, micro: int) -> Tensor:
    """Rows of one rank; their number differs."""
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + micro)
    return torch.randn(1 + (rank + step + micro) % 3, 3, generator=generator, dtype=torch.float64)


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def alone(steps: list[list[Tensor]]) -> list[Tensor]:
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parts in steps:
        optimizer.zero_grad()
        model(torch.cat(parts)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def assert_same(model: nn.Module, wanted: list[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=1e-12)


def accumulated(rank: int, world_size: int, wrapper: str) -> None:
    model = WRAPPERS[wrapper](built())
    optimizer, tokens = torch.optim.SGD(model.parameters(), lr=0.1), TokenMean()
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            first = batch(rank, step, 0)
            (model(first).square().sum() / MICRO).backward()
        second = batch(rank, step, 1)
        (model(second).square().sum() / MICRO).backward()
        tokens.add(len(first))
        tokens.add(torch.tensor(len(second)))
        tokens.scale_(model.parameters(), MICRO)
        optimizer.step()
    ranks = range(world_size)
    wanted = [[batch(r, s, m) for r in ranks for m in range(MICRO)] for s in range(STEPS)]
    assert_same(model, alone(wanted))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_accumulated_batches(ranks: RankPool, world_size: int, wrapper: str) -> None:
    ranks.run(world_size, accumulated, wrapper)


def two_losses(rank: int, world_size: int) -> None:
    """The losses of a model that are differentiated one after another are scaled before."""
    model, tokens = fddp.DistributedDataParallel(built()), TokenMean()
    for number in range(2):
        rows = batch(rank, 0, number)
        scale = world_size / tokens.total(len(rows))
        (model(rows).square().sum() * scale).backward()
    wanted = built()
    for number in range(2):
        union = torch.cat([batch(r, 0, number) for r in range(world_size)])
        wanted(union).square().mean().backward()
    for found, parameter in zip(model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(found.grad, parameter.grad, rtol=0, atol=1e-12)


def test_two_losses_of_one_model(ranks: RankPool) -> None:
    ranks.run(2, two_losses)


def joined(rank: int, world_size: int, wrapper: str) -> None:
    """Rank r has r batches fewer."""
    model = WRAPPERS[wrapper](built())
    optimizer, tokens = torch.optim.SGD(model.parameters(), lr=0.1), TokenMean()
    with Join([model, tokens]):
        for step in range(STEPS - rank):
            optimizer.zero_grad()
            rows = batch(rank, step, 0)
            model(rows).square().sum().backward()
            tokens.add(len(rows))
            tokens.scale_(model.parameters())
            optimizer.step()
    ranks = range(world_size)
    assert_same(
        model, alone([[batch(r, s, 0) for r in ranks if s < STEPS - r] for s in range(STEPS)])
    )


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_inputs(ranks: RankPool, world_size: int, wrapper: str) -> None:
    ranks.run(world_size, joined, wrapper)


def test_without_process_group() -> None:
    model, tokens = built(), TokenMean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = batch(0, 0, 0)
    model(rows).square().sum().backward()
    tokens.add(len(rows))
    tokens.scale_(model.parameters())
    optimizer.step()
    assert_same(model, alone([[rows]]))


def test_no_tokens() -> None:
    weight = torch.ones(2, requires_grad=True)
    weight.sum().backward()
    TokenMean().scale_([weight, torch.ones(1)])
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0, 0.0]
