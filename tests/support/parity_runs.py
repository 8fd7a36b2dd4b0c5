"""Training runs that are recorded step by step, and compared.

A program runs on the ranks, wrapped by a class, and in one process without a wrapper.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.support.parity_models import Model, loss_of

LEARNING_RATE = 0.02
ROUNDING = 1e-12  # one process adds up in another order
Shot = dict[str, Tensor | None]
# Batches of each step: a rank's own one, or in one process those of all ranks.
Steps = Sequence[Sequence[Tensor]]
_SEEDING = threading.Lock()  # ranks may be threads, which share torch's generator


class Run(NamedTuple):
    """A model in training: wrapped, or alone in one process."""

    model: Any  # what is called, with `no_sync` and `join`
    rank: int | None  # None in one process


# A loop over steps; yields where gradients are recorded.
Loop = Callable[[Run, Steps], Iterator[None]]


class OneProcess(nn.Module):
    """Substitute for the wrapper in one process."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def no_sync(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


def outputs(run: Run, batches: Sequence[Tensor]) -> list[Any]:
    return [run.model(batch) for batch in batches]


def mean_loss(parts: Sequence[Any]) -> Tensor:
    return torch.stack([loss_of(part) for part in parts]).mean()


def descend(run: Run) -> None:
    """A step of SGD, written out because parameters may come and go."""
    with torch.no_grad():
        for parameter in run.model.parameters():
            if parameter.grad is not None:
                parameter -= LEARNING_RATE * parameter.grad


def update(run: Run) -> None:
    """A step of SGD that drops the gradients."""
    descend(run)
    for parameter in run.model.parameters():
        parameter.grad = None


def shot(module: nn.Module) -> Shot:
    """Copies of all gradients, parameters and buffers, by path."""
    tensors: dict[str, Tensor | None] = {}
    for path, parameter in module.named_parameters():
        tensors[f"gradient {path}"] = parameter.grad
        tensors[f"parameter {path}"] = parameter.detach()
    for path, buffer in module.named_buffers():
        tensors[f"buffer {path}"] = buffer
    return {
        path: None if tensor is None else tensor.detach().clone()
        for path, tensor in tensors.items()
    }


def record(
    module: nn.Module,
    wrap: Callable[[nn.Module], Any],
    loop: Loop,
    steps: Steps,
    rank: int | None = None,
) -> list[Shot]:
    """Return a shot of the module after each backward, and one at the end."""
    run = Run(wrap(module), rank)
    shots = [shot(module) for _ in loop(run, steps)]
    return [*shots, shot(module)]


def built(model: Model, seed: int) -> nn.Module:
    """A module whose parameters follow from the seed."""
    with _SEEDING:
        torch.manual_seed(seed)
        return model.build()


def first_difference(theirs: Sequence[Shot], ours: Sequence[Shot], tolerance: float = 0.0) -> str:
    """Return the first difference between two runs, by step and path; empty if there is none.

    Without a tolerance bits, dtypes and strides must be equal.
    """
    if len(theirs) != len(ours):
        return f"{len(theirs)} steps against {len(ours)}"
    for step, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        if a.keys() != b.keys():
            return f"step {step}: paths {sorted(a.keys() ^ b.keys())} are in one of them only"
        for path in a:
            if problem := _difference(a[path], b[path], tolerance):
                return f"step {step}: {path}: {problem}"
    return ""


def _difference(theirs: Tensor | None, ours: Tensor | None, tolerance: float) -> str:
    if theirs is None or ours is None:
        return "" if theirs is ours else f"{theirs} against {ours}"
    if (theirs.layout, theirs.dtype) != (ours.layout, ours.dtype):
        return f"{theirs.layout}, {theirs.dtype} against {ours.layout}, {ours.dtype}"
    strided = theirs.layout == torch.strided
    if tolerance == 0 and strided and theirs.stride() != ours.stride():
        return f"strides {theirs.stride()} against {ours.stride()}"
    a, b = theirs.to_dense(), ours.to_dense()
    if tolerance == 0 and torch.equal(a, b):
        return ""
    gap = float((a - b).abs().max()) if a.numel() else 0.0
    if tolerance and gap <= tolerance:
        return ""
    return f"{a.flatten()[:4].tolist()} against {b.flatten()[:4].tolist()}; apart by {gap}"
