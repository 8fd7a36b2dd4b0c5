"""Model-agnostic meta-learning (Finn et al. 2017) on sine waves, by second derivatives.

In the first part each rank has tasks of its own. A task's inner step is `torch.func.grad` within
the loss function, and `sync.value_and_grad` differentiates through it. In the second part each
task's points are spread over all ranks, so that the inner gradient itself is a mean over ranks, and
is differentiated through: `fddp.pmean` within `torch.func.grad`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import grad, vmap

import fddp
from examples.common import ROUNDING, Check, Report, difference, difference_between_ranks, main
from fddp.core.text import counted

Params: TypeAlias = dict[str, Tensor]

_TASKS, _POINTS, _WIDTH = 8, 10, 32  # tasks on each rank, points for each half of a task
_STEPS, _RATE, _INNER_RATE = 40, 0.02, 0.05


class Tasks(NamedTuple):
    """Sine waves, each with points to learn from and others to be judged by.

    Attributes:
        x, y: the first, float64 of shape (tasks, points, 1).
        unseen_x, unseen_y: the others.
    """

    x: Tensor
    y: Tensor
    unseen_x: Tensor
    unseen_y: Tensor


def example(average: Callable[[Any], Any] = fddp.pmean) -> Report:
    """Learns to learn sine waves; each rank has tasks of its own. Then tasks lie across ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    initial = fddp.broadcast(init_params(seed=rank))
    own = make_tasks(waves=rank, points=rank)
    everyones = join([make_tasks(waves=r, points=r) for r in range(ranks)], dim=0)

    params = alone = initial
    with fddp.GradSync(params) as sync:
        step = sync.value_and_grad(meta_loss)
        for _ in range(_STEPS):
            _, grads = step(params, own)
            params = descend(params, grads)
    for _ in range(_STEPS):
        alone = descend(alone, grad(meta_loss)(alone, everyones))

    share = make_tasks(waves=0, points=rank)
    whole = join([make_tasks(waves=0, points=r) for r in range(ranks)], dim=1)

    def spread_loss(params: Params) -> Tensor:
        return fddp.pmean(meta_loss(fddp.sync_on_backward(params), share, average))

    spread, together = grad(spread_loss)(params), grad(meta_loss)(params, whole)
    first_order = grad(lambda p: meta_loss(p, whole, detached))(params)
    before, after = (meta_loss(p, whole).item() for p in (initial, params))
    return Report(
        title=f"MAML, {_TASKS} sine waves on each of {counted(ranks, 'rank')}, {_STEPS} steps",
        rows=[
            ("loss after an inner step", f"{before:.3f}", "before training"),
            ("", f"{after:.3f}", "after training"),
            ("first-order gradient is off by", f"{difference(together, first_order):.1e}", ""),
        ],
        checks={
            "parameters, between ranks": Check(difference_between_ranks(params), 0.0),
            "parameters, from one process": Check(difference(params, alone), ROUNDING),
            "spread tasks, from one process": Check(difference(spread, together), ROUNDING),
        },
    )


def meta_loss(
    params: Params, tasks: Tasks, average: Callable[[Any], Any] = lambda grads: grads
) -> Tensor:
    """The mean loss on unseen points, after one step for each task on its own points.

    Args:
        params: before the step.
        tasks: of this rank.
        average: what becomes of the gradients of all tasks before the step.
    """
    inner = average(vmap(grad(loss_fn), in_dims=(None, 0, 0))(params, tasks.x, tasks.y))
    adapted = {name: params[name] - _INNER_RATE * inner[name] for name in params}
    return vmap(loss_fn)(adapted, tasks.unseen_x, tasks.unseen_y).mean()


def loss_fn(params: Params, x: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of a network with one hidden layer."""
    hidden = torch.tanh(x @ params["w1"] + params["b1"])
    return (hidden @ params["w2"] + params["b2"] - y).square().mean()


def init_params(seed: int) -> Params:
    """Random parameters."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "w1": torch.randn(1, _WIDTH, generator=generator, dtype=torch.float64),
        "b1": torch.randn(_WIDTH, generator=generator, dtype=torch.float64),
        "w2": torch.randn(_WIDTH, 1, generator=generator, dtype=torch.float64) / _WIDTH**0.5,
        "b2": torch.zeros(1, dtype=torch.float64),
    }


def make_tasks(waves: int, points: int) -> Tasks:
    """Some tasks; the same seed of waves with another one of points gives more points of them."""
    generator = torch.Generator().manual_seed(1000 + waves)
    amplitude, phase = torch.rand(2, _TASKS, 1, 1, generator=generator, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2000 + points)
    x = 10 * torch.rand(2, _TASKS, _POINTS, 1, generator=generator, dtype=torch.float64) - 5
    y = (0.5 + 2 * amplitude) * torch.sin(x + math.pi * phase)
    return Tasks(x[0], y[0], x[1], y[1])


def join(parts: list[Tasks], dim: int) -> Tasks:
    """More tasks (dim 0), or more points of each (dim 1)."""
    return Tasks(*(torch.cat(tensors, dim) for tensors in zip(*parts, strict=True)))


def descend(params: Params, grads: Params) -> Params:
    """One step of gradient descent."""
    return {name: params[name] - _RATE * grads[name] for name in params}


def detached(grads: Params) -> Params:
    """The same without derivatives, as first-order MAML has them."""
    return {name: g.detach() for name, g in grads.items()}


if __name__ == "__main__":
    sys.exit(main("maml"))
