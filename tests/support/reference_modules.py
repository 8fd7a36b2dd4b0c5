"""Modules with unusual outputs and graphs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.models import rand
from tests.support.parity_models import ROWS, WIDTH, double_layers


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*double_layers(WIDTH, 8, 8))
        self.heads = nn.ModuleList(nn.Linear(8, 2, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.tanh(self.trunk(x))
        return tuple(head(hidden) for head in self.heads)


class ReusedCheckpoint(nn.Module):
    """One segment in three checkpoints, and its layers outside of them, too."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.segment = nn.Sequential(*double_layers(WIDTH, 8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.detach().clone().requires_grad_()
        for _ in range(3):
            hidden = checkpoint(self.segment, hidden, use_reentrant=self.reentrant)
        return hidden + self.segment[2](self.segment[0](x))


class NestedCheckpoint(nn.Module):
    """A re-entrant checkpoint within another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers[1](x))

    def outer(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layers[0](x))
        return self.layers[2](checkpoint(self.inner, hidden, use_reentrant=True))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().clone().requires_grad_()
        return checkpoint(self.outer, x, use_reentrant=True)


class Opaque(nn.Module):
    """Hands its result out in something that is no container; `loss_of` sees it through `read`."""

    def __init__(self, hide: Callable[[Tensor], Any], *, reentrant: bool = False) -> None:
        super().__init__()
        self.hide = hide
        self.layers = nn.Sequential(*double_layers(WIDTH, 8, 3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        if self.reentrant:
            x = x.detach().clone().requires_grad_()
            return self.hide(checkpoint(self.layers, x, use_reentrant=True))
        return self.hide(self.layers(x))


def as_closure(result: Tensor) -> Any:
    return lambda: result


def as_object(result: Tensor) -> Any:
    return SimpleNamespace(inner=SimpleNamespace(result=result))


class OnTheSide(nn.Module):
    """Returns a tensor, and leaves another one in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*double_layers(WIDTH, 8, 8))
        self.out = nn.Linear(8, 3, dtype=torch.float64)
        self.extra = nn.Sequential(*double_layers(WIDTH, 8, 3))

    def forward(self, x: Tensor) -> Tensor:
        result = self.out(torch.tanh(self.trunk(x)))
        self.aside = self.extra(x)
        return result


class Gate(nn.Module):
    """Uses its layers for every second batch only; the others go through as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*double_layers(WIDTH, 8, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().clone().requires_grad_()
        return self.layers(x) if x[0, 0] > 0 else 2 * x


class RankDependentReuse(nn.Module):
    """Uses its layer once or three times, as the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(3 if x[0, 0] > 0 else 1):
            hidden = torch.tanh(self.layer(hidden))
        return hidden


class OrderByBatch(nn.Module):
    """Gradients come in one order or in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 8, dtype=torch.float64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(len(x), 8)
        for layer in self.layers if x[0, 0] > 0 else reversed(self.layers):
            hidden = torch.tanh(hidden + layer(x))
        return hidden


def sometimes(rank: int, step: int) -> Tensor:
    """Ranks of which one's batch starts with a positive number, or none's, or both's, by turns."""
    x = rand(ROWS, WIDTH, seed=1000 * step + rank)
    x[0, 0] = x[0, 0].abs() * (1 if step >> rank & 1 else -1)
    return x
