"""Buckets that are reduced during backward, without fddp.

Gradients arrive from the last layer to the first. Those of some layers are packed into one buffer,
a bucket, and its all-reduce runs while backward computes the next ones.

`torchrun --nproc-per-node 2 examples/ladder/2_buckets.py`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

CAP_BYTES = 8 * 2**20


def make_model(width: int = 1024) -> nn.Module:
    """Return eight linear layers, the same on every rank."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers)


def make_batch(seed: int, width: int = 1024) -> Tensor:
    """Return samples; each rank has its own seed."""
    return torch.randn(16, width, generator=torch.Generator().manual_seed(seed))


def plan(params: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Divide parameters into buckets, last first. A bucket that has reached the cap is closed."""
    buckets: list[list[nn.Parameter]] = [[]]
    for param in reversed(params):
        if sum(each.nbytes for each in buckets[-1]) >= CAP_BYTES:
            buckets.append([])
        buckets[-1].append(param)
    return buckets


class Bucket:
    """Parameters whose gradients share one buffer and one all-reduce."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params
        self.buffer = torch.empty(sum(param.numel() for param in params))
        self.missing = len(params)
        self.work: dist.Work | None = None

    def launch(self) -> None:
        """Pack the gradients, and start to sum them."""
        gradients = [param.grad.flatten() for param in self.params if param.grad is not None]
        torch.cat(gradients, out=self.buffer)
        self.work = dist.all_reduce(self.buffer, async_op=True)

    def finish(self) -> None:
        """Wait for the sum, and put the mean into `.grad`."""
        assert self.work is not None
        self.work.wait()
        self.buffer /= dist.get_world_size()
        means = self.buffer.split([param.numel() for param in self.params])
        for param, mean in zip(self.params, means, strict=True):
            assert param.grad is not None
            param.grad.copy_(mean.view_as(param))
        self.missing, self.work = len(self.params), None


class Buckets:
    """All buckets of a model, which a hook on each parameter launches during backward."""

    def __init__(self, model: nn.Module) -> None:
        self._buckets = [Bucket(params) for params in plan(list(model.parameters()))]
        self._launched = 0
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._hook(bucket))
            for bucket in self._buckets
            for param in bucket.params
        ]

    def _hook(self, bucket: Bucket) -> Callable[[Tensor], None]:
        def arrived(param: Tensor) -> None:
            bucket.missing -= 1
            # Ranks match collectives by their order, so a full bucket waits for those before it.
            while self._launched < len(self._buckets):
                if self._buckets[self._launched].missing:
                    break
                self._buckets[self._launched].launch()
                self._launched += 1

        return arrived

    def finish(self) -> None:
        """Wait for all buckets.

        Raises:
            RuntimeError: a parameter has no gradient, so its bucket was not launched. The other
                ranks may wait for it until their timeout.
        """
        if self._launched < len(self._buckets):
            raise RuntimeError(f"bucket {self._launched} has a parameter without a gradient")
        for bucket in self._buckets:
            bucket.finish()
        self._launched = 0


def mean_gradients_(model: nn.Module, buckets: Buckets, batch: Tensor) -> None:
    """Put the mean of all ranks' gradients into `.grad`."""
    model.zero_grad()
    model(batch).square().mean().backward()
    buckets.finish()


def main() -> None:
    dist.init_process_group("gloo")
    model, rank = make_model(), dist.get_rank()
    optimizer, buckets = torch.optim.SGD(model.parameters(), lr=1.0), Buckets(model)
    for step in range(5):
        mean_gradients_(model, buckets, make_batch(seed=10 * step + rank))
        optimizer.step()
    norm = nn.utils.parameters_to_vector(model.parameters()).norm()
    print(f"rank {rank}: norm of the parameters {norm.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
