"""Wrapped modules in one another, under hooks, transforms and inference: as with stock DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

import fddp
import tests.support.parity_runs as runs
from tests.support.parity_models import MODELS, ROWS, WIDTH, double_layers, loss_of, rows
from tests.support.ranks import RankPool
from tests.support.twin_runs import (
    DDP,
    MLP,
    STEPS,
    assert_no_difference,
    batches_of,
    both,
    recorded,
    renamed,
    train_with,
)


class Outer(nn.Module):
    """Holds a module that is wrapped itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.first(x)))


def chained(rank: int, world_size: int) -> str:
    """One backward through two wrapped modules."""

    def run(ddp: DDP) -> list[runs.Shot]:
        torch.manual_seed(rank)
        generator = nn.Sequential(*double_layers(WIDTH, 8, WIDTH))
        judge = nn.Sequential(*double_layers(WIDTH, 8, 1))
        wrapped = [ddp(generator), ddp(judge)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.02) for model in wrapped]
        shots = []
        for batch in batches_of(MLP, rank):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(wrapped[1](wrapped[0](batch))).backward()
            shots.append({**runs.shot(generator), **renamed(judge)})
            for optimizer in optimizers:
                optimizer.step()
        return shots

    return both(run)


def nested(rank: int, world_size: int) -> str:
    def run(ddp: DDP) -> list[runs.Shot]:
        torch.manual_seed(rank)
        inner = nn.Sequential(*double_layers(WIDTH, 8, 3))
        outer = Outer(ddp(inner))
        StockDDP._set_params_and_buffers_to_ignore_for_model(
            outer, [f"inner.{name}" for name, _ in outer.inner.named_parameters()]
        )
        model = ddp(outer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        loop = train_with(model, optimizer, batches_of(MLP, rank))
        return [*(runs.shot(outer) for _ in loop), runs.shot(outer)]

    return both(run)


@pytest.mark.parametrize("fn", [chained, nested])
def test_several_wrappers(ranks: RankPool, fn: Any) -> None:
    assert_no_difference(ranks.run(2, fn))


def hooked(rank: int, world_size: int) -> tuple[str, bool]:
    """Hooks change what flows through them, and are called equally often."""
    calls: dict[bool, list[str]] = {}

    def run(ddp: DDP) -> list[runs.Shot]:
        log = calls.setdefault(ddp is StockDDP, [])
        module = runs.built(MLP, rank)
        model = ddp(module)

        def noted(name: str, result: Any = None) -> Any:
            def hook(*args: Any) -> Any:
                log.append(name)
                return result(*args) if result else None

            return hook

        for name, target in (("wrapper", model), ("module", module), ("layer", module[2])):
            target.register_forward_pre_hook(noted(f"{name} before forward"))
            target.register_forward_hook(
                noted(f"{name} after forward", lambda module, args, output: output * 1.5)
            )
            target.register_full_backward_pre_hook(noted(f"{name} before backward"))
            target.register_full_backward_hook(noted(f"{name} after backward"))
        module[0].weight.register_hook(noted("gradient", lambda grad: grad.clamp(-1e-3, 1e-3)))
        module[2].weight.register_post_accumulate_grad_hook(noted("accumulated"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        batches = [batch.requires_grad_() for batch in batches_of(MLP, rank)]
        return [runs.shot(module) for _ in train_with(model, optimizer, batches)]

    difference = both(run)
    return difference, calls[True] == calls[False] and len(calls[True]) > 10 * STEPS


def test_module_and_parameter_hooks(ranks: RankPool) -> None:
    assert ranks.run(2, hooked) == [("", True)] * 2


# Transforms


class Scaled(nn.Module):
    """A layer and a buffer, which stock DDP would write in place in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2, dtype=torch.float64)
        self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.scale


TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x / 2,)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones(ROWS, 2, dtype=x.dtype)),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).square().sum())(x),
    "grad of parameters": lambda f, x: tuple(
        torch.func.grad(lambda p: torch.func.functional_call(f, p, (x,)).square().sum())(
            {name: p.detach() for name, p in f.named_parameters()}
        ).values()
    ),
}


def transformed(rank: int, world_size: int, name: str) -> tuple[float, float]:
    """Return the differences between wrapper and module under a transform, and between a step after
    it and one process."""
    torch.manual_seed(0)
    module = Scaled()
    model = fddp.DistributedDataParallel(module)
    x = rows(rank, 0)
    theirs, ours = (_leaves(TRANSFORMS[name](f, x)) for f in (module, model))
    apart = max(float((a - b).abs().max()) for a, b in zip(theirs, ours, strict=True))

    alone = copy.deepcopy(module)
    torch.stack([loss_of(alone(rows(r, 1))) for r in range(world_size)]).mean().backward()
    loss_of(model(rows(rank, 1))).backward()
    gap = (module.layer.weight.grad - alone.layer.weight.grad).abs().max()
    return apart, float(gap)


def _leaves(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(ranks: RankPool, name: str) -> None:
    for apart, gap in ranks.run(2, transformed, name):
        assert apart < 1e-12
        assert gap < 1e-12


def called_functionally(rank: int, world_size: int) -> str:
    """Call the model by `functional_call`, with the module's own parameters."""

    def backward(model: Any, batch: Tensor) -> None:
        own = dict(model.named_parameters())
        loss_of(torch.func.functional_call(model, own, (batch,))).backward()

    return both(lambda ddp: recorded(ddp, rank, backward))


def test_functional_call(ranks: RankPool) -> None:
    assert_no_difference(ranks.run(2, called_functionally))


class CallsItsWrapper(nn.Module):
    """Calls its own wrapper with other parameters before it uses its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.wrapper: list[nn.Module] = []

    def forward(self, x: Tensor, *, again: bool = True) -> Tensor:
        if again:
            other = {"module.weight": torch.zeros(2)}
            torch.func.functional_call(self.wrapper[0], other, (x,), {"again": False})
        return self.weight * x


def called_within_itself(rank: int, world_size: int) -> list[list[float]]:
    found = []
    for wrapped in (StockDDP, fddp.DistributedDataParallel):
        module = CallsItsWrapper()
        module.wrapper.append(ddp := wrapped(module))
        ddp(torch.full((2,), 1.0 + rank)).sum().backward()
        assert module.weight.grad is not None
        found.append(module.weight.grad.tolist())
    return found


def test_functional_call_within_a_forward_of_the_same_wrapper(ranks: RankPool) -> None:
    for stock, ours in ranks.run(2, called_within_itself):
        assert ours == stock == [1.5, 1.5]


def inferred(rank: int, world_size: int) -> tuple[str, bool]:
    outputs = []

    def run(ddp: DDP) -> list[runs.Shot]:
        model_case = MODELS["conv with batch norm"]
        module = runs.built(model_case, rank)
        model = ddp(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        shots = []
        for step in range(4):
            batch = model_case.batch(rank, step)
            model.eval()
            with torch.inference_mode():
                outputs.append(model(batch))
            with torch.no_grad():
                outputs.append(model(batch))
            model.train()
            shots += [runs.shot(module) for _ in train_with(model, optimizer, [batch])]
        return shots

    difference = both(run)
    stock, ours = outputs[: len(outputs) // 2], outputs[len(outputs) // 2 :]
    return difference, all(
        torch.equal(a, b) and a.is_inference() == b.is_inference()
        for a, b in zip(stock, ours, strict=True)
    )


def test_inference_between_steps(ranks: RankPool) -> None:
    assert ranks.run(2, inferred) == [("", True)] * 2
