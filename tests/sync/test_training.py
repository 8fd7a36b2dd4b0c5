"""Fifty steps on several ranks end where one process on the joined batch ends."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.utils.checkpoint import checkpoint

import fddp
from fddp.tree.pytree import flatten
from tests.support.collectives import Issued, record_issued
from tests.support.models import descend, largest_difference, rand, same_bits
from tests.support.ranks import Launch

STEPS = 50
LR = 0.05
ROWS = 3  # of each rank in each step
Params = Any


class Model(NamedTuple):
    """A functional model and its data."""

    params: Callable[[], Params]
    loss: Callable[[Params, Any], Tensor]
    rows: Callable[[int], Any]  # one row of input, by its number in the run


def linear_params() -> Params:
    return {"weight": rand(6, 2, seed=0), "bias": rand(2, seed=1)}


def linear_loss(p: Params, x: Tensor) -> Tensor:
    return (x @ p["weight"] + p["bias"] - x.sum(1, keepdim=True)).square().mean()


def row(number: int, size: int = 6) -> Tensor:
    return rand(size, seed=number)


def mlp_params() -> Params:
    sizes = [6, 16, 16, 16, 1]
    return [
        {"weight": rand(m, n, seed=i) / m**0.5, "bias": torch.zeros(n, dtype=torch.float64)}
        for i, (m, n) in enumerate(pairwise(sizes))
    ]


def through(layers: Params, x: Tensor) -> Tensor:
    for layer in layers[:-1]:
        x = torch.tanh(x @ layer["weight"] + layer["bias"])
    return x @ layers[-1]["weight"] + layers[-1]["bias"]


def mlp_loss(p: Params, x: Tensor) -> Tensor:
    return (through(p, x) - x.sin().sum(1, keepdim=True)).square().mean()


def checkpointed_loss(reentrant: bool) -> Callable[[Params, Tensor], Tensor]:
    def loss(p: Params, x: Tensor) -> Tensor:
        def layer(h: Tensor, number: int) -> Tensor:
            return torch.tanh(h @ p[number]["weight"] + p[number]["bias"])

        # Re-entrant checkpointing needs an input that requires grad.
        h = x.clone().requires_grad_()
        for number in range(3):
            h = checkpoint(layer, h, number, use_reentrant=reentrant)
        # The second layer once more: its leaves get two gradients each.
        h = checkpoint(layer, h, 1, use_reentrant=reentrant)
        out = h @ p[3]["weight"] + p[3]["bias"]
        return (out - x.sin().sum(1, keepdim=True)).square().mean()

    return loss


def dropout_loss(p: Params, x: Tensor) -> Tensor:
    """Dropout seeded by each row, so that it does not matter on which rank the row is."""
    masks = [
        torch.rand(16, generator=torch.Generator().manual_seed(int(r.abs().sum() * 1e6))) > 0.3
        for r in x
    ]
    h = torch.tanh(x @ p[0]["weight"] + p[0]["bias"]) * torch.stack(masks) / 0.7
    return (through(p[1:], h) - x.sum(1, keepdim=True)).square().mean()


def image_params() -> Params:
    return {
        "conv": (rand(4, 2, 3, 3, seed=0) / 4).contiguous(memory_format=torch.channels_last),
        "embedding": rand(7, 4, seed=1),
        "head": {"weight": rand(4, 3, seed=2), "bias": rand(3, seed=3)},
        "unused": rand(5, seed=4),
        "calls": torch.tensor(0),
    }


def image_row(number: int) -> tuple[Tensor, Tensor]:
    return rand(2, 5, 5, seed=number), torch.tensor(number * 5 % 7)


def image_loss(p: Params, batch: tuple[Tensor, Tensor]) -> Tensor:
    image, word = batch
    features = torch.tanh(F.conv2d(image, p["conv"])).mean((2, 3))
    features = features * F.embedding(word, p["embedding"])
    logits = features @ p["head"]["weight"] + p["head"]["bias"]
    return F.cross_entropy(logits, word % 3)


MODELS = {
    "linear": Model(linear_params, linear_loss, row),
    "mlp": Model(mlp_params, mlp_loss, row),
    "checkpointed": Model(mlp_params, checkpointed_loss(False), row),
    "checkpointed, re-entrant": Model(mlp_params, checkpointed_loss(True), row),
    "dropout": Model(mlp_params, dropout_loss, row),
    "convolution and embedding": Model(image_params, image_loss, image_row),
}


def joined(model: Model, numbers: range) -> Any:
    rows = [model.rows(number) for number in numbers]
    if isinstance(rows[0], tuple):
        return tuple(torch.stack(parts) for parts in zip(*rows, strict=True))
    return torch.stack(rows)


def numbers_of(step: int, rank: int, world_size: int) -> range:
    first = (step * world_size + rank) * ROWS
    return range(first, first + ROWS)


def train_on_rank(
    group: Any, name: str, way: str
) -> tuple[Params, list[list[Issued]], list[float]]:
    """Parameters after the run; collectives and global loss of each step."""
    model = MODELS[name]
    params, issued_by_step, losses = model.params(), [], []
    with fddp.GradSync(params, group=group, bucket_cap_mb=0.001, first_bucket_mb=0.0003) as sync:
        issued = record_issued(sync)
        step = sync.value_and_grad(model.loss)
        for number in range(STEPS):
            batch = joined(model, numbers_of(number, sync.rank, sync.world_size))
            if way == "value_and_grad":
                loss, grads = step(params, batch)
            else:
                loss, grads = local(model, params, batch)
                grads = sync.reduce_(grads) if way == "reduce_" else sync(grads)
            params = descend(params, grads, LR)
            losses.append(loss.item())
            issued_by_step.append(list(issued))
            issued.clear()
    return params, issued_by_step, losses


def local(model: Model, params: Params, batch: Any) -> tuple[Tensor, Params]:
    """Value and gradients of one process; None where a leaf is unused or has none."""
    leaves, treedef = flatten(params)
    own = [leaf.detach().requires_grad_(leaf.is_floating_point()) for leaf in leaves]
    loss = model.loss(treedef.unflatten(own), batch)
    loss.backward()
    return loss.detach(), treedef.unflatten([leaf.grad for leaf in own])


def reference(name: str, world_size: int) -> tuple[Params, list[float]]:
    model = MODELS[name]
    params, losses = model.params(), []
    for number in range(STEPS):
        first = numbers_of(number, 0, world_size).start
        batch = joined(model, range(first, first + ROWS * world_size))
        loss, grads = local(model, params, batch)
        params = descend(params, grads, LR)
        losses.append(loss.item())
    return params, losses


def check(runs: list[Any], name: str) -> None:
    params, losses = reference(name, len(runs))
    start = MODELS[name].params()
    assert largest_difference(params, start) > 1e-2, "something was learned"
    assert same_bits([run[0] for run in runs])
    for result, issued, _ in runs:
        assert largest_difference(result, params) < 1e-12
        assert issued == runs[0][1], "the same collectives on all ranks"
    means = [sum(step) / len(runs) for step in zip(*(run[2] for run in runs), strict=True)]
    assert means == pytest.approx(losses, abs=1e-12)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_fifty_steps_match_one_process(launch: Launch, name: str, world_size: int) -> None:
    check(launch(world_size, train_on_rank, name, "value_and_grad"), name)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_other_models_and_world_sizes(name: str, world_size: int) -> None:
    check(fddp.loopback(world_size, train_on_rank, name, "value_and_grad"), name)


@pytest.mark.parametrize("way", ["sync", "reduce_"])
def test_syncing_a_tree_after_backward(way: str) -> None:
    check(
        fddp.loopback(2, train_on_rank, "convolution and embedding", way),
        "convolution and embedding",
    )


def test_the_steady_state_takes_no_repair() -> None:
    """Each step has one all-reduce for each bucket and one for the control word."""
    for name in MODELS:
        _, issued, _ = fddp.loopback(2, train_on_rank, name, "value_and_grad")[0]
        steady = issued[3]
        assert all(step == steady for step in issued[3:])
        assert {operation.kind for operation in steady} == {"all_reduce"}
        assert [operation.dtype for operation in steady].count("float64") == len(steady)
        assert len(set(map(len, issued[3:]))) == 1
        plan = fddp.plan_buckets(MODELS[name].params(), bucket_cap_mb=0.001, first_bucket_mb=0.0003)
        assert abs(len(steady) - 1 - len(plan.buckets)) <= 1, "as many buckets as planned, or so"
