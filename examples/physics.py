"""A physics-informed network (Raissi et al. 2019): a loss of derivatives in the input.

The network u(t, x) is to solve the heat equation u_t = k u_xx on the unit square, with
u(0, x) = sin(pi x) and u(t, 0) = u(t, 1) = 0. The residual takes one derivative by forward mode and
two by reverse mode for each point, under `vmap`. Ranks have points of their own, and not equally
many.
"""

from __future__ import annotations

import math
import sys
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import grad, jvp, vmap

import fddp
from examples.common import ROUNDING, Check, Report, difference, difference_between_ranks, main
from fddp.core.text import counted

Params: TypeAlias = dict[str, Tensor]

_DIFFUSIVITY, _WIDTH, _POINTS = 0.1, 24, 60  # points on rank 0; others have more
_STEPS, _RATE = 80, 0.03


def example(weight_fn: Any = lambda params, points: len(points)) -> Report:
    """Solves the heat equation by a network; each rank has points of its own."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    initial = fddp.broadcast(init_params(seed=rank))
    points = [make_points(r) for r in range(ranks)]

    with fddp.GradSync(initial) as sync:
        step = sync.value_and_grad(physics_loss, weight_fn=weight_fn)
        params = train(initial, lambda params: step(params, points[rank])[1])
    everyones = torch.cat(points)
    alone = train(initial, lambda params: grad(physics_loss)(params, everyones))

    losses = [physics_loss(p, everyones).item() for p in (initial, params)]
    errors = [largest_error(p) for p in (initial, params)]
    return Report(
        title=f"heat equation, {len(everyones)} points on {counted(ranks, 'rank')}, {_STEPS} steps",
        rows=[
            ("loss", f"{losses[0]:.1e} to {losses[1]:.1e}", "mean square residual"),
            ("error of u", f"{errors[0]:.2f} to {errors[1]:.2f}", "at most, on a grid"),
        ],
        checks={
            "parameters, between ranks": Check(difference_between_ranks(params), 0.0),
            "parameters, from one process": Check(difference(params, alone), ROUNDING),
        },
    )


def physics_loss(params: Params, points: Tensor) -> Tensor:
    """Mean squares of what the network leaves of the equation.

    Args:
        params: of the network.
        points: float64 of shape (n, 2): t and x of each.
    """

    def residual(point: Tensor) -> Tensor:
        t, x = point
        u_t: Tensor = jvp(lambda t: u(params, t, x), (t,), (torch.ones_like(t),))[1]
        u_xx: Tensor = grad(grad(lambda x: u(params, t, x)))(x)
        return u_t - _DIFFUSIVITY * u_xx

    return vmap(residual)(points).square().mean()


def u(params: Params, t: Tensor, x: Tensor) -> Tensor:
    """The network at one point, with the values at t = 0, x = 0 and x = 1 built in."""
    inputs = torch.stack([t, x])
    hidden = torch.tanh(inputs @ params["w1"] + params["b1"])
    hidden = torch.tanh(hidden @ params["w2"] + params["b2"])
    return torch.sin(math.pi * x) + t * x * (1 - x) * (hidden @ params["w3"])


def train(params: Params, grads_of: Any) -> Params:
    """Gradient descent with momentum."""
    momentum = fddp.tree_map(torch.zeros_like, params)
    for _ in range(_STEPS):
        momentum = fddp.tree_map(lambda m, g: 0.9 * m + g, momentum, grads_of(params))
        params = fddp.tree_map(lambda p, m: p - _RATE * m, params, momentum)
    return params


def largest_error(params: Params) -> float:
    """On a grid, against the solution exp(-k pi**2 t) sin(pi x)."""
    axis = torch.linspace(0.0, 1.0, 21, dtype=torch.float64)
    t, x = (grid.flatten() for grid in torch.meshgrid(axis, axis, indexing="ij"))
    exact = torch.exp(-_DIFFUSIVITY * math.pi**2 * t) * torch.sin(math.pi * x)
    return float((vmap(u, in_dims=(None, 0, 0))(params, t, x) - exact).abs().max())


def init_params(seed: int) -> Params:
    """Random parameters."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "w1": (2, _WIDTH),
        "b1": (_WIDTH,),
        "w2": (_WIDTH, _WIDTH),
        "b2": (_WIDTH,),
        "w3": (_WIDTH,),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) / shape[0] ** 0.5
        for name, shape in shapes.items()
    }


def make_points(rank: int) -> Tensor:
    """A rank's points of the unit square."""
    generator = torch.Generator().manual_seed(300 + rank)
    return torch.rand(_POINTS + 20 * rank, 2, generator=generator, dtype=torch.float64)


if __name__ == "__main__":
    sys.exit(main("physics"))
