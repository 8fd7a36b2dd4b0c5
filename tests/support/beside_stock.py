"""Programs of two ranks, run with stock DDP and with fddp's: the same values after every step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

import fddp
import tests.support.parity_runs as runs
from tests.support.parity_models import MODELS, loss_of
from tests.support.polling import HANG_S

if TYPE_CHECKING:
    from tests.support.ranks import RankPool

CLASSES = (StockDDP, fddp.DistributedDataParallel)
MLP = MODELS["mlp"]
STEPS = 6
DDP = Callable[..., Any]
# Yields shots, or values that are compared by `==`. To be found by its name in a module.
Program = Callable[[DDP, int], Iterator[Any]]


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


def renamed(module: nn.Module) -> runs.Shot:
    return {f"second {path}": tensor for path, tensor in runs.shot(module).items()}


def compare(rank: int, world_size: int, program: Program) -> list[str]:
    """Differences between the two classes."""
    found = []
    for ddp in CLASSES:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            found.append(list(program(ddp, rank)))
    assert len(found[0]) == len(found[1]) > 0
    return [_difference(a, b) for a, b in zip(*found, strict=True)]


def _difference(theirs: Any, ours: Any) -> str:
    if isinstance(theirs, dict):
        return runs.first_difference([theirs], [ours])
    return "" if theirs == ours else f"{theirs} against {ours}"


def assert_same_as_stock(
    ranks: RankPool, program: Program, world_size: int = 2, timeout_s: float = HANG_S
) -> None:
    found = ranks.run(world_size, compare, program, timeout_s=timeout_s)
    for rank, differences in enumerate(found):
        for step, text in enumerate(differences):
            assert not text, f"rank {rank}, value {step}: {text}"
