"""A rank of a scenario, and what it is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fddp.tree.pytree import map_leaves
from tests.support.models import batch, largest_difference, mean_gradients, mlp, mlp_loss
from tests.support.ranks import run_fresh

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

SMALL = {"bucket_cap_mb": 0.0005, "first_bucket_mb": 0.0001}
CAP = 0.0005
EXACT = 1e-12


@dataclass(frozen=True)
class Rank:
    """One rank of two, with a group whose backends serve the CPU and the device, and one whose
    backend serves the device alone."""

    number: int
    group: dist.ProcessGroup
    bare: dist.ProcessGroup
    device: torch.device

    @property
    def other(self) -> torch.device:
        """Another device of the type, if there are several."""
        count = torch.accelerator.device_count()
        return torch.device(self.device.type, (self.device.index + 1) % count)

    def put(self, tree: Any) -> Any:
        """The tree on the device."""
        return map_leaves(lambda leaf: leaf.to(self.device), tree)

    def check(self, tree: Any, expected: Any, within: float = EXACT) -> None:
        """Compare a tree of the device, which later allocations may overwrite if it is not safe."""
        self.overwrite_free()
        difference = largest_difference(map_leaves(lambda leaf: leaf.cpu(), tree), expected)
        assert difference < within, difference

    def overwrite_free(self) -> None:
        """Write to the free memory of the current stream."""
        for shape in ((8, 8), (8,), (512,)):
            torch.full(shape, 7.0, device=self.device, dtype=torch.float64)


def placed(tree: Any, first: torch.device, last: torch.device) -> Any:
    """The layers of a network of `mlp`, of which the last two are on another device."""
    places = {name: last if name > "layer1" else first for name in tree}
    return {n: {k: leaf.to(places[n]) for k, leaf in tree[n].items()} for n in tree}


def on_two_ranks(fn: Any, *args: Any) -> list[Any]:
    """Results of a function on two ranks, which are processes of their own."""
    outcomes = run_fresh(2, fn, *args, timeout_s=280)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        assert outcome.exitcode == 0
    return [outcome.result for outcome in outcomes]


def means(
    step: int, params: Any = None, weights: tuple[float, float] = (1.0, 1.0), loss: Any = mlp_loss
) -> Any:
    """Mean gradients of a loss over both ranks' batches."""
    inputs = [(batch(rank, step),) for rank in range(2)]
    return mean_gradients(loss, mlp() if params is None else params, inputs, [*weights])


def module(device: torch.device) -> nn.Module:
    """A network of float64 with a buffer."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8)]
    return nn.Sequential(*layers).double().to(device)


def module_means(step: int, forward: Callable[[nn.Module, Tensor], Tensor]) -> dict[str, Tensor]:
    """Mean gradients of the module's parameters over both ranks' batches."""
    found: dict[str, Tensor] = {}
    for rank in range(2):
        net = module(torch.device("cpu"))
        forward(net, batch(rank, step)).backward()
        for name, p in net.named_parameters():
            if p.grad is not None:
                found[name] = found.get(name, torch.zeros_like(p)) + p.grad / 2
    return found


def mean_square(net: nn.Module, x: Tensor) -> Tensor:
    """Loss of a network."""
    return net(x).square().mean()


def gradients(net: nn.Module) -> dict[str, Tensor]:
    """Gradients by name, of the parameters that have one."""
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


class Slow(torch.autograd.Function):
    """The identity, which takes its stream some milliseconds, also in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _work(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _work(grad)
        return grad * 1


def slow(x: Tensor) -> Tensor:
    """Apply `Slow`."""
    result: Tensor = Slow.apply(x)  # type: ignore[no-untyped-call]  # torch's
    return result


def _work(like: Tensor) -> None:
    large = torch.ones(250, 250, device=like.device, dtype=torch.float64)
    for _ in range(2):
        large = large @ large
