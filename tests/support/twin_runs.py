"""Runs of one loop with stock DDP and with fddp's, compared shot by shot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

import fddp
import tests.support.parity_runs as runs
from tests.support.parity_models import MODELS, Model

STEPS = 8
MLP = MODELS["mlp"]
DDP = Callable[..., Any]


def batches_of(model: Model, rank: int, steps: int = STEPS) -> list[Tensor]:
    return [model.batch(rank, step) for step in range(steps)]


def train_with(model: Any, optimizer: Any, batches: Sequence[Tensor]) -> Iterator[None]:
    """As `runs.plain`, with any optimizer."""
    return runs.plain(runs.Run(model, optimizer), batches)


def trained(ddp: DDP, rank: int, make_optimizer: Any, **arguments: Any) -> list[runs.Shot]:
    module = runs.built(MLP, rank)
    model = ddp(module, **arguments)
    loop = train_with(model, make_optimizer(model.parameters()), batches_of(MLP, rank))
    return [*(runs.shot(module) for _ in loop), runs.shot(module)]


def recorded(ddp: DDP, rank: int, backward: Callable[[Any, Tensor], None]) -> list[runs.Shot]:
    """Return a shot after each batch's `backward(model, batch)`; nothing is updated."""
    module = runs.built(MLP, rank)
    model = ddp(module)
    shots = []
    for batch in batches_of(MLP, rank):
        model.zero_grad()
        backward(model, batch)
        shots.append(runs.shot(module))
    return shots


def both(fn: Callable[[DDP], list[runs.Shot]]) -> str:
    """Return the first difference between a run with stock DDP and one with fddp's."""
    return runs.first_difference(fn(StockDDP), fn(fddp.DistributedDataParallel))


def assert_no_difference(differences: list[str]) -> None:
    assert differences == [""] * len(differences)


def renamed(module: nn.Module) -> runs.Shot:
    return {f"second {path}": tensor for path, tensor in runs.shot(module).items()}
