"""Programs that stock DDP gets wrong or rejects, compared with one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fddp
import tests.support.parity_runs as runs
import tests.support.reference_modules as modules
import tests.support.training_loops as loops
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
from tests.support.ranks import Launch

pytestmark = pytest.mark.filterwarnings(
    "ignore:find_unused_parameters=True",
    "ignore:this module returns a function",
    "ignore:the step of an aborted backward",
    "ignore:Using backward.. with create_graph=True",
    "ignore:None of the inputs have requires_grad=True",  # of a checkpoint within another
)
STEPS = 8


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    loop: runs.Loop = loops.plain
    arguments: Mapping[str, Any] = MappingProxyType({})
    batch: Callable[[int, int], Tensor] = rows


FIND = {"find_unused_parameters": True}
VIEWS = {"gradient_as_bucket_view": True}
CAPS = {"bucket_cap_mb": 1e-4}
REENTRANT = functools.partial(Checkpointed, reentrant=True)
HEADS = functools.partial(UnusedLayers, by_batch=True)
CASES = {
    "layers unfrozen": Case(frozen, loops.changing(loops.unfreeze)),
    "layers unfrozen, views": Case(frozen, loops.changing(loops.unfreeze), VIEWS),
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
    "backward twice, views": Case(mlp, loops.twice, VIEWS),
    "backward twice, afresh": Case(mlp, loops.twice_afresh),
    "backward twice, small caps": Case(mlp, loops.twice, CAPS),
    "head by head": Case(modules.TwoHeads, loops.head_by_head, FIND),
    "two forwards, two backwards": Case(mlp, loops.two_forwards_two_backwards),
    "static graph, local first": Case(mlp, loops.local_first, {"static_graph": True}),
    "backward alone under no_sync": Case(mlp, loops.backward_local),
    "create_graph": Case(mlp, loops.with_graph),
    "create_graph, views": Case(mlp, loops.with_graph, {**VIEWS, **CAPS}),
    "part by part": Case(mlp, loops.part_by_part, FIND),
    "slopes penalised": Case(mlp, loops.penalised),
    "wrapper in a checkpoint": Case(
        mlp, functools.partial(loops.wrapper_in_checkpoint, reentrant=False)
    ),
    "wrapper in a re-entrant checkpoint": Case(
        mlp, functools.partial(loops.wrapper_in_checkpoint, reentrant=True)
    ),
    "module called on one rank": Case(mlp, loops.probing, {"local_gradients": "allow"}),
    "forwards dropped": Case(mlp, loops.dropped),
    "backward broken off": Case(mlp, loops.breaking([0, 1])),
    "backward broken off on a rank": Case(mlp, loops.breaking([1])),
    "backward broken off at its start": Case(mlp, loops.breaking([1], at_output=True)),
    "re-entrant": Case(REENTRANT),
    "re-entrant, find": Case(REENTRANT, arguments=FIND),
    "re-entrant, reused, find": Case(
        functools.partial(modules.ReusedCheckpoint, reentrant=True), arguments=FIND
    ),
    "re-entrant, small caps": Case(REENTRANT, arguments=CAPS),
    "re-entrant, reused": Case(functools.partial(modules.ReusedCheckpoint, reentrant=True)),
    "checkpoint, reused": Case(functools.partial(modules.ReusedCheckpoint, reentrant=False)),
    "re-entrant, nested": Case(modules.NestedCheckpoint),
    "re-entrant, backward twice": Case(modules.NestedCheckpoint, loops.twice),
    "re-entrant, hidden": Case(
        functools.partial(modules.Opaque, modules.as_closure, reentrant=True),
        loops.reading(lambda output: output()),
    ),
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
    "heads by batch": Case(HEADS, loops.plain, FIND, modules.sometimes),
    "heads by batch, small caps": Case(HEADS, loops.plain, {**FIND, **CAPS}, modules.sometimes),
    "layer used one or three times": Case(modules.RankDependentReuse, batch=modules.sometimes),
}


def compare(group: Any, name: str) -> str:
    case = CASES[name]
    model = Model(case.build, case.batch)
    steps = [[case.batch(r, step) for r in range(2)] for step in range(STEPS)]
    own = [[batches[group.rank]] for batches in steps]
    wrap = functools.partial(fddp.DistributedDataParallel, process_group=group, **case.arguments)
    # Both before any rank trains: checkpoints set the generator that modules are built with.
    module, single = runs.built(model, group.rank), runs.built(model, 0)
    ours = runs.record(module, wrap, case.loop, own, group.rank)
    alone = runs.record(single, runs.OneProcess, case.loop, steps)
    assert len(ours) > 1
    return runs.first_difference(alone, ours, runs.ROUNDING)


@pytest.mark.parametrize("name", CASES)
def test_same_as_one_process(name: str) -> None:
    for rank, difference in enumerate(fddp.loopback(2, compare, name)):
        assert not difference, f"rank {rank}, {difference}"


def frozen_on_one(group: Any) -> tuple[bool, str]:
    """Freeze a layer on rank 1: return whether it gets half of rank 0's gradient, and the error of
    the next forward."""
    module, alone = (runs.built(Model(mlp, rows), 0) for _ in range(2))
    ddp = fddp.DistributedDataParallel(module, process_group=group)
    module[2].requires_grad_(group.rank == 0)
    for model in (ddp, alone):
        loss_of(model(rows(0, 0))).backward()
    halved = group.rank == 1 or torch.allclose(module[2].bias.grad, alone[2].bias.grad / 2)
    with pytest.raises(RuntimeError) as caught:
        ddp(rows(0, 0))
    return halved, str(caught.value)


def test_frozen_on_one_rank() -> None:
    # Were one rank alone to raise, the others would wait for it in backward.
    for halved, problem in fddp.loopback(2, frozen_on_one):
        assert halved
        assert "Expected to have finished reduction in the prior iteration" in problem
        assert "2.bias" in problem


def untouched(group: Any) -> tuple[bool, float, float]:
    module = runs.built(Model(functools.partial(UnusedLayers, by_batch=False), rows), 0)
    ddp = fddp.DistributedDataParallel(module, process_group=group, **FIND)
    own = {name: torch.full_like(p, group.rank + 1.0) for name, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        parameter.grad = own[name]
    loss_of(ddp(rows(0, 0))).backward()
    used = module.first.weight
    (gradient,) = torch.autograd.grad(loss_of(module(rows(0, 0))), used)
    unused = module.never.weight.grad
    return unused is own["never.weight"], float(unused.mean()), float((used.grad - gradient).mean())


def test_gradients_that_were_there() -> None:
    # What no rank has used keeps its own; the rest is averaged with what was there, as by stock.
    for rank, (same, unused, used) in enumerate(fddp.loopback(2, untouched)):
        assert same
        assert unused == rank + 1.0
        assert used == pytest.approx(1.5)


JOINED = 5  # steps of rank 1


def uneven(group: Any) -> str:
    """A rank that has run out uses nothing, whatever its last batch used."""
    model = Model(HEADS, modules.sometimes)
    steps = [
        [model.batch(r, step) for r in range(2) if r == 0 or step < JOINED] for step in range(STEPS)
    ]
    own = [[batches[group.rank]] for batches in steps if group.rank < len(batches)]

    def alone(run: runs.Run, steps: runs.Steps) -> Iterator[None]:
        for batches in steps:
            losses = [loss_of(run.model(batch)) for batch in batches]
            (torch.stack(losses).sum() / 2).backward()
            yield
            runs.update(run)

    wrap = functools.partial(fddp.DistributedDataParallel, process_group=group, **FIND)
    ours = runs.record(
        runs.built(model, group.rank), wrap, loops.joining(loops.plain), own, group.rank
    )
    theirs = runs.record(runs.built(model, 0), runs.OneProcess, alone, steps)
    count = len(own)
    final = "" if group.rank else runs.first_difference(theirs[-1:], ours[-1:], runs.ROUNDING)
    return runs.first_difference(theirs[:count], ours[:count], runs.ROUNDING) + final


def test_uneven_inputs_with_unused_layers(launch: Launch) -> None:
    assert fddp.loopback(2, uneven) == [""] * 2


class NormOverRanks(nn.Module):
    """The statistics of `SyncBatchNorm`, on any device; within the batch if `group` is None."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        mean = self._mean(x)
        return (x - mean) * (self._mean((x - mean).square()) + 1e-5).rsqrt() * self.scale

    def _mean(self, x: Tensor) -> Tensor:
        mean = x.mean(0)
        return mean if self.group is None else fddp.pmean(mean, self.group)


def test_statistics_over_ranks_by_pmean() -> None:
    """As docs/ddp.md has it for the CPU, where torch's SyncBatchNorm is refused."""
    batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    first, last = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))

    def model(group: Any) -> nn.Module:
        ends = copy.deepcopy(first), copy.deepcopy(last)
        return nn.Sequential(ends[0], NormOverRanks(group), ends[1])

    def gradients(group: Any) -> list[Tensor | None]:
        ddp = fddp.DistributedDataParallel(model(group), process_group=group)
        ddp(batch[group.rank :: 2]).square().mean().backward()
        return [param.grad for param in ddp.parameters()]

    alone = model(None)
    alone(batch).square().mean().backward()
    wanted = [param.grad for param in alone.parameters()]
    for grads in fddp.loopback(2, gradients):
        torch.testing.assert_close(grads, wanted, rtol=1e-12, atol=1e-12)
