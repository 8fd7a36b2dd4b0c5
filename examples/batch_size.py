"""A batch size that follows the gradient noise scale (McCandlish et al. 2018).

Early gradients are large beside their noise, and small batches suffice; later ones are not, and
larger batches save steps. Weights are numbers of samples, so that the noise scale is one, too. All
ranks have the same value, and choose the same batch size without a message.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

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

_SIZE, _SPREAD = 64, 4.0
_STEPS, _RATE = 160, 0.03
_LEAST, _MOST = 16, 1024  # samples of a rank
_TOLERANCE = 0.3  # of the noise scale, which is smoothed while it grows


def next_batch_size(noise: NoiseScale, batch: int, ranks: int) -> int:
    """Batch size of a rank for the next step: the largest power of two with at most as many samples
    on all ranks as the noise scale has, and at most twice the last one."""
    if math.isnan(noise.scale):
        return batch
    wanted = min(noise.scale / ranks, 2.0 * batch, _MOST)
    return int(max(2.0 ** math.floor(math.log2(max(wanted, 1.0))), _LEAST))


def example(weight_fn: Callable[..., float] = lambda params, batch: len(batch[1])) -> Report:
    """Trains with a batch size that is chosen before each step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    params = {"w": torch.full((_SIZE,), 1.0, dtype=torch.float64)}
    noise, batch = NoiseScale(), _LEAST
    curves: dict[str, list[float]] = {"batch": [], "noise scale": [], "known": [], "loss": []}
    with fddp.GradSync(params, noise=True) as sync:
        step = sync.value_and_grad(batch_loss, weight_fn=weight_fn, with_info=True)
        for number in range(_STEPS):
            curves["known"].append(known_noise_scale(params))
            _, grads, info = step(params, make_batch(rank, number, batch))
            noise = next_noise_scale(noise, info.squared_norms["all"], decay=0.7)
            params = fddp.tree_map(lambda p, g: p - _RATE * g, params, grads)
            curves["batch"].append(batch * ranks)
            curves["noise scale"].append(noise.scale)
            curves["loss"].append(0.5 * float(params["w"].square().sum()))
            batch = next_batch_size(noise, batch, ranks)
    state = {"params": params, "noise": torch.tensor(noise), "batch": torch.tensor(batch)}
    ratios = [math.log(a / b) for a, b in zip(curves["noise scale"], curves["known"], strict=True)]
    early = sum(ratios[10:90]) / 80
    return Report(
        title=f"batch sizes from gradient noise, {counted(ranks, 'rank')}, {_STEPS} steps",
        rows=[
            ("samples of a step", f"{_LEAST * ranks} to {batch * ranks}", "of all ranks"),
            ("loss", f"{curves['loss'][0]:.2f} to {curves['loss'][-1]:.2f}", "beyond its minimum"),
        ],
        checks={
            "state, between ranks": Check(difference_between_ranks(state), 0.0),
            "noise scale, from the known one": Check(abs(early), _TOLERANCE),
        },
        curves=curves,
    )


def plot(curves: Mapping[str, Sequence[float]]) -> Figure:
    """Plots batch size and noise scale over steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.semilogy(curves["known"], label="noise scale, known", color="tab:gray")
    axes.semilogy(curves["noise scale"], label="noise scale, estimated", color="tab:orange")
    axes.step(range(len(curves["batch"])), curves["batch"], label="batch", color="tab:blue")
    axes.set(xlabel="step", ylabel="samples of all ranks")
    axes.legend(frameon=False)
    return figure


# The problem: linear regression, whose noise is known


def known_noise_scale(params: Params) -> float:
    """Of a sample `x (x'w - s)`, with normal x and noise s of targets."""
    signal = float(params["w"].square().sum())
    return ((_SIZE + 1) * signal + _SIZE * _SPREAD**2) / signal


def batch_loss(params: Params, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error of a batch."""
    x, y = batch
    return 0.5 * (x @ params["w"] - y).square().mean()


def make_batch(rank: int, number: int, size: int) -> tuple[Tensor, Tensor]:
    """A rank's batch: the true parameters are zero."""
    generator = torch.Generator().manual_seed(10_000 * rank + number)
    x = torch.randn(size, _SIZE, generator=generator, dtype=torch.float64)
    return x, _SPREAD * torch.randn(size, generator=generator, dtype=torch.float64)


if __name__ == "__main__":
    sys.exit(main("batch_size"))
