"""A loop with its inputs, and the inputs that loops share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from torch.nn.functional import linear

import fddp

MEANS = "each rank has the same weight, whatever the number of its rows"
GATHERED = "an all_gather takes as many rows from each rank"
LOCAL = "ranks take steps by themselves between averages"
NOISE = "each rank draws random numbers of its own"
ROUNDED = "what ranks send is rounded"
OWN = "an input is another on each rank by design, and no part of a batch"
GROWS = "its objective is a sum, which allow=['growth'] says"
EVEN = (MEANS, GATHERED)
"""Reasons that leave parts of equal size."""


class Loop(NamedTuple):
    """A loop with its inputs.

    Attributes:
        fn: called as `fn(*replicated, *varying)`, with `group=` if it has such a parameter.
        replicated, varying: see `check_replication`.
        unlike: reason why n ranks that have uneven parts of the batch are not one device that has
            all of it; empty if they are.
        alarm: documented reason why `check_replication` refuses the loop although it is correct.
        name: of the loop, if `fn` has several.
        is_forward: True if it uses forward mode, whose levels threads of a process share.
    """

    fn: Callable[..., Any]
    replicated: tuple[Any, ...]
    varying: tuple[Any, ...]
    unlike: str = ""
    alarm: str = ""
    name: str = ""
    is_forward: bool = False

    def __str__(self) -> str:
        return f"{self.fn.__name__}[{self.name}]" if self.name else self.fn.__name__


def init_params(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers": [
            {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
            for shapes in ({"weight": (8, 4), "bias": (8,)}, {"weight": (1, 8), "bias": (1,)})
        ]
    }


def make_batch(seed: int, rows: int = 6) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator)
    return x, x.sum(dim=1, keepdim=True)


def make_batches(rank: int) -> Any:
    return [make_batch(10 * number + rank, rows=6 + 2 * rank) for number in range(2)]


def loss_fn(params: Any, batch: Any) -> Any:
    x, y = batch
    first, last = params["layers"]
    hidden = torch.tanh(linear(x, first["weight"], first["bias"]))
    return (linear(hidden, last["weight"], last["bias"]) - y).square().mean()


def descend(params: Any, grads: Any) -> Any:
    return fddp.tree_map(lambda p, g: p - 0.1 * g, params, grads)


def zeros_like(params: Any) -> Any:
    return fddp.tree_map(torch.zeros_like, params)


def make_tokens(seed: int) -> Any:
    """Sequences of five vectors with labels, of which some are not counted: -100."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 5, 4, generator=generator)
    labels = torch.randint(3, (8, 5), generator=generator)
    lengths = torch.tensor([5, 1, 2, 5, 1, 4, 2, 1])
    return x, labels.masked_fill(torch.arange(5) >= lengths[:, None], -100)


def token_params() -> Any:
    generator = torch.Generator().manual_seed(1)
    return {"weight": torch.randn(4, 3, generator=generator), "bias": torch.zeros(3)}


def jax_params() -> Any:
    return {"weight": jnp.linspace(-1.0, 1.0, 12).reshape(4, 3), "bias": jnp.zeros(3)}


def jax_batches(rank: int) -> Any:
    return [jax.random.normal(jax.random.key(10 * number + rank), (6, 4)) for number in range(2)]


def jax_loss(params: Any, x: Any) -> Any:
    return jnp.square(jnp.tanh(x @ params["weight"] + params["bias"]) - x[:, :3]).mean()


def make_module(seed: int) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def module_with(optimizer: Any, **options: Any) -> tuple[Any, ...]:
    """A module with an optimizer of its parameters."""
    module = make_module(0)
    return module, optimizer(module.parameters(), **{"lr": 0.01} | options)
