"""Training loops, and changes of modules between steps.

Each loop runs on the ranks, where `steps` has the rank's own batch of a step, and in one process,
where it has those of all ranks, whose losses are averaged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fddp
from tests.support.backward_calls import call_in_backward
from tests.support.models import rand
from tests.support.parity_models import loss_of
from tests.support.parity_runs import Loop, Run, Steps, descend, mean_loss, outputs, update

CHANGE = 3  # the step before which a model is changed


def plain(run: Run, steps: Steps) -> Iterator[None]:
    for batches in steps:
        mean_loss(outputs(run, batches)).backward()
        yield
        update(run)


# Gradients that stay


def zeroed_in_place(run: Run, steps: Steps) -> Iterator[None]:
    for batches in steps:
        run.model.zero_grad(set_to_none=False)
        mean_loss(outputs(run, batches)).backward()
        yield
        descend(run)


def never_zeroed(run: Run, steps: Steps) -> Iterator[None]:
    for batches in steps:
        mean_loss(outputs(run, batches)).backward()
        yield
        descend(run)


def kept(run: Run, steps: Steps) -> Iterator[None]:
    """Gradients that stay: zeroed at first, then not."""
    half = len(steps) // 2
    yield from zeroed_in_place(run, steps[:half])
    yield from never_zeroed(run, steps[half:])


def micro_batches(run: Run, steps: Steps) -> Iterator[None]:
    """Two passes that stay local, then one that is synchronised."""
    for step, batches in enumerate(steps):
        if step % 3 == 2:
            mean_loss(outputs(run, batches)).backward()
            yield
            update(run)
        else:
            with run.model.no_sync():
                mean_loss(outputs(run, batches)).backward()


def micro_batches_after_one(run: Run, steps: Steps) -> Iterator[None]:
    """Stock DDP must see a static graph before anything stays local."""
    yield from plain(run, steps[:3])
    yield from micro_batches(run, steps[3:])


# Forward passes other than one for each backward


def forward_local(run: Run, steps: Steps) -> Iterator[None]:
    """Only the forward is under `no_sync`: DDP does not synchronise."""
    for batches in steps:
        with run.model.no_sync():
            loss = mean_loss(outputs(run, batches))
        loss.backward()
        yield
        update(run)


def two_forwards(run: Run, steps: Steps) -> Iterator[None]:
    """Two forwards, then one backward."""
    for batches in steps:
        first = mean_loss(outputs(run, batches))
        (first + mean_loss(outputs(run, [batch.flip(0) for batch in batches]))).backward()
        yield
        update(run)


def evaluated(run: Run, steps: Steps) -> Iterator[None]:
    """Every second batch is only looked at."""
    for step, batches in enumerate(steps):
        run.model.train(step % 2 == 0)
        if step % 2:
            with torch.no_grad():
                outputs(run, batches)
            continue
        mean_loss(outputs(run, batches)).backward()
        yield
        update(run)


def reused(run: Run, steps: Steps) -> Iterator[None]:
    """Two forwards, then a graph that is used twice, then evaluation between steps."""
    third = len(steps) // 3
    yield from two_forwards(run, steps[:third])
    yield from retained(run, steps[third : 2 * third])
    yield from evaluated(run, steps[2 * third :])


def dropped(run: Run, steps: Steps) -> Iterator[None]:
    """Forwards without a backward, before and after those with one."""
    for batches in steps:
        outputs(run, [batch + 1 for batch in batches])
        kept = outputs(run, batches)
        outputs(run, [batch + 2 for batch in batches])
        mean_loss(kept).backward()
        yield
        update(run)


def probing(run: Run, steps: Steps) -> Iterator[None]:
    """Between steps one rank has a backward of its own, around the wrapper."""
    for batches in steps:
        mean_loss(outputs(run, batches)).backward()
        yield
        update(run)
        if run.rank == 0:
            loss_of(run.model.module(batches[0])).backward()
            run.model.zero_grad()


# Backward passes other than one for each forward


def retained(run: Run, steps: Steps) -> Iterator[None]:
    """The graph is used once more, by a call that stays local."""
    for batches in steps:
        loss = mean_loss(outputs(run, batches))
        loss.backward(retain_graph=True)
        used = [p for p in run.model.parameters() if p.requires_grad]
        with run.model.no_sync():
            torch.autograd.grad(loss, used, allow_unused=True)
        yield
        update(run)


def twice(run: Run, steps: Steps) -> Iterator[None]:
    """Two backwards of one forward; their gradients add up."""
    for batches in steps:
        loss = mean_loss(outputs(run, batches))
        loss.backward(retain_graph=True)
        yield
        loss.backward()
        yield
        update(run)


def twice_afresh(run: Run, steps: Steps) -> Iterator[None]:
    """Two backwards of one forward, each on its own."""
    for batches in steps:
        loss = mean_loss(outputs(run, batches))
        loss.backward(retain_graph=True)
        run.model.zero_grad()
        (3 * loss).backward()
        yield
        update(run)


def head_by_head(run: Run, steps: Steps) -> Iterator[None]:
    """A backward for each output; all use the trunk."""
    for batches in steps:
        for heads in zip(*outputs(run, batches), strict=True):
            mean_loss(heads).backward(retain_graph=True)
        yield
        update(run)


def two_forwards_two_backwards(run: Run, steps: Steps) -> Iterator[None]:
    for batches in steps:
        first = mean_loss(outputs(run, batches))
        second = mean_loss(outputs(run, [batch.flip(0) / 2 for batch in batches]))
        second.backward()
        first.backward()
        yield
        update(run)


def local_first(run: Run, steps: Steps) -> Iterator[None]:
    """The very first backward stays local."""
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        with run.model.no_sync():
            mean_loss(outputs(run, first)).backward()
        mean_loss(outputs(run, second)).backward()
        yield
        update(run)


def backward_local(run: Run, steps: Steps) -> Iterator[None]:
    """A backward under `no_sync`, of a forward that was not, and one outside.

    Stock DDP synchronises the first, because its forward was outside.
    """
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        loss = mean_loss(outputs(run, first))
        with run.model.no_sync():
            loss.backward()
        mean_loss(outputs(run, second)).backward()
        yield
        update(run)


def part_by_part(run: Run, steps: Steps) -> Iterator[None]:
    """Each backward names the parameters to serve."""
    for batches in steps:
        loss = mean_loss(outputs(run, batches))
        parameters = list(run.model.parameters())
        loss.backward(inputs=parameters[:2], retain_graph=True)
        loss.backward(inputs=parameters[2:])
        yield
        update(run)


def penalised(run: Run, steps: Steps) -> Iterator[None]:
    """The loss holds the gradient with respect to the inputs."""
    for batches in steps:
        losses = []
        for batch in batches:
            inputs = batch.clone().requires_grad_()
            output = run.model(inputs)
            (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
            losses.append(loss_of(output) + (slope.norm(dim=1) - 1).square().mean())
        torch.stack(losses).mean().backward()
        yield
        update(run)


def with_graph(run: Run, steps: Steps) -> Iterator[None]:
    """First-order gradients that keep their graph."""
    for batches in steps:
        mean_loss(outputs(run, batches)).backward(create_graph=True)
        yield
        update(run)


def wrapper_in_checkpoint(run: Run, steps: Steps, *, reentrant: bool) -> Iterator[None]:
    """Backward calls the wrapper's forward again."""
    for batches in steps:
        inputs = [batch.clone().requires_grad_() for batch in batches]
        parts = [checkpoint(run.model, x, use_reentrant=reentrant) for x in inputs]
        mean_loss(parts).backward()
        yield
        update(run)


