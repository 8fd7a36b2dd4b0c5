"""Loops around `fddp.DistributedDataParallel`."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import contextlib

import torch
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_

import fddp
from tests.testing.replication.loops.inputs import (
    MEANS,
    OWN,
    ROUNDED,
    Loop,
    make_batch,
    make_module,
    module_with,
)

JOINED = "a rank that has run out makes the collectives of the others, which one process lacks"


def without_sync(module, optimizer, x, y):
    ddp = fddp.DistributedDataParallel(module)
    optimizer.zero_grad()
    parts = list(zip(x.split(len(x) // 2), y.split(len(x) // 2), strict=True))[:2]
    for number, (a, b) in enumerate(parts):
        with contextlib.nullcontext() if number == len(parts) - 1 else ddp.no_sync():
            (mse_loss(ddp(a), b) / len(parts)).backward()
    optimizer.step()


def clipped_gradients(module, optimizer, x, y):
    ddp = fddp.DistributedDataParallel(module)
    optimizer.zero_grad()
    mse_loss(ddp(x), y).backward()
    clip_grad_norm_(module.parameters(), 0.5)
    optimizer.step()


def scheduled(module, optimizer, x, y):
    ddp = fddp.DistributedDataParallel(module)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    for _ in range(2):
        optimizer.zero_grad()
        mse_loss(ddp(x), y).backward()
        optimizer.step()
        scheduler.step()


def scaled_losses(module, optimizer, x, y):
    ddp, scaler = fddp.DistributedDataParallel(module), torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(mse_loss(ddp(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()


def under_autocast(module, optimizer, x, y):
    ddp = fddp.DistributedDataParallel(module)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = ddp(x)
    mse_loss(output.to(y.dtype), y).backward()
    optimizer.step()


def in_a_step(module, optimizer, x, y):
    ddp = fddp.DistributedDataParallel(module)
    optimizer.zero_grad()
    with ddp.in_step():
        mse_loss(ddp(x), y).backward()
    optimizer.step()


def views_of_buckets(module, optimizer, x, y):
    ddp = fddp.DistributedDataParallel(module, gradient_as_bucket_view=True)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        mse_loss(ddp(x), y).backward()
        optimizer.step()


def static_graph(module, optimizer, x, y):
    ddp = fddp.DistributedDataParallel(module, static_graph=True)
    for _ in range(2):
        optimizer.zero_grad()
        mse_loss(ddp(x), y).backward()
        optimizer.step()


def unused_parameters(module, optimizer, x, y):
    ddp = fddp.DistributedDataParallel(module[:1], find_unused_parameters=True)
    optimizer.zero_grad()
    ddp(x).square().mean().backward()
    optimizer.step()


def two_passes(module, optimizer, x, y):
    ddp = fddp.DistributedDataParallel(module)
    optimizer.zero_grad()
    (mse_loss(ddp(x), y) + 0.1 * mse_loss(ddp(2.0 * x), y)).backward()
    optimizer.step()


def averaged_model(module, average, optimizer, x, y):
    ddp = fddp.DistributedDataParallel(module)
    for _ in range(2):
        optimizer.zero_grad()
        mse_loss(ddp(x), y).backward()
        optimizer.step()
        average.update_parameters(ddp.module)


def mean_over_all_rows(module, optimizer, x, y, group):
    ddp = fddp.DistributedDataParallel(module)
    rows = fddp.psum(torch.tensor(float(len(x))))
    optimizer.zero_grad()
    ((ddp(x) - y).square().sum() * (group.size / rows)).backward()
    optimizer.step()


def sums_of_all_rows(module, optimizer, x, y):
    optimizer.zero_grad()
    rows = fddp.psum(torch.tensor(float(len(x))))
    ((module(x) - y).square().sum() / rows).backward()
    for parameter in module.parameters():
        parameter.grad = fddp.psum(parameter.grad)
    optimizer.step()


def halve(parameter):
    parameter.grad.mul_(0.5)


def hooked(module, optimizer, x, y):
    ddp = fddp.DistributedDataParallel(module)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    optimizer.zero_grad()
    mse_loss(ddp(x), y).backward()
    optimizer.step()


def joined(module, optimizer, batches):
    ddp = fddp.DistributedDataParallel(module)
    with ddp.join():
        for x, y in batches:
            optimizer.zero_grad()
            mse_loss(ddp(x), y).backward()
            optimizer.step()


def frozen_layer(module, optimizer, x, y):
    module[0].requires_grad_(False)
    ddp = fddp.DistributedDataParallel(module)
    optimizer.zero_grad()
    mse_loss(ddp(x), y).backward()
    optimizer.step()


def hook_of_two_bytes(module, optimizer, x, y):
    ddp = fddp.DistributedDataParallel(module)
    ddp.register_comm_hook(None, fddp.hooks.bf16_compress)
    optimizer.zero_grad()
    mse_loss(ddp(x), y).backward()
    optimizer.step()


def groups_of_parameters(module, optimizer, x, y):
    ddp = fddp.DistributedDataParallel(module)
    optimizer.zero_grad()
    mse_loss(ddp(x), y).backward()
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.step()


def second_network(module, critic, optimizer, x, y):
    ddp, other = fddp.DistributedDataParallel(module), fddp.DistributedDataParallel(critic)
    optimizer.zero_grad()
    mse_loss(other(x), y).backward()
    with torch.no_grad():
        value = other.module(x)
    mse_loss(ddp(x), value).backward()
    optimizer.step()


def loops() -> list[Loop]:
    """All with new inputs."""
    batch, adam, sgd = make_batch(0, rows=8), torch.optim.AdamW, torch.optim.SGD
    module, optimizer = module_with(sgd, momentum=0.9)
    average = torch.optim.swa_utils.AveragedModel(module)
    critic = make_module(1)
    both = sgd([*module.parameters(), *critic.parameters()], lr=0.1)
    grouped = sgd([{"params": layer.parameters()} for layer in (module[0], module[2])], lr=0.1)
    return [
        *(
            Loop(fn, module_with(sgd), batch, MEANS)
            for fn in (
                *(without_sync, clipped_gradients, scheduled, scaled_losses, in_a_step),
                *(views_of_buckets, static_graph, unused_parameters, two_passes, frozen_layer),
            )
        ),
        *(Loop(fn, module_with(sgd), batch) for fn in (mean_over_all_rows, sums_of_all_rows)),
        *(Loop(fn, module_with(adam), batch, ROUNDED) for fn in (under_autocast,)),
        Loop(hook_of_two_bytes, module_with(sgd), batch, ROUNDED),
        Loop(hooked, module_with(sgd), batch, MEANS),
        Loop(joined, module_with(sgd), (lambda rank: [batch] * (1 + rank),), OWN, alarm=JOINED),
        Loop(averaged_model, (module, average, optimizer), batch, MEANS),
        Loop(second_network, (module, critic, both), batch, MEANS),
        Loop(groups_of_parameters, (module, grouped), batch, MEANS),
    ]
