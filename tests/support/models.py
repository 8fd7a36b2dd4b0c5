"""Small models in functional style, and the mean gradient computed by one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fddp.tree.pytree import flatten, tree_map

Params = dict[str, Any]


def rand(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that depend on nothing but the arguments."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def mlp(layers: int = 4, width: int = 8, dtype: torch.dtype = torch.float64) -> Params:
    """Parameters of `mlp_loss`: a dict of layers of a weight and a bias each."""
    return {
        f"layer{i}": {
            "weight": rand(width, width, seed=i, dtype=dtype) / width**0.5,
            "bias": rand(width, seed=100 + i, dtype=dtype),
        }
        for i in range(layers)
    }


def mlp_loss(params: Params, x: Tensor) -> Tensor:
    """Mean square of the output."""
    for layer in params.values():
        x = torch.tanh(x @ layer["weight"] + layer["bias"])
    return x.square().mean()


def varied_params() -> dict[str, Tensor]:
    """Parameters of `varied_loss`: of five dtypes, one with sparse gradients ("rows")."""
    return {
        "double": rand(8, 8, seed=1),
        "first": rand(8, 8, seed=2, dtype=torch.float32),
        "half": rand(8, seed=3).half(),
        "last": rand(8, 8, seed=4, dtype=torch.float32),
        "rare": rand(8, seed=5, dtype=torch.float32),
        "short": rand(8, 8, seed=6).bfloat16(),
        "unused": rand(3, seed=7, dtype=torch.float32),
        "rows": rand(5, 8, seed=8, dtype=torch.float32),
    }


def varied_loss(p: dict[str, Tensor], x: Tensor, rank: int, step: int) -> Tensor:
    """Uses a leaf twice, so that its gradient comes late, and others on some ranks only. Ranks may
    be virtual."""

    def layer(h: Tensor) -> Tensor:
        return torch.tanh(h @ p["last"])

    numbers = torch.tensor([rank, step, 4, 4]) % 5
    h = x + torch.nn.functional.embedding(numbers, p["rows"], sparse=True)
    if (rank + step) % 2:
        h = checkpoint(layer, h, use_reentrant=True)
    h = torch.tanh(h @ p["first"]) + p["half"].float()
    h = h @ p["short"].float() @ p["double"].float()
    if rank == step:
        h = h + p["rare"]
    return checkpoint(layer, h, use_reentrant=True).square().mean()


def batch(rank: int, step: int, rows: int = 4, width: int = 8) -> Tensor:
    """One rank's input in one step."""
    return rand(rows, width, seed=1000 * step + rank)


def descend(params: Any, grads: Any, lr: float) -> Any:
    """Return the parameters after a step of gradient descent."""
    return tree_map(lambda p, g: p - lr * g, params, grads)


def mean_gradients(
    loss_fn: Callable[..., Tensor], params: Any, inputs: list[tuple[Any, ...]], weights: list[float]
) -> Any:
    """The weighted mean of each rank's true gradients, by one process and one backward per rank."""
    leaves, treedef = flatten(params)
    total: list[Tensor | None] = [None] * len(leaves)
    for args, weight in zip(inputs, weights, strict=True):
        own = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        loss = loss_fn(treedef.unflatten(own), *args)
        if not loss.requires_grad:
            continue
        loss.backward()
        for i, leaf in enumerate(own):
            if leaf.grad is not None:
                share = leaf.grad * (weight / sum(weights))
                total[i] = share if total[i] is None else total[i] + share
    return treedef.unflatten(total)


def largest_difference(a: Any, b: Any) -> float:
    """Over all leaves; infinite where one is None and the other is not."""
    pairs = list(zip(flatten(a)[0], flatten(b)[0], strict=True))
    if any((x is None) != (y is None) for x, y in pairs):
        return float("inf")
    return max(
        (float((x - y).abs().max()) for x, y in pairs if x is not None and x.numel()), default=0.0
    )


def same_bits(trees: list[Any]) -> bool:
    """Return True if all trees hold the same bits, with None in the same places."""
    first = flatten(trees[0])[0]
    for tree in trees[1:]:
        for x, y in zip(first, flatten(tree)[0], strict=True):
            if (x is None) != (y is None):
                return False
            if x is not None and not torch.equal(x.to_dense(), y.to_dense()):
                return False
    return True
