"""The README's comparison of stock DistributedDataParallel and fddp, on the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fddp
from tests.support.groups import shorten
from tests.support.models import same_bits
from tests.support.on_ranks import on_processes

WIDTH = 3


def linear() -> nn.Linear:
    """The same parameters on every rank."""
    module = nn.Linear(WIDTH, 1)
    with torch.no_grad():
        module.weight.copy_(torch.arange(1.0, WIDTH + 1))
        module.bias.zero_()
    return module


def linear_loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ params["weight"].T + params["bias"]).mean()


def rows(rank: int, count: int = 2) -> Tensor:
    """Rank r has rows of r + 1, so that `linear_loss` has the gradient r + 1 for each weight."""
    return torch.full((count, WIDTH), rank + 1.0)


def params_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def synced(loss_fn: Callable[..., Tensor], params: dict[str, Tensor], *args: Any) -> Any:
    with fddp.GradSync(params) as sync:
        return sync.value_and_grad(loss_fn)(params, *args)[1]


@on_processes(2)
def test_functional_gradients(rank: int, world_size: int) -> None:
    """On a wrapped model each rank keeps its own gradient, without an error."""
    model = DistributedDataParallel(linear())
    autograd = torch.autograd.grad(model(rows(rank)).mean(), list(model.parameters()))[0]

    def wrapped_loss(p: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model.module, p, (rows(rank),)).mean()

    func = torch.func.grad(wrapped_loss)(params_of(model.module))["weight"]
    ours = synced(linear_loss, params_of(linear()), rows(rank))["weight"]
    assert autograd[0, 0] == func[0, 0] == rank + 1.0
    assert ours[0, 0] == 1.5


class Scaled(nn.Module):
    """A layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


@on_processes(2)
def test_jvp_through_a_model_with_buffers(rank: int, world_size: int) -> None:
    module, x = Scaled(), rows(rank)
    model = DistributedDataParallel(module)
    with pytest.raises(RuntimeError, match="mutate a captured Tensor"):
        torch.func.jvp(model, (x,), (x,))

    def slope(p: dict[str, Tensor], x: Tensor) -> Tensor:
        def call(x: Tensor) -> Tensor:
            return torch.func.functional_call(module, p, (x,)).mean()

        return torch.func.jvp(call, (x,), (x,))[1]

    assert synced(slope, params_of(module), x)["layer.weight"][0, 0] == 3.0


class Heads(nn.Module):
    """Two heads, of which each call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([linear(), linear()])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](x).mean()


@on_processes(2)
def test_parameters_unused_on_a_rank(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Heads())
    model(rows(rank), rank).backward()
    assert model.module.heads[rank].weight.grad[0, 0] == rank + 1.0, "left local"
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior"):
        model(rows(rank), rank)

    module = Heads()
    params = params_of(module)

    def loss_fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, p, (x, rank))

    grads = synced(loss_fn, params, rows(rank))
    assert [grads[f"heads.{head}.weight"][0, 0] for head in (0, 1)] == [0.5, 1.0]


def reentrant_twice(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    def layer(x: Tensor) -> Tensor:
        return nn.functional.linear(x, w, b)

    x = x.clone().requires_grad_()
    return sum(checkpoint(layer, x, use_reentrant=True).mean() for _ in range(2))


class Reentrant(nn.Module):
    """One layer, used in two re-entrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        return reentrant_twice(self.layer.weight, self.layer.bias, x)


@on_processes(2)
def test_parameter_in_two_reentrant_checkpoints(rank: int, world_size: int) -> None:
    """The gradients are 2 and 4. DDP averages the first checkpoint's and leaves the second's
    local."""
    model = DistributedDataParallel(Reentrant())
    model(rows(rank)).backward()

    def loss_fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return reentrant_twice(p["weight"], p["bias"], x)

    ours = synced(loss_fn, params_of(linear()), rows(rank))["weight"]
    assert model.module.layer.weight.grad[0, 0] == 2.5 + rank
    assert ours[0, 0] == 3.0


