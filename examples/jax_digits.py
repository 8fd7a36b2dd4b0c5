"""Training in JAX: a jitted loss, an optimizer of optax, gradients averaged by a `GradSync`.

Each rank has its own part of scikit-learn's digits. Ranks differ in the sizes of their batches,
which `weight` tells, and in their number, which `fddp.uneven` covers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # has no types
import torch.distributed as dist

import fddp
from examples.common import ROUNDING, Check, Report, difference, difference_between_ranks, main
from fddp.cli.demo.data import Batch, load, own_batches, whole_batches
from fddp.core.text import counted

#: layers of a weight and a bias each, by name
Params: TypeAlias = dict[str, dict[str, jax.Array]]

_RATE = 0.003
_SIZES = {"hidden": (64, 96), "output": (96, 10)}


class Trained(NamedTuple):
    """Result of a training run.

    Attributes:
        params: the parameters.
        steps: number of steps.
    """

    params: Params
    steps: int


def example(
    weight_of: Callable[[Batch], float] = lambda batch: batch.size, epochs: int = 3
) -> Report:
    """Trains a network on scikit-learn's digits, with JAX on every rank."""
    # What summing in another order changes stays small in float64, so that checks can be strict.
    with jax.enable_x64(True):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        data, held_out = load()
        initial = fddp.broadcast(init_params(seed=rank))
        with fddp.GradSync(initial) as sync:
            params, steps = train(initial, data, sync, weight_of, epochs)
            transport = sync.transport
        alone, _ = train_alone(initial, data, ranks, epochs)
        return Report(
            title=(
                f"{data.size} digits in JAX, {counted(epochs, 'epoch')} on {counted(ranks, 'rank')}"
            ),
            rows=[
                ("steps", f"{steps}", f"over {transport}"),
                ("loss on held-out images", f"{loss_fn(params, *plain(held_out)):.4f}", ""),
                ("accuracy on held-out images", f"{accuracy(params, held_out):.1%}", ""),
            ],
            checks={
                "parameters, between ranks": Check(difference_between_ranks(params), 0.0),
                "parameters, from one process": Check(difference(params, alone), ROUNDING),
            },
        )


def train(
    params: Params,
    data: Batch,
    sync: fddp.GradSync,
    weight_of: Callable[[Batch], float],
    epochs: int,
) -> Trained:
    """Steps with the mean gradient of all ranks' images."""
    value_and_grad = jax.jit(jax.value_and_grad(loss_fn))
    optimizer = optax.adamw(_RATE)
    update, state, steps = jax.jit(optimizer.update), optimizer.init(params), 0
    nothing = jax.tree.map(lambda _: None, params)
    for epoch in range(epochs):
        for batch in fddp.uneven(own_batches(data, epoch, sync.rank, sync.world_size), sync):
            if batch is fddp.EXHAUSTED:
                grads = sync(nothing, weight=0)
            else:
                _, grads = value_and_grad(params, *plain(batch))
                grads = sync(grads, weight=weight_of(batch))
            updates, state = update(grads, state, params)
            params, steps = optax.apply_updates(params, updates), steps + 1
    return Trained(params, steps)


def train_alone(params: Params, data: Batch, ranks: int, epochs: int) -> Trained:
    """The same in one process without fddp, each step on what all ranks have together."""
    grad, optimizer, steps = jax.jit(jax.grad(loss_fn)), optax.adamw(_RATE), 0
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    for epoch in range(epochs):
        for batch in whole_batches(data, epoch, ranks):
            updates, state = update(grad(params, *plain(batch)), state, params)
            params, steps = optax.apply_updates(params, updates), steps + 1
    return Trained(params, steps)


def init_params(seed: int) -> Params:
    """Random parameters, scaled to each layer's number of inputs (He et al. 2015)."""
    rng = np.random.default_rng(seed)
    return {
        name: {
            "weight": jnp.asarray(rng.standard_normal(shape) * (2 / shape[0]) ** 0.5),
            "bias": jnp.zeros(shape[1]),
        }
        for name, shape in _SIZES.items()
    }


def logits_fn(params: Params, images: jax.Array) -> jax.Array:
    """Scores of shape (n, 10) for images of shape (n, 64)."""
    hidden, output = params["hidden"], params["output"]
    active = jax.nn.relu(images @ hidden["weight"] + hidden["bias"])
    return active @ output["weight"] + output["bias"]


def loss_fn(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy over a batch, a scalar."""
    logits = logits_fn(params, images)
    loss: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss


def accuracy(params: Params, data: Batch) -> float:
    """Share of images whose label is found."""
    images, labels = plain(data)
    return float((logits_fn(params, jnp.asarray(images)).argmax(1) == labels).mean())


def plain(batch: Batch) -> tuple[Any, Any]:
    """Images of shape (n, 64) and labels, as arrays of NumPy."""
    return batch.images.flatten(1).numpy(), batch.labels.numpy()


if __name__ == "__main__":
    sys.exit(main("jax_digits"))
