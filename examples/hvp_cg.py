"""A Newton step without a Hessian: Hessian-vector products of the loss over all ranks' data.

`global_loss` is a plain function of the parameters, whose derivatives of all orders are those of
the mean over ranks. So `torch.func` does the rest: a gradient by reverse mode, and a Hessian-vector
product by forward mode over it. Conjugate gradients then solve for the step, alike on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import grad, jvp
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

import fddp
from examples.common import ROUNDING, Check, Report, difference, difference_between_ranks, main
from fddp.core.text import counted

Params: TypeAlias = dict[str, Tensor]
Loss: TypeAlias = Callable[[Params], Tensor]

_SAMPLES, _FEATURES = 200, 12
_DAMPING, _STEPS, _MOST_PRODUCTS = 1e-3, 5, 30


class Batch(NamedTuple):
    """Samples of two classes.

    Attributes:
        x: float64 of shape (samples, features).
        y: float64 of shape (samples,), 0 or 1.
    """

    x: Tensor
    y: Tensor


class Descent(NamedTuple):
    """Result of Newton's method.

    Attributes:
        params: the parameters.
        losses: before each step, and after the last one.
        products: number of Hessian-vector products.
    """

    params: Params
    losses: list[float]
    products: int


def example(average: Callable[[Tensor], Tensor] = fddp.pmean) -> Report:
    """Logistic regression by Newton's method and conjugate gradients, on all ranks' samples."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own, everyones = make_batch(rank), join([make_batch(r) for r in range(ranks)])

    def global_loss(params: Params) -> Tensor:
        return average(local_loss(fddp.sync_on_backward(params), own))

    def alone_loss(params: Params) -> Tensor:
        return local_loss(params, everyones)

    start = {
        "w": torch.zeros(_FEATURES, dtype=torch.float64),
        "b": torch.zeros((), dtype=torch.float64),
    }
    direction = {"w": torch.linspace(-1.0, 1.0, _FEATURES, dtype=torch.float64), "b": start["b"]}
    product = hessian_product(global_loss, start, direction)
    wanted = hessian_product(alone_loss, start, direction)
    found, alone = newton(global_loss, start), newton(alone_loss, start)
    slope = grad(global_loss)(found.params)
    return Report(
        title=f"Newton-CG, {_SAMPLES} samples on each of {counted(ranks, 'rank')}, {_STEPS} steps",
        rows=[
            ("loss", f"{found.losses[0]:.4f}", "at the start"),
            ("", f"{found.losses[-1]:.4f}", f"after {found.products} products with the Hessian"),
            ("norm of the gradient", f"{dot(slope, slope) ** 0.5:.1e}", "there"),
        ],
        checks={
            "product, from one process": Check(difference(product, wanted), ROUNDING),
            "parameters, from one process": Check(difference(found.params, alone.params), ROUNDING),
            "parameters, between ranks": Check(difference_between_ranks(found.params), 0.0),
        },
    )


def newton(loss: Loss, params: Params) -> Descent:
    """Takes some steps of Newton's method with a damped Hessian."""
    losses, products = [loss(params).item()], 0
    for _ in range(_STEPS):
        step, used = conjugate_gradients(loss, params, grad(loss)(params))
        params = add(params, -1.0, step)
        losses.append(loss(params).item())
        products += used
    return Descent(params, losses, products)


def conjugate_gradients(loss: Loss, params: Params, target: Params) -> tuple[Params, int]:
    """Solves (H + damping) x = target for the Hessian H of a loss; x, and the products it took.

    All numbers are the same on every rank, so that ranks stop in the same round.
    """
    x = fddp.tree_map(torch.zeros_like, target)
    residual = direction = target
    square = first = dot(residual, residual)
    for number in range(_MOST_PRODUCTS):
        if square <= 1e-20 * first:
            return x, number
        product = add(hessian_product(loss, params, direction), _DAMPING, direction)
        length = square / dot(direction, product)
        x, residual = add(x, length, direction), add(residual, -length, product)
        square, before = dot(residual, residual), square
        direction = add(residual, square / before, direction)
    return x, _MOST_PRODUCTS


def hessian_product(loss: Loss, params: Params, direction: Params) -> Params:
    """The derivative of the gradient along a direction: forward mode over reverse mode."""
    product: Params = jvp(grad(loss), (params,), (direction,))[1]
    return product


def local_loss(params: Params, batch: Batch) -> Tensor:
    """Mean cross-entropy of a logistic regression, in nats."""
    return cross_entropy(batch.x @ params["w"] + params["b"], batch.y)


def make_batch(rank: int) -> Batch:
    """A rank's samples, of classes that overlap."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(_SAMPLES, _FEATURES, generator=generator, dtype=torch.float64)
    noise = torch.randn(_SAMPLES, generator=generator, dtype=torch.float64)
    return Batch(x, (x[:, 0] - x[:, 1] + 0.5 + noise > 0).double())


def join(batches: list[Batch]) -> Batch:
    """Several batches as one."""
    return Batch(*(torch.cat(tensors) for tensors in zip(*batches, strict=True)))


def add(tree: Params, factor: float, other: Params) -> Params:
    """`tree + factor * other`."""
    return {name: tree[name] + factor * other[name] for name in tree}


def dot(tree: Params, other: Params) -> float:
    """The scalar product."""
    return sum(float((tree[name] * other[name]).sum()) for name in tree)


if __name__ == "__main__":
    sys.exit(main("hvp_cg"))
