"""Training runs that are recorded step by step, and compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.support.parity_models import Model, loss_of

STEPS = 21
Shot = dict[str, Tensor | None]
Batches = Sequence[Tensor]


class Run(NamedTuple):
    """A model in training: wrapped, or alone in one process."""

    model: Any  # what is called, with `no_sync` and `join`
    optimizer: torch.optim.Optimizer


# A loop over batches; yields where gradients are recorded.
Loop = Callable[[Run, Batches], Iterator[None]]


class OneProcess(nn.Module):
    """Substitute for the wrapper in one process."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def no_sync(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


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
    batches: Batches,
) -> list[Shot]:
    """Return a shot of the module after each backward, and one at the end."""
    model = wrap(module)
    run = Run(model, torch.optim.SGD(model.parameters(), lr=0.02))
    shots = [shot(module) for _ in loop(run, batches)]
    return [*shots, shot(module)]


def built(model: Model, seed: int) -> nn.Module:
    """A module whose parameters follow from the seed."""
    torch.manual_seed(seed)
    return model.build()


def joined(batches: Sequence[Batches]) -> list[Tensor]:
    """The batches of all ranks as those of one process."""
    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


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


# Loops


def plain(run: Run, batches: Batches) -> Iterator[None]:
    for batch in batches:
        run.optimizer.zero_grad()
        loss_of(run.model(batch)).backward()
        yield
        run.optimizer.step()


def zeroed_in_place(run: Run, batches: Batches) -> Iterator[None]:
    for batch in batches:
        run.optimizer.zero_grad(set_to_none=False)
        loss_of(run.model(batch)).backward()
        yield
        run.optimizer.step()


def never_zeroed(run: Run, batches: Batches) -> Iterator[None]:
    for batch in batches:
        loss_of(run.model(batch)).backward()
        yield
        run.optimizer.step()


def micro_batches(run: Run, batches: Batches) -> Iterator[None]:
    """Two passes that stay local, then one that is synchronised."""
    for step, batch in enumerate(batches):
        if step % 3 == 2:
            loss_of(run.model(batch)).backward()
            yield
            run.optimizer.step()
            run.optimizer.zero_grad()
        else:
            with run.model.no_sync():
                loss_of(run.model(batch)).backward()


def micro_batches_after_one(run: Run, batches: Batches) -> Iterator[None]:
    """Stock DDP must see a static graph before anything stays local."""
    yield from plain(run, batches[:3])
    run.optimizer.zero_grad()
    yield from micro_batches(run, batches[3:])


def forward_local(run: Run, batches: Batches) -> Iterator[None]:
    """Only the forward is under `no_sync`: DDP does not synchronise."""
    for batch in batches:
        run.optimizer.zero_grad()
        with run.model.no_sync():
            loss = loss_of(run.model(batch))
        loss.backward()
        yield
        run.optimizer.step()


def two_forwards(run: Run, batches: Batches) -> Iterator[None]:
    """Two forwards, then one backward."""
    for batch in batches:
        run.optimizer.zero_grad()
        outputs = [run.model(batch), run.model(batch.flip(0))]
        torch.stack([loss_of(output) for output in outputs]).sum().backward()
        yield
        run.optimizer.step()


def retained(run: Run, batches: Batches) -> Iterator[None]:
    """The graph is used once more, by a call that stays local."""
    for batch in batches:
        run.optimizer.zero_grad()
        loss = loss_of(run.model(batch))
        loss.backward(retain_graph=True)
        used = [p for p in run.model.parameters() if p.requires_grad]
        with run.model.no_sync():
            torch.autograd.grad(loss, used, allow_unused=True)
        yield
        run.optimizer.step()


def evaluated(run: Run, batches: Batches) -> Iterator[None]:
    """Every second batch is only looked at."""
    for step, batch in enumerate(batches):
        run.model.train(step % 2 == 0)
        if step % 2:
            with torch.no_grad():
                run.model(batch)
            continue
        run.optimizer.zero_grad()
        loss_of(run.model(batch)).backward()
        yield
        run.optimizer.step()


def uneven(run: Run, batches: Batches, *, divide_by_initial_world_size: bool) -> Iterator[None]:
    with run.model.join(divide_by_initial_world_size=divide_by_initial_world_size):
        yield from plain(run, batches)


def uneven_micro_batches(run: Run, batches: Batches) -> Iterator[None]:
    with run.model.join():
        yield from micro_batches(run, batches)
