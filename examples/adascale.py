"""AdaScale (Johnson et al. 2020): learning rates for any number of ranks, from gradient noise.

A schedule of learning rates is tuned for one rank. On more ranks the mean has less noise, so that a
longer step pays off, by a *gain* from 1, without noise, to the number of ranks, if there is little
else. A step then counts as so many steps of the schedule, which is over earlier.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

import fddp
from examples.common import Check, Report, difference_between_ranks, main
from fddp.core.text import counted
from fddp.numerics import NoiseScale, next_noise_scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Params: TypeAlias = dict[str, Tensor]
Curves: TypeAlias = dict[str, list[float]]

_SIZE, _BATCH, _SPREAD = 200, 2000, 20.0
_STEPS = 150  # of the schedule
_TOLERANCE = 0.2  # of the final loss, which is random


def gain(noise: NoiseScale, ranks: int) -> float:
    """How many steps of one rank a step of all ranks replaces, from the noise of one rank's
    gradient."""
    if math.isnan(noise.scale):
        return 1.0
    signal = max(noise.signal, 0.0)
    return (noise.variance + signal) / (noise.variance / ranks + signal)


def train(step: Callable[..., Any], ranks: int, gain_of: Callable[..., float]) -> tuple[Any, Any]:
    """Trains until the schedule is over. Returns parameters and curves."""
    params, noise, done = {"w": torch.full((_SIZE,), 10.0, dtype=torch.float64)}, NoiseScale(), 0.0
    curves: Curves = {"schedule": [], "loss": [], "gain": []}
    while done < _STEPS:
        grads, norms = step(params, len(curves["loss"]))
        if norms is not None:
            noise = next_noise_scale(noise, norms, decay=0.8)
        factor = gain_of(noise, ranks)
        rate = factor * learning_rate(done)
        params = fddp.tree_map(lambda p, g, rate=rate: p - rate * g, params, grads)
        done += factor
        for name, value in ("schedule", done), ("loss", loss_of(params)), ("gain", factor):
            curves[name].append(value)
    return params, curves


def example(gain_of: Callable[..., float] = gain) -> Report:
    """Trains by a schedule for one rank, on all ranks and on one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with fddp.GradSync({"w": torch.zeros(_SIZE, dtype=torch.float64)}, noise=True) as sync:
        on_ranks = sync.value_and_grad(batch_loss, with_info=True)

        def step(params: Params, number: int) -> Any:
            _, grads, info = on_ranks(params, make_batch(rank, number))
            return grads, info.squared_norms["all"]

        params, curves = train(step, ranks, gain_of)

    def alone(params: Params, number: int) -> Any:
        return torch.func.grad(batch_loss)(params, make_batch(ranks, number)), None

    _, others = train(alone, 1, gain_of)
    ends = [sum(c["loss"][-10:]) / 10 for c in (curves, others)]
    lengths = [len(c["loss"]) for c in (curves, others)]
    return Report(
        title=f"AdaScale, {counted(ranks, 'rank')}",
        rows=[
            ("steps", f"{lengths[0]}", f"{lengths[1]} on one rank"),
            ("loss", f"{ends[0]:.3f}", f"{ends[1]:.3f} on one rank"),
            ("gain", f"{curves['gain'][5]:.2f} to {curves['gain'][-1]:.2f}", "early and late"),
        ],
        checks={
            "parameters, between ranks": Check(difference_between_ranks(params), 0.0),
            "loss, from one rank's": Check(abs(ends[0] / ends[1] - 1), _TOLERANCE),
        },
        curves={**curves, **{f"{name} of one rank": c for name, c in others.items()}},
    )


def plot(curves: Mapping[str, Sequence[float]]) -> Figure:
    """Plots loss and gain over steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.semilogy(curves["loss of one rank"], label="one rank", color="tab:gray")
    left.semilogy(curves["loss"], label="all ranks, AdaScale", color="tab:blue")
    left.set(xlabel="step", ylabel="loss")
    left.legend(frameon=False)
    right.plot(curves["gain"], color="tab:blue")
    right.set(xlabel="step", ylabel="gain")
    return figure


# The problem: linear regression, whose loss beyond its minimum is known


def learning_rate(done: float) -> float:
    """Schedule of one rank, by the number of steps that are done."""
    return 1.6 * (1.0 - done / _STEPS) ** 2


def loss_of(params: Params) -> float:
    """Expected loss beyond its minimum."""
    return 0.5 * float(params["w"].square().sum())


def batch_loss(params: Params, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error of a batch."""
    x, y = batch
    return 0.5 * (x @ params["w"] - y).square().mean()


def make_batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    """A rank's batch: the true parameters are zero."""
    generator = torch.Generator().manual_seed(10_000 * rank + number)
    x = torch.randn(_BATCH, _SIZE, generator=generator, dtype=torch.float64)
    return x, _SPREAD * torch.randn(_BATCH, generator=generator, dtype=torch.float64)


if __name__ == "__main__":
    sys.exit(main("adascale"))
