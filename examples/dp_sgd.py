"""Differentially private training (Abadi et al. 2016): clipped and noised before the sync.

Each sample's gradient is clipped to a norm, so that no sample can show; each rank adds its share of
the noise to its own sum, so that what leaves a rank is noised already. Shares are independent and
have the variance `(sigma * clip)**2 / ranks`: the sum over ranks has the stated sigma, whatever the
number of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy

import fddp
from examples.common import ROUNDING, Check, Report, difference, difference_between_ranks, main
from fddp.core.text import counted

Params: TypeAlias = dict[str, Tensor]

_SAMPLES, _FEATURES, _HIDDEN, _CLASSES = 48, 6, 16, 3  # samples on rank 0; others have more
_STEPS, _RATE, _CLIP, _SIGMA = 40, 0.5, 0.5, 0.8
_DRAWS = 400
_SAMPLING = 0.02  # an estimate from this many numbers is off by 0.003 as a rule


class Batch(NamedTuple):
    """Samples with their labels.

    Attributes:
        x: float64 of shape (samples, features).
        y: int64 of shape (samples,).
    """

    x: Tensor
    y: Tensor


def example(total: Callable[[Any], Any] = fddp.psum) -> Report:
    """Trains with clipped per-sample gradients and noise; each rank has samples of its own."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    initial, batches = init_params(), [make_batch(r) for r in range(ranks)]
    samples = sum(len(batch.x) for batch in batches)

    params, noises, norms = initial, noise_of(rank), torch.empty(0)
    for _ in range(_STEPS):
        clipped, norms = clipped_sum(params, batches[rank])
        private = total(noised(clipped, noises, ranks))
        params = descend(params, private, samples)

    alone, all_noises = initial, [noise_of(r) for r in range(ranks)]
    whole = Batch(*(torch.cat(tensors) for tensors in zip(*batches, strict=True)))
    for _ in range(_STEPS):
        private, _ = clipped_sum(alone, whole)
        for generator in all_noises:
            private = noised(private, generator, ranks)
        alone = descend(alone, private, samples)

    zeros = fddp.tree_map(torch.zeros_like, initial)
    draws = [total(noised(zeros, noises, ranks)) for _ in range(_DRAWS)]
    drawn = torch.stack([draw["w1"] for draw in draws])
    sigma = float(drawn.std()) / _CLIP
    shown = norms.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=norms.dtype)).tolist()
    return Report(
        title=(
            f"DP-SGD, {counted(samples, 'sample')} on {counted(ranks, 'rank')}, {_STEPS} steps, "
            f"sigma {_SIGMA}"
        ),
        rows=[
            ("norms of samples", " ".join(f"{norm:.2f}" for norm in shown), "10, 50, 90 percent"),
            ("clipped", f"{(norms > _CLIP).double().mean():.0%}", f"longer than {_CLIP}; rank 0"),
            ("sigma of the sum", f"{sigma:.3f}", f"of {drawn.numel()} numbers drawn"),
            ("loss", f"{mean_loss(initial, whole):.3f}", "before"),
            ("", f"{mean_loss(params, whole):.3f}", "after"),
        ],
        checks={
            "parameters, between ranks": Check(difference_between_ranks(params), 0.0),
            "parameters, from one process": Check(difference(params, alone), ROUNDING),
            "sigma, from the stated one": Check(abs(sigma - _SIGMA), _SAMPLING),
        },
    )


def clipped_sum(params: Params, batch: Batch) -> tuple[Params, Tensor]:
    """The sum of per-sample gradients of norm `_CLIP` at most, and the norms before."""
    each = vmap(grad(loss_fn), in_dims=(None, 0, 0))(params, batch.x, batch.y)
    squares = [g.flatten(1).square().sum(1) for g in each.values()]
    norms = torch.stack(squares).sum(0).sqrt()
    factors = (_CLIP / norms).clamp(max=1.0)
    return {name: torch.tensordot(factors, g, dims=1) for name, g in each.items()}, norms


def noised(sums: Params, generator: torch.Generator, ranks: int) -> Params:
    """With one rank's share of the noise."""
    deviation = _SIGMA * _CLIP / ranks**0.5
    return {
        name: leaf + deviation * torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
        for name, leaf in sums.items()
    }


def noise_of(rank: int) -> torch.Generator:
    """A rank's own source of noise. A real run takes secret seeds, from the operating system."""
    return torch.Generator().manual_seed(7000 + rank)


def loss_fn(params: Params, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of one sample, in nats."""
    hidden = torch.tanh(x @ params["w1"] + params["b1"])
    return cross_entropy(hidden @ params["w2"] + params["b2"], y)


def mean_loss(params: Params, batch: Batch) -> float:
    """Over a batch."""
    return vmap(loss_fn, in_dims=(None, 0, 0))(params, batch.x, batch.y).mean().item()


def init_params() -> Params:
    """Random parameters, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"w1": (_FEATURES, _HIDDEN), "w2": (_HIDDEN, _CLASSES)}
    params = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) / shape[0] ** 0.5
        for name, shape in shapes.items()
    }
    biases = {"b1": _HIDDEN, "b2": _CLASSES}
    return params | {name: torch.zeros(n, dtype=torch.float64) for name, n in biases.items()}


def make_batch(rank: int) -> Batch:
    """A rank's samples: classes around centres of their own."""
    generator = torch.Generator().manual_seed(100 + rank)
    samples = _SAMPLES + 16 * rank
    y = torch.randint(_CLASSES, (samples,), generator=generator)
    centres = 1.5 * torch.eye(_CLASSES, _FEATURES, dtype=torch.float64)
    x = torch.randn(samples, _FEATURES, generator=generator, dtype=torch.float64)
    return Batch(x + centres[y], y)


def descend(params: Params, sums: Params, samples: int) -> Params:
    """One step of gradient descent."""
    return {name: params[name] - _RATE / samples * sums[name] for name in params}


if __name__ == "__main__":
    sys.exit(main("dp_sgd"))
