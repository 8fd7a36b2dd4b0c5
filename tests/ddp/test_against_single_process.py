"""Cases that stock DDP gets wrong or rejects, compared with one process.

Each loop runs on the ranks, where `batches` has the rank's own batch of a step, and in one process,
where it has those of all ranks, whose losses are averaged.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fddp
import tests.support.parity_runs as runs
from tests.support.models import rand
from tests.support.parity_models import (
    ROWS,
    WIDTH,
    Checkpointed,
    Model,
    UnusedLayers,
    double_layers,
    frozen,
    loss_of,
    mlp,
    rows,
)
from tests.support.ranks import RankPool

ROUNDING = 1e-12
STEPS = 8
CHANGE = 3  # the step before which a model is changed
Steps = Sequence[Sequence[Tensor]]


def outputs(run: runs.Run, batches: Sequence[Tensor]) -> list[Any]:
    return [run.model(batch) for batch in batches]


def mean_loss(parts: Sequence[Any]) -> Tensor:
    return torch.stack([loss_of(part) for part in parts]).mean()


def update(run: runs.Run) -> None:
    """Written out, so that parameters may come and go."""
    with torch.no_grad():
        for parameter in run.model.parameters():
            if parameter.grad is not None:
                parameter -= 0.02 * parameter.grad
            parameter.grad = None


def plain(run: runs.Run, steps: Steps) -> Iterator[None]:
    for batches in steps:
        mean_loss(outputs(run, batches)).backward()
        yield
        update(run)


# Modules that change


def changing(change: Callable[[nn.Module], None]) -> Any:
    """Trains, changes the module, and trains on."""

    def loop(run: runs.Run, steps: Steps) -> Iterator[None]:
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
    torch.manual_seed(CHANGE)
    module.append(nn.Linear(3, 3, dtype=torch.float64))


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


def to_double(run: runs.Run, steps: Steps) -> Iterator[None]:
    """The wrapper is cast after a few steps."""
    yield from plain(run, [[batch.float() for batch in batches] for batches in steps[:CHANGE]])
    run.model.double()
    yield from plain(run, steps[CHANGE:])


# Backwards other than one for each forward


def twice(run: runs.Run, steps: Steps) -> Iterator[None]:
    """Two backwards of one forward; their gradients add up."""
    for batches in steps:
        loss = mean_loss(outputs(run, batches))
        loss.backward(retain_graph=True)
        yield
        loss.backward()
        yield
        update(run)


def twice_afresh(run: runs.Run, steps: Steps) -> Iterator[None]:
    """Two backwards of one forward, each on its own."""
    for batches in steps:
        loss = mean_loss(outputs(run, batches))
        loss.backward(retain_graph=True)
        run.model.zero_grad()
        (3 * loss).backward()
        yield
        update(run)


def head_by_head(run: runs.Run, steps: Steps) -> Iterator[None]:
    """A backward for each output; all use the trunk."""
    for batches in steps:
        for heads in zip(*outputs(run, batches), strict=True):
            mean_loss(heads).backward(retain_graph=True)
        yield
        update(run)


def two_forwards_two_backwards(run: runs.Run, steps: Steps) -> Iterator[None]:
    for batches in steps:
        first = mean_loss(outputs(run, batches))
        second = mean_loss(outputs(run, [batch.flip(0) / 2 for batch in batches]))
        second.backward()
        first.backward()
        yield
        update(run)


def local_first(run: runs.Run, steps: Steps) -> Iterator[None]:
    """The very first backward stays local."""
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        with run.model.no_sync():
            mean_loss(outputs(run, first)).backward()
        mean_loss(outputs(run, second)).backward()
        yield
        update(run)


def part_by_part(run: runs.Run, steps: Steps) -> Iterator[None]:
    """Each backward names the parameters to serve."""
    for batches in steps:
        loss = mean_loss(outputs(run, batches))
        parameters = list(run.model.parameters())
        loss.backward(inputs=parameters[:2], retain_graph=True)
        loss.backward(inputs=parameters[2:])
        yield
        update(run)


def penalised(run: runs.Run, steps: Steps) -> Iterator[None]:
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


def wrapper_in_checkpoint(run: runs.Run, steps: Steps, *, reentrant: bool) -> Iterator[None]:
    """Backward calls the wrapper's forward again."""
    for batches in steps:
        inputs = [batch.clone().requires_grad_() for batch in batches]
        parts = [checkpoint(run.model, x, use_reentrant=reentrant) for x in inputs]
        mean_loss(parts).backward()
        yield
        update(run)


