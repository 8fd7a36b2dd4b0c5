"""torch's hooks that run a sharded optimizer bucket by bucket during backward."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as StockDDP

import fddp
import tests.support.parity_runs as runs
from tests.support.models import rand
from tests.support.ranks import RankPool

WIDTH, STEPS = 256, 6
SGD = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.001}


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH // 2))


def inputs(rank: int) -> list[torch.Tensor]:
    return [rand(1, WIDTH, seed=2 * step + rank, dtype=torch.float32) for step in range(STEPS)]


def overlapped(wrapped: Any, rank: int, hook: str, shard: bool, **options: Any) -> list[runs.Shot]:
    """Parameters after each backward pass, in which the hook updates them."""
    # Where they are imported, torch warns of its own use of torch.jit.
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = layers()
    model = wrapped(module, bucket_cap_mb=0.3, **options)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.SGD, overlap_with_ddp=True, **SGD
    )
    # They refuse gloo, because with stock DDP some of them hang.
    with mock.patch.object(dist, "get_backend", return_value="nccl"):
        made = getattr(ddp_zero_hook, hook)(allreduce_hook, model, optimizer, shard)
    model.register_comm_hook(None, made)
    shots = []
    for x in inputs(rank):
        optimizer.zero_grad()
        model(x).sum().backward()
        shots.append(parameters(module))
    return shots


def parameters(module: nn.Module) -> runs.Shot:
    return {path: param.detach().clone() for path, param in module.named_parameters()}


def local(rank: int, first: int) -> list[runs.Shot]:
    """Parameters after each step of an optimizer that starts at step `first`."""
    module = layers()
    model = StockDDP(copy.deepcopy(module))
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    shots = [parameters(module)] * first
    for x in inputs(rank)[first:]:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        shots.append(parameters(model.module))
    return shots


def both_hooks(rank: int, world_size: int, shard: bool, options: dict[str, Any]) -> list[str]:
    theirs = overlapped(StockDDP, rank, "hook_with_zero_step", shard, **options)
    # The first update is the third, with a static graph the fourth.
    alone = local(rank, 3 if "static_graph" in options else 2)
    found = [runs.first_difference(theirs, alone, 1e-6)]
    for hook in ("hook_with_zero_step", "hook_with_zero_step_interleaved"):
        ours = overlapped(fddp.DistributedDataParallel, rank, hook, shard, **options)
        found.append(runs.first_difference(theirs, ours))
    return found


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
def test_hook_with_zero_step(ranks: RankPool, options: dict[str, Any], shard: bool) -> None:
    assert ranks.run(2, both_hooks, shard, options) == [[""] * 3] * 2
