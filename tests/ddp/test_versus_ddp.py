"""The README's comparison of stock DistributedDataParallel and fddp, on the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fddp
from tests.support.groups import shorten
from tests.support.models import same_bits
from tests.support.ranks import RankPool

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


def message(call: Callable[[], object]) -> str:
    """The text of the error that a call ends with; empty if there is none."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


# Functions of `rank` and `world_size` run on two ranks.


def functional(rank: int, world_size: int) -> tuple[float, float, float]:
    model = DistributedDataParallel(linear())
    autograd = torch.autograd.grad(model(rows(rank)).mean(), list(model.parameters()))[0]

    def wrapped_loss(p: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model.module, p, (rows(rank),)).mean()

    func = torch.func.grad(wrapped_loss)(params_of(model.module))["weight"]
    ours = synced(linear_loss, params_of(linear()), rows(rank))["weight"]
    return float(autograd[0, 0]), float(func[0, 0]), float(ours[0, 0])


def test_functional_gradients(ranks: RankPool) -> None:
    # On a wrapped model each rank keeps its own gradient, without an error.
    assert ranks.run(2, functional) == [(1.0, 1.0, 1.5), (2.0, 2.0, 1.5)]


class Scaled(nn.Module):
    """A layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def transforms(rank: int, world_size: int) -> tuple[str, float]:
    module, x = Scaled(), rows(rank)
    model = DistributedDataParallel(module)
    problem = message(lambda: torch.func.jvp(model, (x,), (x,)))

    def slope(p: dict[str, Tensor], x: Tensor) -> Tensor:
        def call(x: Tensor) -> Tensor:
            return torch.func.functional_call(module, p, (x,)).mean()

        return torch.func.jvp(call, (x,), (x,))[1]

    return problem, synced(slope, params_of(module), x)["layer.weight"][0, 0].item()


def test_jvp_through_a_model_with_buffers(ranks: RankPool) -> None:
    for problem, mean in ranks.run(2, transforms):
        assert "mutate a captured Tensor" in problem
        assert mean == 3.0


class Heads(nn.Module):
    """Two heads, of which each call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([linear(), linear()])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](x).mean()


def unused(rank: int, world_size: int) -> tuple[bool, str, list[float | None]]:
    model = DistributedDataParallel(Heads())
    model(rows(rank), rank).backward()
    left_local = model.module.heads[rank].weight.grad[0, 0].item() == rank + 1.0
    problem = message(lambda: model(rows(rank), rank))

    module = Heads()
    params = params_of(module)

    def loss_fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, p, (x, rank))

    grads = synced(loss_fn, params, rows(rank))
    return left_local, problem, [grads[f"heads.{head}.weight"][0, 0].item() for head in (0, 1)]


def test_parameters_unused_on_a_rank(ranks: RankPool) -> None:
    for left_local, problem, means in ranks.run(2, unused):
        assert left_local
        assert "Expected to have finished reduction in the prior iteration" in problem
        assert means == [0.5, 1.0]


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


def repeated(rank: int, world_size: int) -> tuple[float, float]:
    model = DistributedDataParallel(Reentrant())
    model(rows(rank)).backward()

    def loss_fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return reentrant_twice(p["weight"], p["bias"], x)

    ours = synced(loss_fn, params_of(linear()), rows(rank))["weight"]
    return model.module.layer.weight.grad[0, 0].item(), ours[0, 0].item()


def test_parameter_in_two_reentrant_checkpoints(ranks: RankPool) -> None:
    # The gradients are 2 and 4. DDP averages the first checkpoint's and leaves the second's local.
    assert ranks.run(2, repeated) == [(2.5, 3.0), (3.5, 3.0)]


def weighted(rank: int, world_size: int) -> tuple[float, float]:
    x = rows(rank, count=(1, 3)[rank])
    model = DistributedDataParallel(linear())
    model(x).mean().backward()
    params = params_of(linear())
    with fddp.GradSync(params) as sync:
        step = sync.value_and_grad(linear_loss, weight_fn=lambda p, x: len(x))
        grads = step(params, x)[1]
    return model.module.weight.grad[0, 0].item(), grads["weight"][0, 0].item()


def test_batches_of_unequal_size(ranks: RankPool) -> None:
    # One row of 1 and three of 2: the mean over rows is 1.75, the mean of means 1.5.
    assert ranks.run(2, weighted) == [(1.5, 1.75)] * 2


def not_finite(rank: int, world_size: int) -> tuple[bool, bool]:
    x = rows(rank) * (math.nan if rank == 1 else 1.0)
    model = DistributedDataParallel(linear())
    model(x).mean().backward()
    params = params_of(linear())
    with fddp.GradSync(params) as sync:
        info = sync.value_and_grad(linear_loss, with_info=True)(params, x)[2]
    return bool(model.module.weight.grad.isnan().all()), info.all_finite


def test_nan_on_one_rank(ranks: RankPool) -> None:
    # DDP passes NaN to every rank without an error.
    assert ranks.run(2, not_finite) == [(True, False)] * 2


def broken_loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    if x[0, 0] == 2.0:
        raise ValueError("no labels in this batch")
    return linear_loss(params, x)


def failing(rank: int, world_size: int) -> tuple[str, str, float]:
    params = params_of(linear())
    with fddp.GradSync(params) as sync:
        step = sync.value_and_grad(broken_loss)
        try:
            step(params, rows(rank))
        except (fddp.PeerError, ValueError) as error:
            ours = type(error).__name__
        recovered = step(params, rows(0))[1]["weight"][0, 0].item()

    group = dist.new_group()
    model = DistributedDataParallel(linear(), process_group=group)
    shorten(group)
    theirs = ""
    if rank == 0:  # rank 1 has raised before its backward
        theirs = message(lambda: model(rows(rank)).mean().backward())
    dist.barrier()
    return ours, theirs, recovered


def test_exception_on_one_rank(ranks: RankPool) -> None:
    (ours_0, theirs, mean_0), (ours_1, _, mean_1) = ranks.run(2, failing)
    assert (ours_0, ours_1) == ("PeerError", "ValueError")
    assert mean_0 == mean_1 == 1.0
    assert "Timed out" in theirs


def fewer_batches(rank: int, world_size: int) -> tuple[int, float, str]:
    params = params_of(linear())
    rounds = 0
    with fddp.GradSync(params) as sync:
        step = sync.value_and_grad(linear_loss)
        for batch in fddp.uneven([rows(rank)] * (1 + rank), sync):
            grads = step(params, batch)[1]
            rounds += 1

    group = dist.new_group()
    model = DistributedDataParallel(linear(), process_group=group)
    model(rows(rank)).mean().backward()
    shorten(group)
    theirs = message(lambda: model(rows(rank)).mean().backward()) if rank == 1 else ""
    dist.barrier()  # rank 0 stays; if it left, rank 1 would get an error
    return rounds, grads["weight"][0, 0].item(), theirs


def test_fewer_batches_on_a_rank(ranks: RankPool) -> None:
    results = ranks.run(2, fewer_batches)
    # In the second round rank 1 is alone: its gradient is the mean.
    assert [(rounds, mean) for rounds, mean, _ in results] == [(2, 2.0)] * 2
    assert "Timed out" in results[1][2]


def caps(rank: int, world_size: int) -> tuple[bool, bool]:
    """Return whether gradients under two bucket caps have the same bits: torch's, and ours."""

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

    return same_bits([stock(0.005), stock(1.0)]), same_bits([ours(0.005), ours(1.0)])


def test_another_bucket_cap(ranks: RankPool) -> None:
    assert ranks.run(3, caps) == [(False, True)] * 3