def probing(run: runs.Run, steps: Steps) -> Iterator[None]:
    """Between steps one rank has a backward of its own, around the wrapper."""
    for batches in steps:
        mean_loss(outputs(run, batches)).backward()
        yield
        update(run)
        if dist.is_initialized() and dist.get_rank() == 0:
            loss_of(run.model.module(batches[0])).backward()
            run.model.zero_grad()


def with_graph(run: runs.Run, steps: Steps) -> Iterator[None]:
    """First-order gradients that keep their graph."""
    for batches in steps:
        mean_loss(outputs(run, batches)).backward(create_graph=True)
        yield
        update(run)


def dropped(run: runs.Run, steps: Steps) -> Iterator[None]:
    """Forwards without a backward, before and after those with one."""
    for batches in steps:
        outputs(run, [batch + 1 for batch in batches])
        kept = outputs(run, batches)
        outputs(run, [batch + 2 for batch in batches])
        mean_loss(kept).backward()
        yield
        update(run)


class BrokenError(Exception):
    pass


def _break(grad: Tensor) -> None:
    raise BrokenError


def breaking(on_ranks: Sequence[int]) -> Any:
    """One backward ends with an error in its middle; its step is left out."""

    def loop(run: runs.Run, steps: Steps) -> Iterator[None]:
        yield from plain(run, steps[:CHANGE])
        broken = not dist.is_initialized() or dist.get_rank() in on_ranks
        hidden = run.model.module[2].weight
        handle = hidden.register_hook(_break if broken else lambda grad: None)
        with contextlib.suppress(BrokenError, fddp.PeerError):
            mean_loss(outputs(run, steps[CHANGE])).backward()
        handle.remove()
        run.model.zero_grad()
        yield from plain(run, steps[CHANGE + 1 :])

    return loop


