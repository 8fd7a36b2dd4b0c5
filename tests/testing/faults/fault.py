"""A fault with its source, and what faults share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.func import grad
from torch.nn.functional import cross_entropy, linear

import fddp

MEAN_OF_MEANS = "a mean of means"
DIVIDED_TWICE = "divided twice"
SUMMED = "summed for averaged"
AVERAGED = "averaged for summed"
OWN_COUNT = "a count of this rank"
OWN_STATISTICS = "statistics of this rank's rows"
CLIPPED = "clipped before the mean"
OWN_NORM = "a norm of this rank's part"
NORM_TWICE = "a norm counted twice"
ACCUMULATION = "accumulation divided by another number"
COUNTED_TWICE = "rows counted twice"
BY_RANKS = "a step for each rank"


class Fault(NamedTuple):
    """A wrong step beside the right one.

    Attributes:
        source: public report of the fault, as owner/repository#number. The code is not from there.
        cause: one of the constants of this module.
        wrong, right: called as `fn(*state, *batch)`, with `group=` if they have such a parameter.
            On one rank both are right.
        state: inputs that are equal on all ranks.
        batch: inputs of which each rank gets a part of the rows.
    """

    source: str
    cause: str
    wrong: Callable[..., Any]
    right: Callable[..., Any]
    state: tuple[Any, ...]
    batch: tuple[Any, ...]

    def __str__(self) -> str:
        return self.wrong.__name__


def descend(params: Any, grads: Any, rate: Any = 0.1) -> Any:
    return fddp.tree_map(lambda p, g: p - rate * g, params, grads)


def scaled(tree: Any, factor: Any) -> Any:
    return fddp.tree_map(lambda leaf: leaf * factor, tree)


def added(tree: Any, other: Any) -> Any:
    return fddp.tree_map(torch.add, tree, other)


def norm_of(tree: Any) -> torch.Tensor:
    leaves = fddp.extend.tree_flatten(tree)[0]
    return torch.stack([leaf.square().sum() for leaf in leaves]).sum().sqrt()


def clip(tree: Any, norm: torch.Tensor, most: float = 0.5) -> Any:
    return scaled(tree, (most / norm).clamp(max=1.0))


def token_loss(params: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over the labels that count."""
    logits = linear(x, params["weight"].T, params["bias"]).flatten(0, 1)
    return cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=-100)


def tokens(labels: torch.Tensor) -> torch.Tensor:
    return (labels != -100).sum().float()


def row_loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Sum over rows."""
    return (linear(x, params["weight"].T, params["bias"]) - y).square().sum()


def mean_gradient(params: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Gradient of the mean over the rows of all ranks."""
    rows = fddp.psum(torch.tensor(float(len(x))))
    return fddp.psum(grad(lambda p: row_loss(p, x, y) / rows)(params))


def rows_of_all(x: torch.Tensor) -> torch.Tensor:
    """Rows of all ranks, which may have unequal numbers of them."""
    counts = fddp.all_gather(torch.tensor(len(x)))
    padding = x.new_zeros(int(counts.max()) - len(x), *x.shape[1:])
    parts = fddp.all_gather(torch.cat([x, padding]))
    return torch.cat([part[:count] for part, count in zip(parts, counts.tolist(), strict=True)])


def linear_params(outputs: int = 3) -> Any:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(4, outputs, generator=generator)
    return {"weight": weight, "bias": torch.zeros(outputs)}


def make_rows(outputs: int = 3) -> Any:
    """Eight rows, the later ones larger, so that parts differ."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(8, 4, generator=generator) * torch.linspace(0.5, 2.0, 8)[:, None]
    return x, torch.randn(8, outputs, generator=generator)


def make_tokens() -> Any:
    """Eight sequences of five vectors, with labels of which some are not counted: -100."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 5, 4, generator=generator)
    labels = torch.randint(3, (8, 5), generator=generator)
    lengths = torch.tensor([5, 1, 2, 5, 1, 4, 2, 1])
    return x, labels.masked_fill(torch.arange(5) >= lengths[:, None], -100)
