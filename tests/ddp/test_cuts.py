"""Passes after a step that reach parameters from tensors which the module has kept."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fddp
from fddp.transport import LoopbackGroup
from tests.support.models import rand

STEPS = 3


class Cut(nn.Module):
    """Two parts. Gradients of the cut between them are passed on by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 1)
        self.penalty = nn.Parameter(torch.ones(3))
        for seed, param in enumerate(self.parameters()):  # ranks are threads of one generator
            param.data = rand(*param.shape, seed=seed, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.before(x)
        self.cut = self.hidden.detach().requires_grad_()
        out: Tensor = self.after(self.cut)
        return out


def backward(module: Cut, out: Tensor) -> None:
    out.square().sum().backward()
    module.hidden.backward(module.cut.grad)
    module.penalty.square().sum().backward()


def grads(module: nn.Module) -> dict[str, Any]:
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()
    }


def wanted(world_size: int, step: int) -> dict[str, Tensor]:
    module = Cut()
    for rank in range(world_size):
        x = rand(2, 4, seed=10 * step + rank, dtype=torch.float32)
        backward(module, module(x))
    return {
        name: p.grad / world_size for name, p in module.named_parameters() if p.grad is not None
    }


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("in_step", [False, True])
def test_gradients_before_a_cut_are_averaged(options: dict[str, Any], in_step: bool) -> None:
    def train(group: LoopbackGroup) -> list[dict[str, Any]]:
        module = Cut()
        ddp = fddp.DistributedDataParallel(module, process_group=group, **options)
        found = []
        for step in range(STEPS):
            ddp.zero_grad()
            x = rand(2, 4, seed=10 * step + group.rank, dtype=torch.float32)
            with ddp.in_step() if in_step else nullcontext():
                backward(module, ddp(x))
            found.append(grads(module))
        return found

    for found in fddp.loopback(2, train):
        for step, own in enumerate(found):
            torch.testing.assert_close(own, wanted(2, step))


class SharedCut(nn.Module):
    """A layer before and after a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.after = nn.Linear(4, 4), nn.Linear(4, 1)
        for seed, param in enumerate(self.parameters()):
            param.data = rand(*param.shape, seed=seed, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.shared(x)
        self.cut = self.hidden.detach().requires_grad_()
        out: Tensor = self.after(self.shared(self.cut))
        return out


def both_passes(module: SharedCut, x: Tensor, call: Any) -> None:
    call(x).square().sum().backward()
    module.hidden.backward(module.cut.grad)


def passes_of_two_forwards(module: SharedCut, x: Tensor, call: Any) -> None:
    """With a cut each, and work of the caller's in between."""
    out, hidden, cut = call(x), module.hidden, module.cut
    twice = (2.0 * out).square().sum()
    out = call(x + 1.0)
    (twice + out.square().sum()).backward()
    hidden.backward(cut.grad, retain_graph=True)
    module.hidden.backward(module.cut.grad)
    hidden.sum().backward()


def passes_for_given_parameters(module: SharedCut, x: Tensor, call: Any) -> None:
    call(x).square().sum().backward()
    module.hidden.backward(module.cut.grad, inputs=[module.shared.weight])


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize(
    "passes", [both_passes, passes_of_two_forwards, passes_for_given_parameters]
)
def test_gradients_of_a_layer_on_both_sides_of_a_cut_are_averaged(
    passes: Any, options: dict[str, Any]
) -> None:
    """The second pass reaches no parameter that the first left out, but nodes of the forward."""

    def batch(step: int, rank: int) -> Tensor:
        return rand(2, 4, seed=10 * step + rank, dtype=torch.float32)

    def train(group: LoopbackGroup) -> list[dict[str, Any]]:
        module = SharedCut()
        ddp = fddp.DistributedDataParallel(
            module, process_group=group, local_gradients="raise", **options
        )
        found = []
        for step in range(STEPS):
            ddp.zero_grad()
            passes(module, batch(step, group.rank), ddp)
            found.append(grads(module))
        return found

    def mean(step: int) -> dict[str, Any]:
        module = SharedCut()
        for rank in range(2):
            passes(module, batch(step, rank), module)
        return {name: p.grad / 2 for name, p in module.named_parameters() if p.grad is not None}

    for found in fddp.loopback(2, train):
        for step, own in enumerate(found):
            own = {name: grad for name, grad in own.items() if grad is not None}
            torch.testing.assert_close(own, mean(step))


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_used_parameters_are_those_of_any_rank() -> None:
    """Rank 1 has no gradient for one that rank 0 uses. Later passes stay local on both."""

    def train(group: LoopbackGroup) -> list[list[float]]:
        module = Cut()
        ddp = fddp.DistributedDataParallel(
            module, process_group=group, find_unused_parameters=True, local_gradients="allow"
        )
        out = ddp(torch.ones(1, 4))
        (out + (module.hidden + module.penalty.sum()).sum() * (1 - group.rank)).sum().backward()
        module(torch.full((1, 4), 1.0 + group.rank)).sum().backward()
        found = [module.after.bias.grad.tolist()]
        ddp.zero_grad()
        backward(module, ddp(torch.ones(1, 4)))
        return [*found, module.after.bias.grad.tolist()]

    (first, own), (second, same) = fddp.loopback(2, train)
    assert first == second == [2.0]
    assert own == same


def test_passes_after_a_step_of_all_parameters_stay_local() -> None:
    def train(group: LoopbackGroup) -> list[float]:
        module = nn.Linear(1, 1, bias=False)
        ddp = fddp.DistributedDataParallel(module, process_group=group, local_gradients="allow")
        ddp(torch.ones(1, 1)).sum().backward()
        if group.rank == 1:
            module(torch.ones(1, 1)).sum().backward()
        return module.weight.grad.flatten().tolist()

    assert fddp.loopback(2, train) == [[1.0], [2.0]]
