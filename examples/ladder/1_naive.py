"""Data parallelism in sixty lines: after backward, one all-reduce for each parameter.

`torchrun --nproc-per-node 2 examples/ladder/1_naive.py`
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


def make_model(width: int = 1024) -> nn.Module:
    """Return eight linear layers, the same on every rank."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers)


def make_batch(seed: int, width: int = 1024) -> Tensor:
    """Return samples; each rank has its own seed."""
    return torch.randn(16, width, generator=torch.Generator().manual_seed(seed))


def mean_gradients_(model: nn.Module, batch: Tensor) -> None:
    """Put the mean of all ranks' gradients into `.grad`."""
    model.zero_grad()
    model(batch).square().mean().backward()
    for param in model.parameters():  # the same order on every rank
        assert param.grad is not None
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    model, rank = make_model(), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(5):
        mean_gradients_(model, make_batch(seed=10 * step + rank))
        optimizer.step()
    norm = nn.utils.parameters_to_vector(model.parameters()).norm()
    print(f"rank {rank}: norm of the parameters {norm.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
