"""A tree of two floating-point leaves and an integer one, and a step over it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fddp


def params() -> dict[str, Tensor]:
    """Parameters of `loss_fn`; "step" has no gradient."""
    return {"a": torch.ones(3), "b": torch.full((2,), 2.0), "step": torch.tensor(3)}


def loss_fn(p: dict[str, Tensor], *_: Any) -> Tensor:
    """The sum of squares of both floating-point leaves."""
    return (p["a"] ** 2).sum() + (p["b"] ** 2).sum()


def step(sync: fddp.GradSync, fn: Any = loss_fn, *args: Any, **options: Any) -> Any:
    """Return the result of a step of `fn` on `params`."""
    return sync.value_and_grad(fn, **options)(params(), *args)


def grads(**changes: Any) -> dict[str, Any]:
    """Return gradients with some leaves replaced, added, or removed by `...`."""
    tree = {"a": torch.ones(3), "b": torch.ones(2), "step": None, **changes}
    return {key: leaf for key, leaf in tree.items() if leaf is not Ellipsis}
