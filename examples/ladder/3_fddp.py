"""The same training with fddp: buckets, their order and their proof are values.

`torchrun --nproc-per-node 2 examples/ladder/3_fddp.py`
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import fddp

CAP_MB = 8.0


def make_model(width: int = 1024) -> nn.Module:
    """Return eight linear layers, the same on every rank."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers)


def make_batch(seed: int, width: int = 1024) -> Tensor:
    """Return samples; each rank has its own seed."""
    return torch.randn(16, width, generator=torch.Generator().manual_seed(seed))


def mean_gradients_(model: nn.Module, sync: fddp.GradSync, batch: Tensor) -> None:
    """Put the mean of all ranks' gradients into `.grad`."""

    def loss_fn(params: dict[str, Tensor], batch: Tensor) -> Tensor:
        output: Tensor = functional_call(model, params, (batch,))
        return output.square().mean()

    params = dict(model.named_parameters())
    _, grads = sync.value_and_grad(loss_fn)(params, batch)
    for name, param in params.items():
        param.grad = grads[name]


def main() -> None:
    dist.init_process_group("gloo")
    model, rank = make_model(), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with fddp.GradSync(model, bucket_cap_mb=CAP_MB) as sync:
        for step in range(5):
            mean_gradients_(model, sync, make_batch(seed=10 * step + rank))
            optimizer.step()
        if rank == 0:
            print(sync.plan)
    norm = nn.utils.parameters_to_vector(model.parameters()).norm()
    print(f"rank {rank}: norm of the parameters {norm.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