@on_processes(2)
def test_batches_of_unequal_size(rank: int, world_size: int) -> None:
    """One row of 1 and three of 2: the mean over rows is 1.75, the mean of means 1.5."""
    x = rows(rank, count=(1, 3)[rank])
    model = DistributedDataParallel(linear())
    model(x).mean().backward()
    params = params_of(linear())
    with fddp.GradSync(params) as sync:
        step = sync.value_and_grad(linear_loss, weight_fn=lambda p, x: len(x))
        grads = step(params, x)[1]
    assert model.module.weight.grad[0, 0] == 1.5
    assert grads["weight"][0, 0] == 1.75


@on_processes(2)
def test_nan_on_one_rank(rank: int, world_size: int) -> None:
    """DDP passes NaN to every rank without an error."""
    x = rows(rank) * (math.nan if rank == 1 else 1.0)
    model = DistributedDataParallel(linear())
    model(x).mean().backward()
    params = params_of(linear())
    with fddp.GradSync(params) as sync:
        info = sync.value_and_grad(linear_loss, with_info=True)(params, x)[2]
    assert model.module.weight.grad.isnan().all()
    assert not info.all_finite


def broken_loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    if x[0, 0] == 2.0:
        raise ValueError("no labels in this batch")
    return linear_loss(params, x)


@on_processes(2)
def test_exception_on_one_rank(rank: int, world_size: int) -> None:
    params = params_of(linear())
    with fddp.GradSync(params) as sync:
        step = sync.value_and_grad(broken_loss)
        with pytest.raises(ValueError if rank == 1 else fddp.PeerError, match="no labels"):
            step(params, rows(rank))
        assert step(params, rows(0))[1]["weight"][0, 0] == 1.0

    group = dist.new_group()
    model = DistributedDataParallel(linear(), process_group=group)
    shorten(group)
    if rank == 0:  # rank 1 has raised before its backward
        with pytest.raises(RuntimeError, match="Timed out"):
            model(rows(rank)).mean().backward()
    dist.barrier()


@on_processes(2)
def test_fewer_batches_on_a_rank(rank: int, world_size: int) -> None:
    params = params_of(linear())
    rounds = 0
    with fddp.GradSync(params) as sync:
        step = sync.value_and_grad(linear_loss)
        for batch in fddp.uneven([rows(rank)] * (1 + rank), sync):
            grads = step(params, batch)[1]
            rounds += 1
    # In the second round rank 1 is alone: its gradient is the mean.
    assert (rounds, grads["weight"][0, 0]) == (2, 2.0)

    group = dist.new_group()
    model = DistributedDataParallel(linear(), process_group=group)
    model(rows(rank)).mean().backward()
    shorten(group)
    if rank == 1:
        with pytest.raises(RuntimeError, match="Timed out"):
            model(rows(rank)).mean().backward()
    dist.barrier()  # rank 0 stays; if it left, rank 1 would get an error


@on_processes(3)
def test_another_bucket_cap(rank: int, world_size: int) -> None:
    """Gradients have other bits with DDP, and the same with ours."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))

    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(rank))

    def stock(cap_mb: float) -> list[Tensor]:
        module = DistributedDataParallel(model(), bucket_cap_mb=cap_mb)
        for _ in range(2):
            module.zero_grad()
            module(x).square().mean().backward()
        return [p.grad for p in module.parameters() if p.grad is not None]

    def ours(cap_mb: float) -> list[Tensor]:
        apply, params, buffers = fddp.functionalize(model())
        with fddp.GradSync(
            params, bucket_cap_mb=cap_mb, first_bucket_mb=cap_mb, deterministic=True
        ) as sync:
            step = sync.value_and_grad(lambda p: apply(p, buffers, x)[0].square().mean())
            return [*[step(params) for _ in range(2)][-1][1].values()]

    assert not same_bits([stock(0.005), stock(1.0)])
    assert same_bits([ours(0.005), ours(1.0)])
