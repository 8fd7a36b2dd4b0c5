"""Programs that run with stock DDP and with fddp, and what each of the two does."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

import fddp
from tests.support.ranks import RankPool

CLASSES = (StockDDP, fddp.DistributedDataParallel)

# Names to ignore, set on a submodule


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2, bias=False), nn.Sequential(nn.BatchNorm1d(2)))


def ignored_by_a_part(rank: int, world_size: int) -> list[tuple[bool, bool, bool]]:
    """Per class: ranks share a gradient of the part, one of another part, and a buffer."""
    found = []
    for wrapped in CLASSES:
        torch.manual_seed(rank)
        module = two_layers()
        norm = module[1][0]
        norm.running_mean += rank
        StockDDP._set_params_and_buffers_to_ignore_for_model(module[1], ["0.bias", ".0.bias"])
        StockDDP._set_params_and_buffers_to_ignore_for_model(norm, ["running_mean"])
        model = wrapped(module.eval())
        (model(torch.rand(4, 2)) * (rank + 1)).sum().backward()
        tensors = (norm.bias.grad, module[0].weight.grad, norm.running_mean)
        found.append(tuple(is_shared(tensor) for tensor in tensors))
    return found


def is_shared(tensor: torch.Tensor) -> bool:
    """All ranks have the same values."""
    tensors: list[Any] = [torch.empty_like(tensor) for _ in range(2)]
    torch.distributed.all_gather(tensors, tensor)
    return torch.equal(*tensors)


def test_a_submodule_may_name_what_to_ignore(ranks: RankPool) -> None:
    # Stock reads the names of the wrapped module alone (pytorch#114857).
    stock, ours = (True, True, True), (False, True, False)
    for found in ranks.run(2, ignored_by_a_part):
        assert found == [stock, ours]
