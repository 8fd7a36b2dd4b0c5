"""Comparison of a training run with other ranks, one process, and torch's DDP."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fddp
from fddp.cli.demo.data import Batch
from fddp.cli.demo.model import Params, loss_fn

#: rounds of `step_times`; the first ones are left out, because buckets are rebuilt in them
ROUNDS = 33
_WARM_UP = 5


class StepTimes(NamedTuple):
    """Median times of a loss and its synchronised gradients, on one rank."""

    fddp_s: float
    ddp_s: float


class Network(nn.Module):
    """The model for DDP, with copies of the parameters. Returns the loss."""

    def __init__(self, params: Params) -> None:
        super().__init__()
        self._params: Params = {
            name: {key: nn.Parameter(leaf.clone()) for key, leaf in layer.items()}
            for name, layer in params.items()
        }
        self.owned = nn.ParameterList(
            leaf for layer in self._params.values() for leaf in layer.values()
        )

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss on a batch."""
        return loss_fn(self._params, batch)


def difference(params: Params, other: Params) -> float:
    """Return the largest absolute difference between two trees of the same structure."""
    return float((_flat(params) - _flat(other)).abs().max())


def difference_between_ranks(params: Params) -> float:
    """Return the largest difference of any rank from rank 0. A collective call."""
    flat = _flat(params)
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return float((torch.stack(everyone) - everyone[0]).abs().max())


def step_times(
    params: Params,
    batch: Batch,
    sync: fddp.GradSync,
    bucket_cap_mb: float,
    after_round: Callable[[], None],
) -> StepTimes:
    """Time alternate steps of fddp and DDP with the same buckets. A collective call.

    A step is a loss and its synchronised gradients, without an update.
    """
    step = sync.value_and_grad(loss_fn)
    network = Network(params)
    # An explicit cap applies to the first bucket too, as in `sync`.
    wrapped = DistributedDataParallel(network, bucket_cap_mb=bucket_cap_mb)

    def fddp_step() -> None:
        step(params, batch)

    def ddp_step() -> None:
        network.zero_grad()
        wrapped(batch).backward()

    taken_s: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        taken_s.append((_timed(fddp_step), _timed(ddp_step)))
        after_round()
    ours, theirs = zip(*taken_s[_WARM_UP:], strict=True)
    return StepTimes(statistics.median(ours), statistics.median(theirs))


def _timed(step: Callable[[], None]) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    step()
    return time.perf_counter() - start_s


def _flat(params: Params) -> Tensor:
    return torch.cat([leaf.flatten() for layer in params.values() for leaf in layer.values()])
