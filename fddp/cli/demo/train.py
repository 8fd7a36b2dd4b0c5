"""Training loop on several ranks, and the same training in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import fddp
from fddp.cli.demo.data import Batch, own_batches, whole_batches
from fddp.cli.demo.model import Params, loss_fn

_LEARNING_RATE = 0.1


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


def _descend(param: Tensor, grad: Tensor) -> Tensor:
    return param - _LEARNING_RATE * grad
