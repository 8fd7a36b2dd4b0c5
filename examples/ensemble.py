"""An ensemble trained at once: `vmap` over models, `value_and_grad` over ranks.

The parameters of all models are one tree with a leading axis. Each model sees every sample as often
as it was drawn for it with replacement (bagging, Breiman 1996): a weight for each model and sample,
so that ranks need not exchange samples.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import grad, vmap

import fddp
from examples.common import ROUNDING, Check, Report, difference, difference_between_ranks, main
from fddp.core.text import counted

Params: TypeAlias = dict[str, Tensor]

_MODELS, _WIDTH, _SAMPLES = 6, 16, 40  # samples on rank 0; others have more
_STEPS, _RATE = 200, 0.05


class Batch(NamedTuple):
    """Samples, and how often each model has drawn them.

    Attributes:
        x, y: float64 of shape (samples, 1).
        drawn: float64 of shape (models, samples).
    """

    x: Tensor
    y: Tensor
    drawn: Tensor


def example(weight_fn: Any = lambda params, batch: len(batch.x)) -> Report:
    """Trains several models at once, each on a resampling of all ranks' samples."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    initial = fddp.broadcast(init_params(seed=rank))
    batches = [make_batch(r) for r in range(ranks)]
    x, y, drawn = zip(*batches, strict=True)
    whole = Batch(torch.cat(x), torch.cat(y), torch.cat(drawn, dim=1))

    params = alone = initial
    with fddp.GradSync(params) as sync:
        step = sync.value_and_grad(ensemble_loss, weight_fn=weight_fn)
        for _ in range(_STEPS):
            _, grads = step(params, batches[rank])
            params = descend(params, grads)
    for _ in range(_STEPS):
        alone = descend(alone, grad(ensemble_loss)(alone, whole))

    losses = [vmap(loss_fn, in_dims=(0, None, None, 0))(p, *whole) for p in (initial, params)]
    near, far = spread(params, 0.0), spread(params, 6.0)
    return Report(
        title=(
            f"{_MODELS} models at once, {len(whole.x)} samples on {counted(ranks, 'rank')}, "
            f"{_STEPS} steps"
        ),
        rows=[
            ("loss of the models", f"{losses[0].min():.2f} to {losses[0].max():.2f}", "before"),
            ("", f"{losses[1].min():.3f} to {losses[1].max():.3f}", "after"),
            ("predictions deviate by", f"{near:.2f}", "amid the samples"),
            ("", f"{far:.2f}", "far from them"),
        ],
        checks={
            "all models, between ranks": Check(difference_between_ranks(params), 0.0),
            "all models, from one process": Check(difference(params, alone), ROUNDING),
        },
    )


def ensemble_loss(params: Params, batch: Batch) -> Tensor:
    """The sum over models, whose gradients therefore do not mix."""
    return vmap(loss_fn, in_dims=(0, None, None, 0))(params, *batch).sum()


def loss_fn(params: Params, x: Tensor, y: Tensor, drawn: Tensor) -> Tensor:
    """One model's mean squared error, each sample as often as it was drawn."""
    return (drawn * (predict(params, x) - y).square().squeeze(1)).mean()


def predict(params: Params, x: Tensor) -> Tensor:
    """One model's predictions for x of shape (samples, 1)."""
    return torch.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def spread(params: Params, x: float) -> float:
    """Standard deviation of the models' predictions for one input."""
    inputs = torch.full((1, 1), x, dtype=torch.float64)
    return float(vmap(predict, in_dims=(0, None))(params, inputs).std())


def init_params(seed: int) -> Params:
    """Random parameters of all models."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w1": (1, _WIDTH), "b1": (_WIDTH,), "w2": (_WIDTH, 1), "b2": (1,)}
    return {
        name: torch.randn(_MODELS, *shape, generator=generator, dtype=torch.float64) / 2
        for name, shape in shapes.items()
    }


def make_batch(rank: int) -> Batch:
    """A rank's samples of a wave with noise."""
    generator = torch.Generator().manual_seed(50 + rank)
    samples = _SAMPLES + 8 * rank
    x = 4 * torch.rand(samples, 1, generator=generator, dtype=torch.float64) - 2
    noise = torch.randn(samples, 1, generator=generator, dtype=torch.float64)
    drawn = torch.poisson(torch.ones(_MODELS, samples, dtype=torch.float64), generator=generator)
    return Batch(x, torch.sin(2 * x) + 0.1 * noise, drawn)


def descend(params: Params, grads: Params) -> Params:
    """One step of gradient descent."""
    return {name: params[name] - _RATE * grads[name] for name in params}


if __name__ == "__main__":
    sys.exit(main("ensemble"))
