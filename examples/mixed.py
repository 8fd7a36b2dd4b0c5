"""One job of two libraries: ranks of even number compute in torch, the others in JAX.

All train the same parameters. What ranks must have in common are paths, shapes and dtypes; each
takes and gets trees of its own library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor

import fddp
from examples.common import ROUNDING, Check, Report, difference, difference_between_ranks, main
from fddp.cli.demo.data import Batch, load, own_batches, whole_batches
from fddp.core.text import counted
from fddp.jax import to_array, to_tensor

_RATE = 0.2
_SIZES = {"hidden": (64, 96), "output": (96, 10)}


class Step(Protocol):
    """The mean gradients over all ranks, for parameters of one library."""

    def __call__(self, params: Any, batch: Any) -> Any: ...


def example(
    weight_of: Callable[[Batch], float] = lambda batch: batch.size, epochs: int = 3
) -> Report:
    """Trains a network on scikit-learn's digits; every other rank computes in JAX."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    in_jax = rank % 2 == 1
    data, held_out = load()
    initial = fddp.broadcast(init_params(seed=rank))
    # What summing in another order changes stays small in float64, so that checks can be strict.
    with jax.enable_x64(True):
        start = fddp.tree_map(to_array, initial) if in_jax else initial
        with fddp.GradSync(start) as sync:
            step = jax_step(sync, weight_of) if in_jax else torch_step(sync, weight_of)
            params = train(start, data, sync, step, epochs)
            own = f"{'JAX' if in_jax else 'torch':5} {sync.plan.shared_digest}"
            transport = sync.transport
        params = fddp.tree_map(to_tensor, params) if in_jax else params
    alone = train_alone(initial, data, ranks, epochs)
    told = [text.split() for text in exchanged(own)]
    logits = logits_fn(params, held_out.images.flatten(1))
    hits = (logits.argmax(1) == held_out.labels).double().mean().item()
    return Report(
        title=f"{data.size} digits, {counted(epochs, 'epoch')} on {counted(ranks, 'rank')}",
        rows=[
            ("libraries", ", ".join(library for library, _ in told), f"over {transport}"),
            ("accuracy on held-out images", f"{hits:.1%}", ""),
        ],
        checks={
            "other plans than rank 0's": Check(sum(plan != told[0][1] for _, plan in told), 0),
            "parameters, between ranks": Check(difference_between_ranks(params), 0.0),
            "parameters, from one process": Check(difference(params, alone), ROUNDING),
        },
    )


def exchanged(text: str) -> list[str]:
    """Every rank's text, all of one length; by rank."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8)
    told = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(told, own)
    return [bytes(other.tolist()).decode() for other in told]


def torch_step(sync: fddp.GradSync, weight_of: Callable[[Batch], float]) -> Step:
    """Gradients by torch, averaged during backward."""
    step = sync.value_and_grad(loss_fn, weight_fn=lambda params, batch: weight_of(batch))
    return lambda params, batch: step(params, batch)[1]


def jax_step(sync: fddp.GradSync, weight_of: Callable[[Batch], float]) -> Step:
    """Gradients by JAX, averaged behind the compiled function."""
    grad = jax.jit(jax.grad(jax_loss_fn))

    def step(params: Any, batch: Any) -> Any:
        if batch is fddp.EXHAUSTED:
            return sync(jax.tree.map(lambda _: None, params), weight=0)
        grads = grad(params, batch.images.flatten(1).numpy(), batch.labels.numpy())
        return sync(grads, weight=weight_of(batch))

    return step


def train(params: Any, data: Batch, sync: fddp.GradSync, step: Step, epochs: int) -> Any:
    """Gradient descent with the mean gradient of all ranks' images."""
    for epoch in range(epochs):
        for batch in fddp.uneven(own_batches(data, epoch, sync.rank, sync.world_size), sync):
            grads = step(params, batch)
            params = fddp.tree_map(lambda p, g: p - _RATE * g, params, grads)
    return params


def train_alone(params: Any, data: Batch, ranks: int, epochs: int) -> Any:
    """The same in one process, in torch, each step on what all ranks have together."""
    grad = torch.func.grad(loss_fn)
    for epoch in range(epochs):
        for batch in whole_batches(data, epoch, ranks):
            params = fddp.tree_map(lambda p, g: p - _RATE * g, params, grad(params, batch))
    return params


def init_params(seed: int) -> dict[str, dict[str, Tensor]]:
    """Random parameters, scaled to each layer's number of inputs (He et al. 2015)."""
    generator = torch.Generator().manual_seed(seed)
    params = {}
    for name, shape in _SIZES.items():
        weight = torch.randn(shape, generator=generator, dtype=torch.float64)
        weight *= (2 / shape[0]) ** 0.5
        params[name] = {"weight": weight, "bias": torch.zeros(shape[1], dtype=torch.float64)}
    return params


def logits_fn(params: Any, images: Tensor) -> Tensor:
    """Scores of shape (n, 10) for images of shape (n, 64), in torch."""
    hidden, output = params["hidden"], params["output"]
    active = F.relu(images @ hidden["weight"] + hidden["bias"])
    logits: Tensor = active @ output["weight"] + output["bias"]
    return logits


def loss_fn(params: Any, batch: Batch) -> Tensor:
    """Mean cross-entropy over a batch, a scalar, in torch."""
    return F.cross_entropy(logits_fn(params, batch.images.flatten(1)), batch.labels)


def jax_loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The same in JAX."""
    hidden, output = params["hidden"], params["output"]
    active = jax.nn.relu(images @ hidden["weight"] + hidden["bias"])
    logits = jax.nn.log_softmax(active @ output["weight"] + output["bias"])
    return -jnp.take_along_axis(logits, labels[:, None], 1).mean()


if __name__ == "__main__":
    sys.exit(main("mixed"))
