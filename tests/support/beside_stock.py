"""Programs of ranks that run with stock DDP and with fddp's."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

import fddp
import tests.support.parity_runs as runs
from tests.support.on_ranks import on_processes
from tests.support.parity_models import MODELS, loss_of

CLASSES = (StockDDP, fddp.DistributedDataParallel)
MLP = MODELS["mlp"]
STEPS = 6
DDP = Callable[..., Any]


def batches_of(rank: int, steps: int = STEPS) -> list[Tensor]:
    return [MLP.batch(rank, step) for step in range(steps)]


def training(
    model: Any, optimizer: Any, batches: list[Tensor], module: nn.Module
) -> Iterator[runs.Shot]:
    """Shots of the module after each backward pass."""
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        yield runs.shot(module)
        optimizer.step()
    yield runs.shot(module)


def beside_stock(world_size: int = 2) -> Callable[[Callable[..., Any]], Any]:
    """Make a test of `fn(ddp, rank, **fixtures)`, which runs on processes with either class.

    What `fn` yields must be the same: shots to the bit, other values by `==`. What differs, it
    asserts.
    """

    def decorate(fn: Callable[..., Any]) -> Any:
        @functools.wraps(fn)
        def compare(rank: int, world_size: int, **fixtures: Any) -> None:
            found = []
            for ddp in CLASSES:
                torch.manual_seed(0)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    found.append(list(fn(ddp, rank, **fixtures) or ()))
            assert all(found) or not inspect.isgeneratorfunction(fn)
            for number, (theirs, ours) in enumerate(zip(*found, strict=True)):
                if isinstance(theirs, dict):
                    difference = runs.first_difference([theirs], [ours])
                else:
                    difference = "" if theirs == ours else f"{theirs} against {ours}"
                assert not difference, f"value {number}: {difference}"

        return on_processes(world_size)(compare)

    return decorate
