"""Sparse gradients on a device, each scenario compared with one process on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fddp
from fddp.native import extension
from tests.lag.rank import Rank, slow
from tests.support.models import mean_gradients


def _check_table(rank: Rank, loss_fn: Callable[[Any, Tensor], Tensor], *, steps: int) -> None:
    """Compare steps of a table, whose loss function makes its gradient sparse, and a dense leaf."""
    host = {"table": torch.arange(30.0).double().reshape(10, 3), "w": torch.ones(3).double()}
    params = rank.put(host)

    def dense(p: Any, index: Tensor) -> Tensor:
        return (p["table"][index] * p["w"]).square().sum()

    indices = [torch.tensor([1, 1, 4]), torch.tensor([4, 7])]
    with fddp.GradSync(params, sparse=["table"], group=rank.group) as sync:
        for _ in range(steps):
            _, grads = sync.value_and_grad(loss_fn)(params, rank.put(indices[rank.number]))
            grads["table"] = grads["table"].to_dense()
            expected = mean_gradients(dense, host, [(i,) for i in indices], [1.0, 1.0])
            rank.check(grads, expected, 1e-9)


def sparse(rank: Rank) -> None:
    """A sparse leaf beside a dense one."""

    def loss_fn(p: Any, index: Tensor) -> Tensor:
        rows = nn.functional.embedding(index, p["table"], sparse=True)
        return (rows * p["w"]).square().sum()

    _check_table(rank, loss_fn, steps=2)


def sparse_on_streams(rank: Rank) -> None:
    """A sparse gradient that is computed on another stream."""
    side = torch.Stream(device=rank.device)

    def loss_fn(p: Any, index: Tensor) -> Tensor:
        current = torch.accelerator.current_stream(index.device)
        side.wait_stream(current)
        with side:
            rows = slow(nn.functional.embedding(index, p["table"], sparse=True))
        rows.record_stream(current)
        current.wait_stream(side)
        return (rows * p["w"]).square().sum()

    _check_table(rank, loss_fn, steps=3)


def sparse_taken(rank: Rank) -> None:
    """A sparse gradient of another stream, released while the stream of the step still reads it."""
    host = torch.arange(30.0).double().reshape(10, 3)
    leaves = extension.compiled.LeafSet([rank.put(host)])
    index, large = rank.put((torch.tensor([1, 1, 4]), torch.ones(250, 250).double()))
    current, side = torch.accelerator.current_stream(rank.device), torch.Stream(device=rank.device)
    for _ in range(3):
        leaves.arm(extension.compiled.BucketMembers([[0]]), [1], [], lambda _: None)
        side.wait_stream(current)
        with side:
            rows = nn.functional.embedding(index, leaves.leaves[0], sparse=True)
            (rows * 2).sum().backward()
            del rows
        (grad,) = leaves.take(0, keep=False)
        assert grad is not None
        large @ large @ large
        parts = {"indices": grad._indices() * 1, "values": grad._values() * 1}
        del grad
        with side:  # whose free memory it would be
            for _ in range(4):
                torch.full((3, 3), 7.0, device=rank.device, dtype=torch.float64)
        rank.check(
            parts, {"indices": index.cpu()[None], "values": torch.full((3, 3), 2.0).double()}
        )
