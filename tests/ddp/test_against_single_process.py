"""Cases that stock DDP gets wrong or rejects, compared with one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fddp
import tests.support.parity_runs as runs
import tests.support.reference_loops as loops
import tests.support.reference_modules as modules
from tests.support.parity_models import (
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


NO_ARGUMENTS: Mapping[str, Any] = {}


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    loop: Any = loops.plain
    arguments: Mapping[str, Any] = NO_ARGUMENTS
    batch: Callable[[int, int], Tensor] = rows


FIND = {"find_unused_parameters": True}
CASES = {
    "layers unfrozen": Case(frozen, loops.changing(loops.unfreeze)),
    "layers unfrozen, views": Case(
        frozen, loops.changing(loops.unfreeze), {"gradient_as_bucket_view": True}
    ),
    "layers frozen": Case(mlp, loops.changing(loops.freeze)),
    "parameter replaced": Case(mlp, loops.changing(loops.replace)),
    "frozen parameter replaced": Case(frozen, loops.changing(loops.replace_frozen)),
    "parameters tied": Case(mlp, loops.changing(loops.tie)),
    "layer appended": Case(mlp, loops.changing(loops.append)),
    "layer removed": Case(
        lambda: nn.Sequential(*double_layers(WIDTH, 8, 8, 8)), loops.changing(loops.remove)
    ),
    "parameters assigned": Case(mlp, loops.changing(loops.assign)),
    "reparametrised": Case(mlp, loops.changing(loops.reparametrise)),
    "memory swapped": Case(mlp, loops.changing(loops.swap_memory)),
    "cast": Case(lambda: mlp().float(), loops.to_double),
    "backward twice": Case(mlp, loops.twice),
    "backward twice, views": Case(mlp, loops.twice, {"gradient_as_bucket_view": True}),
    "backward twice, afresh": Case(mlp, loops.twice_afresh),
    "backward twice, small caps": Case(mlp, loops.twice, {"bucket_cap_mb": 1e-4}),
    "head by head": Case(modules.TwoHeads, loops.head_by_head, FIND),
    "two forwards, two backwards": Case(mlp, loops.two_forwards_two_backwards),
    "static graph, local first": Case(mlp, loops.local_first, {"static_graph": True}),
    "create_graph": Case(mlp, loops.with_graph),
    "part by part": Case(mlp, loops.part_by_part, FIND),
    "slopes penalised": Case(mlp, loops.penalised),
    "wrapper in a checkpoint": Case(
        mlp, functools.partial(loops.wrapper_in_checkpoint, reentrant=False)
    ),
    "wrapper in a re-entrant checkpoint": Case(
        mlp, functools.partial(loops.wrapper_in_checkpoint, reentrant=True)
    ),
    "module called on one rank": Case(mlp, loops.probing),
    "forwards dropped": Case(mlp, loops.dropped),
    "backward broken off": Case(mlp, loops.breaking([0, 1])),
    "backward broken off on a rank": Case(mlp, loops.breaking([1])),
    "re-entrant": Case(functools.partial(Checkpointed, reentrant=True)),
    "re-entrant, small caps": Case(
        functools.partial(Checkpointed, reentrant=True), arguments={"bucket_cap_mb": 1e-4}
    ),
    "re-entrant, reused": Case(functools.partial(modules.ReusedCheckpoint, reentrant=True)),
    "checkpoint, reused": Case(functools.partial(modules.ReusedCheckpoint, reentrant=False)),
    "re-entrant, nested": Case(modules.NestedCheckpoint),
    "re-entrant, backward twice": Case(modules.NestedCheckpoint, loops.twice),
    "closure returned": Case(
        functools.partial(modules.Opaque, modules.as_closure),
        loops.reading(lambda output: output()),
    ),
    "object returned": Case(
        functools.partial(modules.Opaque, modules.as_object),
        loops.reading(lambda output: output.inner.result),
    ),
    "loss on the side, too": Case(modules.OnTheSide, loops.with_aside),
    "loss on the side only": Case(modules.OnTheSide, loops.aside_only, FIND),
    "layers skipped": Case(modules.Gate, loops.plain, FIND, modules.sometimes),
    "order by batch": Case(
        modules.OrderByBatch, loops.plain, {"bucket_cap_mb": 1e-3}, modules.sometimes
    ),
    "heads by batch, small caps": Case(
        functools.partial(UnusedLayers, by_batch=True),
        loops.plain,
        {**FIND, "bucket_cap_mb": 1e-4},
        modules.sometimes,
    ),
    "heads by batch": Case(
        functools.partial(UnusedLayers, by_batch=True), loops.plain, FIND, modules.sometimes
    ),
    "layer used one or three times": Case(
        modules.RankDependentReuse, loops.plain, NO_ARGUMENTS, modules.sometimes
    ),
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
    batches = [modules.sometimes(r, step=1) for r in range(world_size)]
    module = runs.built(model, 0)
    ddp = fddp.DistributedDataParallel(module)
    loss_of(ddp(batches[rank])).backward()
    alone = runs.built(model, 0)
    loops.mean_loss([alone(batch) for batch in batches]).backward()
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
        loops.mean_loss([alone(rows(r, step)) for r in range(world_size)]).backward()
    return stayed, runs.first_difference([runs.shot(alone)], [runs.shot(module)], ROUNDING)


def test_backward_alone_under_no_sync(ranks: RankPool) -> None:
    # Stock DDP synchronises it, because the forward was outside.
    assert ranks.run(2, backward_local) == [(True, "")] * 2


JOINED = 5  # steps of rank 1


def uneven(rank: int, world_size: int) -> str:
    """A rank that has run out uses nothing, whatever its last batch used."""
    build = functools.partial(UnusedLayers, by_batch=True)
    model = Model(build, modules.sometimes)
    everything = [
        [model.batch(r, step) for r in range(world_size) if r == 0 or step < JOINED]
        for step in range(STEPS)
    ]
    own = [[batches[rank]] for batches in everything if rank < len(batches)]

    def joining(run: runs.Run, steps: loops.Steps) -> Iterator[None]:
        with run.model.join():
            yield from loops.plain(run, steps)

    def alone(run: runs.Run, steps: loops.Steps) -> Iterator[None]:
        for batches in steps:
            losses = [loss_of(run.model(batch)) for batch in batches]
            (torch.stack(losses).sum() / world_size).backward()
            yield
            loops.update(run)

    wrap = functools.partial(fddp.DistributedDataParallel, **FIND)
    ours = runs.record(runs.built(model, rank), wrap, joining, own)
    theirs = runs.record(runs.built(model, 0), runs.OneProcess, alone, everything)
    steps = len(own)
    final = runs.first_difference(theirs[-1:], ours[-1:], ROUNDING) if rank == 0 else ""
    return runs.first_difference(theirs[:steps], ours[:steps], ROUNDING) + final


def test_uneven_inputs_with_unused_layers(ranks: RankPool) -> None:
    assert ranks.run(2, uneven) == [""] * 2