class BrokenError(Exception):
    pass


def _break(*_: Tensor) -> None:
    raise BrokenError


def _breaking_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return call_in_backward(output, _break)


def breaking(on_ranks: Sequence[int], *, at_output: bool = False) -> Loop:
    """One backward ends with an error in its middle, or `at_output`; its step is left out."""

    def loop(run: Run, steps: Steps) -> Iterator[None]:
        yield from plain(run, steps[:CHANGE])
        broken = run.rank is None or run.rank in on_ranks
        hidden = run.model.module[2].weight
        if broken and at_output:
            handle = run.model.module.register_forward_hook(_breaking_output)
        else:
            handle = hidden.register_hook(_break if broken else lambda grad: None)
        with contextlib.suppress(BrokenError, fddp.PeerError):
            mean_loss(outputs(run, steps[CHANGE])).backward()
        handle.remove()
        run.model.zero_grad()
        yield from plain(run, steps[CHANGE + 1 :])

    return loop


# Losses of more than the output


def reading(read: Callable[[Any], Tensor]) -> Loop:
    def loop(run: Run, steps: Steps) -> Iterator[None]:
        for batches in steps:
            mean_loss([read(output) for output in outputs(run, batches)]).backward()
            yield
            update(run)

    return loop


def with_aside(run: Run, steps: Steps) -> Iterator[None]:
    """The loss is of the result and of the attribute."""
    for batches in steps:
        losses = [loss_of(run.model(batch)) + loss_of(run.model.module.aside) for batch in batches]
        torch.stack(losses).mean().backward()
        yield
        update(run)


def aside_only(run: Run, steps: Steps) -> Iterator[None]:
    """The loss is of the attribute alone."""
    for batches in steps:
        asides = [(run.model(batch), run.model.module.aside)[1] for batch in batches]
        mean_loss(asides).backward()
        yield
        update(run)


# Uneven inputs


def joining(inner: Loop, **options: Any) -> Loop:
    """`inner` within `join`."""

    def loop(run: Run, steps: Steps) -> Iterator[None]:
        with run.model.join(**options):
            yield from inner(run, steps)

    return loop


# Modules that change


def changing(change: Callable[[nn.Module], None]) -> Loop:
    """Train, change the module, and train again."""

    def loop(run: Run, steps: Steps) -> Iterator[None]:
        yield from plain(run, steps[:CHANGE])
        change(run.model.module)
        yield from plain(run, steps[CHANGE:])

    return loop


def unfreeze(module: nn.Module) -> None:
    module.requires_grad_(True)


def freeze(module: nn.Module) -> None:
    module[0].requires_grad_(False)
    module[4].bias.requires_grad_(False)


def replace(module: nn.Module) -> None:
    module[2].weight = nn.Parameter(module[2].weight.detach() / 2)


def replace_frozen(module: nn.Module) -> None:
    module[0].weight = nn.Parameter(module[0].weight.detach() / 2)


def tie(module: nn.Module) -> None:
    module[4].weight = module[2].weight


def append(module: nn.Module) -> None:
    layer = nn.Linear(3, 3, dtype=torch.float64)
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data = rand(*parameter.shape, seed=seed) / 2
    module.append(layer)


def remove(module: nn.Module) -> None:
    module[2] = nn.Identity()


def assign(module: nn.Module) -> None:
    state = {path: tensor / 2 for path, tensor in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def reparametrise(module: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(module[0])


def swap_memory(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data / 2


def to_double(run: Run, steps: Steps) -> Iterator[None]:
    """The wrapper is cast after a few steps."""
    yield from plain(run, [[batch.float() for batch in batches] for batches in steps[:CHANGE]])
    run.model.double()
    yield from plain(run, steps[CHANGE:])
