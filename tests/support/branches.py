"""A model whose graph each rank chooses in each step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.models import batch, mean_gradients, rand

if TYPE_CHECKING:
    import fddp

LEAVES = 6
WIDTH = 4


class Branch(list[tuple[int, str]]):
    """Layers that the loss applies, each with its kind: one rank's graph of one step.

    Kinds are "plain", "checkpoint" and "reentrant" (a re-entrant checkpoint).
    """


def branch_params() -> dict[str, Tensor]:
    """Parameters of `branch_loss`: a matrix for each layer."""
    return {f"w{i}": rand(WIDTH, WIDTH, seed=i) / 2 for i in range(LEAVES)}


def branch_loss(p: dict[str, Tensor], x: Tensor, branch: Branch) -> Tensor:
    """Mean square of the output of the branch's layers."""
    x = x.clone().requires_grad_()
    for leaf, kind in branch:
        x = _layer(p[f"w{leaf}"], x, kind)
    return x.square().mean()


def _layer(w: Tensor, x: Tensor, kind: str) -> Tensor:
    def layer(h: Tensor) -> Tensor:
        return torch.tanh(h @ w) + h

    if kind == "plain":
        return layer(x)
    return checkpoint(layer, x, use_reentrant=kind == "reentrant")


def plain_loss(p: dict[str, Tensor], x: Tensor, branch: Branch) -> Tensor:
    """The same loss without checkpoints."""
    return branch_loss(p, x, Branch((leaf, "plain") for leaf, _ in branch))


def train_branches(
    sync: fddp.GradSync, steps: list[list[Branch]]
) -> Iterator[tuple[Any, fddp.SyncInfo]]:
    """Yield the gradients and the info of each step; `steps` lists the branches of all ranks."""
    step = sync.value_and_grad(branch_loss, with_info=True)
    for number, branches in enumerate(steps):
        x = batch(sync.rank, number, width=WIDTH)
        _, grads, info = step(branch_params(), x, branches[sync.rank])
        yield grads, info


def mean_of_branches(number: int, branches: list[Branch]) -> Any:
    """The mean gradient of a step, from one process."""
    inputs = [(batch(rank, number, width=WIDTH), branch) for rank, branch in enumerate(branches)]
    return mean_gradients(plain_loss, branch_params(), inputs, [1.0] * len(branches))
