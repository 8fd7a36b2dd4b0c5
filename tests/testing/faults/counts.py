"""Micro-batches, steps, means and rows that are counted on one rank, or twice."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: B023

from __future__ import annotations

import torch
from torch.func import grad

import fddp
from tests.testing.faults.fault import (
    ACCUMULATION,
    BY_RANKS,
    COUNTED_TWICE,
    MEAN_OF_MEANS,
    Fault,
    added,
    descend,
    linear_params,
    make_rows,
    make_tokens,
    mean_gradient,
    row_loss,
    scaled,
    token_loss,
    tokens,
)

# Micro-batches


def micro_batches(x, y, rows=2):
    return list(zip(x.split(rows), y.split(rows), strict=True))


def divided_by_the_usual_number(params, x, y):
    total, steps = scaled(params, 0.0), 4  # as many as there are, but for the last window
    for a, b in micro_batches(x, y):
        total = added(total, grad(lambda p: row_loss(p, a, b) / len(a) / steps)(params))
    return descend(params, fddp.pmean(total))


def divided_by_rows(params, x, y):
    rows, total = fddp.psum(torch.tensor(float(len(x)))), scaled(params, 0.0)
    for a, b in micro_batches(x, y):
        total = added(total, grad(lambda p: row_loss(p, a, b) / rows)(params))
    return descend(params, fddp.psum(total))


def means_of_micro_batches_added(params, x, labels):
    total = scaled(params, 0.0)
    for a, b in micro_batches(x, labels):
        total = added(total, grad(lambda p: token_loss(p, a, b) / tokens(b))(params))
    return descend(params, fddp.pmean(total))


def mean_of_micro_batches(params, x, labels):
    total, parts = scaled(params, 0.0), micro_batches(x, labels)
    for a, b in parts:
        grads = grad(lambda p: token_loss(p, a, b) / tokens(b) / len(parts))(params)
        total = added(total, grads)
    return descend(params, fddp.pmean(total))


def sums_of_micro_batches(params, x, labels):
    count, total = fddp.psum(tokens(labels)), scaled(params, 0.0)
    for a, b in micro_batches(x, labels):
        total = added(total, grad(lambda p: token_loss(p, a, b) / count)(params))
    return descend(params, fddp.psum(total))


# Steps


def averaged_in_each_micro_batch(params, average, x, y):
    rows, total = fddp.psum(torch.tensor(float(len(x)))), scaled(params, 0.0)
    for a, b in micro_batches(x, y):
        total = added(total, grad(lambda p: row_loss(p, a, b) / rows)(params))
        average = fddp.tree_map(lambda e, p: e.lerp(p, 0.1), average, params)
    return descend(params, fddp.psum(total)), average


def averaged_in_each_step(params, average, x, y):
    params = descend(params, mean_gradient(params, x, y))
    return params, fddp.tree_map(lambda e, p: e.lerp(p, 0.1), average, params)


def schedule_that_counts_ranks(params, number, x, y, group):
    number = number + group.size  # by a wrapper that steps once for each rank
    rate = 0.1 * 0.9 ** float(number)
    return descend(params, mean_gradient(params, x, y), rate), number


def schedule_that_counts_steps(params, number, x, y):
    number = number + 1
    rate = 0.1 * 0.9 ** float(number)
    return descend(params, mean_gradient(params, x, y), rate), number


# Metrics


def errors(params, x, y):
    return (x @ params["weight"] + params["bias"] - y).abs().mean(1)


def mean_of_own_metric(params, x, y):
    metric = fddp.pmean(errors(params, x, y).mean())
    return descend(params, mean_gradient(params, x, y)), metric


def metric_of_all(params, x, y):
    rows = fddp.psum(torch.tensor(float(len(x))))
    metric = fddp.psum(errors(params, x, y).sum()) / rows
    return descend(params, mean_gradient(params, x, y)), metric


def metric_with_padding(params, x, y):
    most = int(fddp.pmax(torch.tensor(len(x))))
    again = torch.arange(most) % len(x)  # the first rows once more
    found = errors(params, x[again], y[again])
    metric = fddp.psum(found.sum()) / fddp.psum(torch.tensor(float(most)))
    return descend(params, mean_gradient(params, x, y)), metric


def faults() -> list[Fault]:
    """All with new inputs."""
    params, rows, words = (linear_params(),), make_rows(), make_tokens()
    return [
        Fault(
            "modelscope/ms-swift#10084",
            ACCUMULATION,
            *(divided_by_the_usual_number, divided_by_rows, params, rows),
        ),
        Fault(
            "NVIDIA-NeMo/RL#3791",
            ACCUMULATION,
            *(means_of_micro_batches_added, sums_of_micro_batches, params, words),
        ),
        Fault(
            "meta-pytorch/torchtune#1917",
            MEAN_OF_MEANS,
            *(mean_of_micro_batches, sums_of_micro_batches, params, words),
        ),
        Fault(
            "SWivid/F5-TTS#631",
            ACCUMULATION,
            averaged_in_each_micro_batch,
            averaged_in_each_step,
            (*params, scaled(*params, 0.0)),
            rows,
        ),
        Fault(
            "huggingface/accelerate#2926",
            BY_RANKS,
            schedule_that_counts_ranks,
            schedule_that_counts_steps,
            (*params, torch.tensor(0)),
            rows,
        ),
        Fault(
            "facebookresearch/fairchem#269",
            MEAN_OF_MEANS,
            *(mean_of_own_metric, metric_of_all, params, rows),
        ),
        Fault(
            "roboflow/rf-detr#1507",
            COUNTED_TWICE,
            *(metric_with_padding, metric_of_all, params, rows),
        ),
    ]