# Modules with outputs and graphs of all sorts


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

    def __init__(self, hide: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.hide = hide
        self.layers = nn.Sequential(*double_layers(WIDTH, 8, 3))

    def forward(self, x: Tensor) -> Any:
        return self.hide(self.layers(x))


def as_closure(result: Tensor) -> Any:
    return lambda: result


def as_object(result: Tensor) -> Any:
    return SimpleNamespace(inner=SimpleNamespace(result=result))


def reading(read: Callable[[Any], Tensor]) -> Any:
    def loop(run: runs.Run, steps: Steps) -> Iterator[None]:
        for batches in steps:
            mean_loss([read(output) for output in outputs(run, batches)]).backward()
            yield
            update(run)

    return loop


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


def with_aside(run: runs.Run, steps: Steps) -> Iterator[None]:
    """The loss is of what was returned and of what was left."""
    for batches in steps:
        losses = [loss_of(run.model(batch)) + loss_of(run.model.module.aside) for batch in batches]
        torch.stack(losses).mean().backward()
        yield
        update(run)


def aside_only(run: runs.Run, steps: Steps) -> Iterator[None]:
    """The loss is of what was left alone."""
    for batches in steps:
        asides = [(run.model(batch), run.model.module.aside)[1] for batch in batches]
        mean_loss(asides).backward()
        yield
        update(run)


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


NO_ARGUMENTS: Mapping[str, Any] = {}


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    loop: Any = plain
    arguments: Mapping[str, Any] = NO_ARGUMENTS
    batch: Callable[[int, int], Tensor] = rows


FIND = {"find_unused_parameters": True}
CASES = {
    "layers unfrozen": Case(frozen, changing(unfreeze)),
    "layers unfrozen, views": Case(frozen, changing(unfreeze), {"gradient_as_bucket_view": True}),
    "layers frozen": Case(mlp, changing(freeze)),
    "parameter replaced": Case(mlp, changing(replace)),
    "frozen parameter replaced": Case(frozen, changing(replace_frozen)),
    "parameters tied": Case(mlp, changing(tie)),
    "layer appended": Case(mlp, changing(append)),
    "layer removed": Case(lambda: nn.Sequential(*double_layers(WIDTH, 8, 8, 8)), changing(remove)),
    "parameters assigned": Case(mlp, changing(assign)),
    "reparametrised": Case(mlp, changing(reparametrise)),
    "memory swapped": Case(mlp, changing(swap_memory)),
    "cast": Case(lambda: mlp().float(), to_double),
    "backward twice": Case(mlp, twice),
    "backward twice, views": Case(mlp, twice, {"gradient_as_bucket_view": True}),
    "backward twice, afresh": Case(mlp, twice_afresh),
    "backward twice, small caps": Case(mlp, twice, {"bucket_cap_mb": 1e-4}),
    "head by head": Case(TwoHeads, head_by_head, FIND),
    "two forwards, two backwards": Case(mlp, two_forwards_two_backwards),
    "static graph, local first": Case(mlp, local_first, {"static_graph": True}),
    "create_graph": Case(mlp, with_graph),
    "part by part": Case(mlp, part_by_part, FIND),
    "slopes penalised": Case(mlp, penalised),
    "wrapper in a checkpoint": Case(mlp, functools.partial(wrapper_in_checkpoint, reentrant=False)),
    "wrapper in a re-entrant checkpoint": Case(
        mlp, functools.partial(wrapper_in_checkpoint, reentrant=True)
    ),
    "module called on one rank": Case(mlp, probing),
    "forwards dropped": Case(mlp, dropped),
    "backward broken off": Case(mlp, breaking([0, 1])),
    "backward broken off on a rank": Case(mlp, breaking([1])),
    "re-entrant": Case(functools.partial(Checkpointed, reentrant=True)),
    "re-entrant, small caps": Case(
        functools.partial(Checkpointed, reentrant=True), arguments={"bucket_cap_mb": 1e-4}
    ),
    "re-entrant, reused": Case(functools.partial(ReusedCheckpoint, reentrant=True)),
    "checkpoint, reused": Case(functools.partial(ReusedCheckpoint, reentrant=False)),
    "re-entrant, nested": Case(NestedCheckpoint),
    "re-entrant, backward twice": Case(NestedCheckpoint, twice),
    "closure returned": Case(
        functools.partial(Opaque, as_closure), reading(lambda output: output())
    ),
    "object returned": Case(
        functools.partial(Opaque, as_object), reading(lambda output: output.inner.result)
    ),
    "loss on the side, too": Case(OnTheSide, with_aside),
    "loss on the side only": Case(OnTheSide, aside_only, FIND),
    "layers skipped": Case(Gate, plain, FIND, sometimes),
    "order by batch": Case(OrderByBatch, plain, {"bucket_cap_mb": 1e-3}, sometimes),
    "heads by batch, small caps": Case(
        functools.partial(UnusedLayers, by_batch=True),
        plain,
        {**FIND, "bucket_cap_mb": 1e-4},
        sometimes,
    ),
    "heads by batch": Case(functools.partial(UnusedLayers, by_batch=True), plain, FIND, sometimes),
    "layer used one or three times": Case(RankDependentReuse, plain, NO_ARGUMENTS, sometimes),
}


def compare(rank: int, world_size: int, name: str) -> str:
    case = CASES[name]
    model = Model(case.build, case.batch)
    everything = [[case.batch(r, step) for r in range(world_size)] for step in range(STEPS)]
    own = [[batches[rank]] for batches in everything]
    wrap = functools.partial(fddp.DistributedDataParallel, **case.arguments)
    ours = runs.record(runs.built(model, rank), wrap, case.loop, own)
    alone = runs.record(runs.built(model, 0), runs.OneProcess, case.loop, everything)
    assert len(ours) > 1
    return runs.first_difference(alone, ours, ROUNDING)


@pytest.mark.parametrize("name", CASES)
def test_same_as_one_process(ranks: RankPool, name: str) -> None:
    for rank, difference in enumerate(ranks.run(2, compare, name)):
        assert not difference, f"rank {rank}, {difference}"


def unused_without_flag(rank: int, world_size: int) -> tuple[str, str]:
    """Return the first difference from one process, and the error of the next forward."""
    build = functools.partial(UnusedLayers, by_batch=True)
    model = Model(build, rows)
    batches = [sometimes(r, step=1) for r in range(world_size)]
    module = runs.built(model, 0)
    ddp = fddp.DistributedDataParallel(module)
    loss_of(ddp(batches[rank])).backward()
    alone = runs.built(model, 0)
    mean_loss([alone(batch) for batch in batches]).backward()
    difference = runs.first_difference([runs.shot(alone)], [runs.shot(module)], ROUNDING)
    try:
        ddp(batches[rank])
    except RuntimeError as error:
        return difference, str(error)
    return difference, ""


def test_unused_without_a_flag(ranks: RankPool) -> None:
    # The step is complete although each rank used another head; then all ranks raise.
    for difference, problem in ranks.run(2, unused_without_flag):
        assert not difference
        assert "Expected to have finished reduction in the prior iteration" in problem
        assert "never.weight" in problem


def frozen_on_one(rank: int, world_size: int) -> tuple[bool, str]:
    """Freeze a layer on rank 1: return whether it gets half of rank 0's gradient, and the error of
    the next forward."""
    module, alone = (runs.built(Model(mlp, rows), 0) for _ in range(2))
    ddp = fddp.DistributedDataParallel(module)
    module[2].requires_grad_(rank == 0)
    for model in (ddp, alone):
        loss_of(model(rows(0, 0))).backward()
    halved = rank == 1 or torch.allclose(module[2].bias.grad, alone[2].bias.grad / 2)
    try:
        ddp(rows(0, 0))
    except RuntimeError as error:
        return halved, str(error)
    return halved, ""


def test_frozen_on_one_rank(ranks: RankPool) -> None:
    # Were one rank alone to raise, the others would wait for it in backward.
    for halved, problem in ranks.run(2, frozen_on_one):
        assert halved
        assert "Expected to have finished reduction in the prior iteration" in problem
        assert "2.bias" in problem


def untouched(rank: int, world_size: int) -> tuple[float, float]:
    module = UnusedLayers(by_batch=False)
    ddp = fddp.DistributedDataParallel(module, **FIND)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    loss_of(ddp(rows(0, 0))).backward()
    used = module.first.weight.grad
    own = used - _gradient_alone(module)
    return float(module.never.weight.grad.mean()), float(own.mean())


def _gradient_alone(module: UnusedLayers) -> Tensor:
    return torch.autograd.grad(loss_of(module(rows(0, 0))), module.first.weight)[0]


def test_gradients_that_were_there(ranks: RankPool) -> None:
    # What no rank has used keeps its own; the rest is averaged with what was there, as by stock.
    for rank, (unused, used) in enumerate(ranks.run(2, untouched)):
        assert unused == rank + 1.0
        assert used == pytest.approx(1.5)


def backward_local(rank: int, world_size: int) -> tuple[bool, str]:
    """A backward under `no_sync`, of a forward that was not, and another one outside."""
    model = Model(mlp, rows)
    module, alone = runs.built(model, 0), runs.built(model, 0)
    ddp = fddp.DistributedDataParallel(module)
    loss = loss_of(ddp(rows(rank, 0)))
    with ddp.no_sync():
        loss.backward()
    own = torch.autograd.grad(loss_of(alone(rows(rank, 0))), list(alone.parameters()))
    stayed = all(
        torch.equal(parameter.grad, grad)
        for parameter, grad in zip(module.parameters(), own, strict=True)
    )
    loss_of(ddp(rows(rank, 1))).backward()
    for step in range(2):
        mean_loss([alone(rows(r, step)) for r in range(world_size)]).backward()
    return stayed, runs.first_difference([runs.shot(alone)], [runs.shot(module)], ROUNDING)


def test_backward_alone_under_no_sync(ranks: RankPool) -> None:
    # Stock DDP synchronises it, because the forward was outside.
    assert ranks.run(2, backward_local) == [(True, "")] * 2


JOINED = 5  # steps of rank 1


def uneven(rank: int, world_size: int) -> str:
    """A rank that has run out uses nothing, whatever its last batch used."""
    build = functools.partial(UnusedLayers, by_batch=True)
    model = Model(build, sometimes)
    everything = [
        [model.batch(r, step) for r in range(world_size) if r == 0 or step < JOINED]
        for step in range(STEPS)
    ]
    own = [[batches[rank]] for batches in everything if rank < len(batches)]

    def joining(run: runs.Run, steps: Steps) -> Iterator[None]:
        with run.model.join():
            yield from plain(run, steps)

    def alone(run: runs.Run, steps: Steps) -> Iterator[None]:
        for batches in steps:
            losses = [loss_of(run.model(batch)) for batch in batches]
            (torch.stack(losses).sum() / world_size).backward()
            yield
            update(run)

    wrap = functools.partial(fddp.DistributedDataParallel, **FIND)
    ours = runs.record(runs.built(model, rank), wrap, joining, own)
    theirs = runs.record(runs.built(model, 0), runs.OneProcess, alone, everything)
    steps = len(own)
    final = runs.first_difference(theirs[-1:], ours[-1:], ROUNDING) if rank == 0 else ""
    return runs.first_difference(theirs[:steps], ours[:steps], ROUNDING) + final


def test_uneven_inputs_with_unused_layers(ranks: RankPool) -> None:
    assert ranks.run(2, uneven) == [""] * 2
