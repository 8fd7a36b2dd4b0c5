"""The training loop of the demo, and the program of each rank around it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import fddp
from fddp.cli.demo.data import Batch, load, own_batches, whole_batches
from fddp.cli.demo.model import Params, init_params, loss_fn, score
from fddp.cli.demo.report import Report
from fddp.cli.progress import Stages

_LEARNING_RATE = 0.1
_FIRST_STEPS = 2  # the buckets are not yet in their final order


class Trained(NamedTuple):
    """Final parameters of a rank, and the measurements of each step."""

    params: Params
    infos: list[fddp.SyncInfo]


def train(
    params: Params,
    data: Batch,
    sync: fddp.GradSync,
    epochs: int,
    after_epoch: Callable[[Params], None],
) -> Trained:
    """Train by gradient descent, each rank on its part of the data.

    Ranks have different numbers of images. In some rounds their batches differ in size, which
    `weight_fn` reports. In the last rounds some ranks have no batch, which `fddp.uneven` handles.

    Args:
        params: initial parameters, the same on all ranks; not written.
        data: all training images, the same on all ranks.
        sync: synchronises gradients of `params`.
        epochs: number of passes over the data.
        after_epoch: called with the parameters so far.
    """
    infos = []
    step = sync.value_and_grad(loss_fn, weight_fn=lambda _, batch: batch.size, with_info=True)
    for epoch in range(epochs):
        batches = own_batches(data, epoch, sync.rank, sync.world_size)
        for batch in fddp.uneven(batches, sync):
            _, grads, info = step(params, batch)
            params = fddp.tree_map(_descend, params, grads)
            infos.append(info)
        after_epoch(params)
    return Trained(params, infos)


def train_alone(
    params: Params, data: Batch, ranks: int, epochs: int, after_epoch: Callable[[], None]
) -> Params:
    """Train in one process without fddp, each step on the union of all ranks' batches."""
    grad_fn = torch.func.grad(loss_fn)
    for epoch in range(epochs):
        for batch in whole_batches(data, epoch, ranks):
            grads = grad_fn(params, batch)
            params = {
                name: {key: _descend(layer[key], grads[name][key]) for key in layer}
                for name, layer in params.items()
            }
        after_epoch()
    return params


class Options(NamedTuple):
    """Options of the command line."""

    ranks: int
    epochs: int
    bucket_cap_mb: float  # also of the first bucket
    train: Callable[..., Trained] = train  # tests pass a faulty one


def run_rank(options: Options) -> Report | None:
    """Train, compare, and return the report on rank 0. A collective call."""
    rank, cap_mb = dist.get_rank(), options.bucket_cap_mb
    data, held_out = load()
    initial = fddp.broadcast(init_params(seed=rank))
    with (
        fddp.GradSync(initial, bucket_cap_mb=cap_mb, first_bucket_mb=cap_mb) as sync,
        Stages(shown=rank == 0) as stages,
    ):
        stages.begin("training on all ranks", options.epochs)

        def after_epoch(params: Params) -> None:
            if rank == 0:
                loss, accuracy = score(params, held_out)
                stages.advance()
                stages.note(f"loss {loss:.4f}, accuracy {accuracy:.1%}")

        params, infos = options.train(initial, data, sync, options.epochs, after_epoch)
        between_ranks = difference_between_ranks(params)
        # No collectives follow, so the other ranks need not wait.
        if rank != 0:
            return None
        stages.begin("training in one process", options.epochs)
        alone = train_alone(initial, data, options.ranks, options.epochs, stages.advance)
        hidden = [info.timeline.hidden_fraction for info in infos[_FIRST_STEPS:] or infos]
        return Report(
            ranks=options.ranks,
            epochs=options.epochs,
            images=data.size,
            steps=len(infos),
            transport=sync.transport,
            score=score(params, held_out),
            between_ranks=between_ranks,
            from_one_process=difference(params, alone),
            bucket_bytes=tuple(bucket.nbytes for bucket in infos[-1].timeline.buckets),
            hidden=statistics.median(hidden),
        )


def difference(params: Params, other: Params) -> float:
    """Return the largest absolute difference between two trees of the same structure."""
    return float((_flat(params) - _flat(other)).abs().max())


def difference_between_ranks(params: Params) -> float:
    """Return the largest difference of any rank from rank 0. A collective call."""
    flat = _flat(params)
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return float((torch.stack(everyone) - everyone[0]).abs().max())


def _descend(param: Tensor, grad: Tensor) -> Tensor:
    return param - _LEARNING_RATE * grad


def _flat(params: Params) -> Tensor:
    return torch.cat([leaf.flatten() for layer in params.values() for leaf in layer.values()])
