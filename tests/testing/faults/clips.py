"""Gradients that are clipped too early, or by another norm than that of the mean."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
from torch.func import grad

import fddp
from tests.testing.faults.fault import (
    CLIPPED,
    NORM_TWICE,
    OWN_NORM,
    Fault,
    added,
    clip,
    descend,
    linear_params,
    make_rows,
    mean_gradient,
    norm_of,
    row_loss,
    scaled,
)


def clipped_on_each_rank(params, x, y):
    rows = fddp.psum(torch.tensor(float(len(x))))
    grads = grad(lambda p: row_loss(p, x, y) / len(x))(params)
    grads = clip(grads, norm_of(grads))
    return descend(params, fddp.psum(scaled(grads, len(x) / rows)))


def clipped_after_the_mean(params, x, y):
    grads = mean_gradient(params, x, y)
    return descend(params, clip(grads, norm_of(grads)))


def clipped_in_each_micro_batch(params, x, y):
    rows, total = fddp.psum(torch.tensor(float(len(x)))), scaled(params, 0.0)
    for part in zip(x.split(4), y.split(4), strict=True):
        total = added(total, grad(lambda p: row_loss(p, *part) / rows)(params))  # noqa: B023
        total = clip(total, norm_of(total))
    return descend(params, fddp.psum(total))


def clipped_after_all_micro_batches(params, x, y):
    rows, total = fddp.psum(torch.tensor(float(len(x)))), scaled(params, 0.0)
    for part in zip(x.split(4), y.split(4), strict=True):
        total = added(total, grad(lambda p: row_loss(p, *part) / rows)(params))  # noqa: B023
    total = fddp.psum(total)
    return descend(params, clip(total, norm_of(total)))


def norm_of_means_summed(params, x, y):
    grads = mean_gradient(params, x, y)
    norm = fddp.psum(norm_of(grads).square()).sqrt()
    return descend(params, clip(grads, norm))


def shards(tree, x, y, group):
    """This rank's rows of the mean gradient of `tree`, whose rows are a multiple of the ranks."""
    rows = fddp.psum(torch.tensor(float(len(x))))
    grads = grad(lambda p: ((x @ p.T - y) ** 2).sum() / rows)(tree)
    return fddp.reduce_scatter(grads, group, tiled=True)


def clipped_by_the_norm_of_a_shard(weight, x, y, group):
    shard = shards(weight, x, y, group)
    return weight - 0.1 * fddp.all_gather(clip(shard, norm_of(shard)), group, tiled=True)


def clipped_by_the_norm_of_all_shards(weight, x, y, group):
    shard = shards(weight, x, y, group)
    norm = fddp.psum(norm_of(shard).square(), group).sqrt()
    return weight - 0.1 * fddp.all_gather(clip(shard, norm), group, tiled=True)


def faults() -> list[Fault]:
    """All with new inputs."""
    params, rows = (linear_params(),), make_rows()
    return [
        Fault(
            "huggingface/accelerate#641",
            CLIPPED,
            *(clipped_on_each_rank, clipped_after_the_mean, params, rows),
        ),
        Fault(
            "tenstorrent/tt-metal#17568",
            CLIPPED,
            *(clipped_in_each_micro_batch, clipped_after_all_micro_batches, params, rows),
        ),
        Fault(
            "NVIDIA-NeMo/RL#3788",
            NORM_TWICE,
            *(norm_of_means_summed, clipped_after_the_mean, params, rows),
        ),
        Fault(
            "pytorch/torchtitan#766",
            OWN_NORM,
            clipped_by_the_norm_of_a_shard,
            clipped_by_the_norm_of_all_shards,
            (torch.linspace(-1.0, 1.0, 24).reshape(6, 4),),
            make_rows(6),
        ),
    ]
