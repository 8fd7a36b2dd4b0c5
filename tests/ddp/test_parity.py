"""Training with stock DDP, with fddp's class and in one process: the same after each step.

The rows of the first table have every pair of a model, arguments, a loop and a hook that stock DDP
takes: the same bits as with stock. Those whose result is a mean over rows are held against one
process, too; and so are the programs of the second table, which stock DDP gets wrong or rejects.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as StockDDP

import fddp
import tests.support.parity_runs as runs
import tests.support.reference_modules as modules
import tests.support.training_loops as loops
from tests.support.on_ranks import on_processes, on_threads
from tests.support.pairwise import Row, pairwise
from tests.support.parity_models import (
    MODELS,
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

STEPS = 6
MORE = 3  # steps that rank 0 takes then, where inputs are uneven; a cycle of micro-batches


def bfloat16_hook(state, bucket):
    """torch's own takes CUDA only. DDP compares annotations as objects, so that it has none."""
    return default_hooks._compress_hook(torch.bfloat16, state, bucket)


def power_sgd() -> tuple[Any, Any]:
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    return state, powerSGD_hook.powerSGD_hook


def sparse_by_dense_hook(state, bucket):
    """Average like stock DDP without a hook, but never by gloo's all-reduce of sparse tensors.

    That operation corrupts the heap: a program of torch 2.13 alone, two ranks that train an
    embedding with sparse gradients for 21 steps, again and again, died of SIGSEGV after 40 to
    120 seconds. With this hook it ran for 400, the limit.
    """
    gradients = bucket.buffer().div_(dist.get_world_size())
    if not gradients.is_sparse:
        return dist.all_reduce(gradients, async_op=True).get_future().then(lambda f: f.value()[0])
    dim = gradients.sparse_dim()
    work = dist.all_reduce(gradients.coalesce().to_dense(), async_op=True)
    return work.get_future().then(lambda f: f.value()[0].to_sparse(dim))


FIND = {"find_unused_parameters": True}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "small caps": {"bucket_cap_mb": 1e-4},
    "list of caps": {"bucket_cap_mb_list": [1e-4, 3e-4, 1e-3]},
    "batched copy": {"batched_grad_copy": True},
    "forward_sync_buffers off": {"forward_sync_buffers": False},
    "broadcast_buffers off": {"broadcast_buffers": False},
    "static": {"static_graph": True},
    "find": FIND,
    "find, views": {**FIND, "gradient_as_bucket_view": True},
    "find, small caps": {**FIND, "bucket_cap_mb": 1e-4},
    "find, skip": {**FIND, "skip_all_reduce_unused_params": True},
}
LOOPS: dict[str, runs.Loop] = {
    "plain": loops.plain,
    "no_sync": loops.micro_batches,
    "no_sync after one": loops.micro_batches_after_one,
    "forward local": loops.forward_local,
    "kept": loops.kept,
    "reused": loops.reused,
    "join": loops.joining(loops.plain),
    "join, own divisor": loops.joining(loops.plain, divide_by_initial_world_size=False),
    "join, no_sync": loops.joining(loops.micro_batches),
}
HOOKS: dict[str, Callable[[], tuple[Any, Any]] | None] = {
    "no hook": None,
    "float16": lambda: (None, default_hooks.fp16_compress_hook),
    "bfloat16": lambda: (None, bfloat16_hook),
    "PowerSGD": power_sgd,
}
NEEDS = {  # models that stock DDP takes with some arguments only
    "unused layers": ("find", "static"),
    "unused by batch": ("find",),
    "re-entrant": ("static",),
}


def is_valid(row: Row) -> bool:
    """Return True for what stock DDP does, and does as its documentation has it."""
    model, arguments, loop, hook = row
    if "buffers" in arguments and model not in ("conv with batch norm", "reassigned buffer"):
        return False
    if row[:2] == ("unused by batch", "find, small caps") and loop != "plain":
        return False  # late gradients are added last, after those of other passes
    is_static, joins = arguments == "static", loop.startswith("join")
    if not arguments.startswith(NEEDS.get(model, "")):
        return False
    if is_static and loop not in ("plain", "no_sync after one"):
        return False
    if loop == "no_sync after one" and not is_static:
        return False
    if arguments.startswith("find") and loop in ("reused", "forward local"):
        return False  # stock marks parameters by the last forward
    if hook != "no hook":
        # torch's compression has no kernel for sparse gradients, its PowerSGD takes no scalars,
        # and it shows hooks strided gradients with their elements in the order of memory.
        # Over several buckets, stock's crashes.
        powerless = model in ("complex", "mixed dtypes", "channels last") or "caps" in arguments
        if model == "sparse embedding" or joins or (hook == "PowerSGD" and powerless):
            return False
        if arguments.startswith("find"):
            return False  # late gradients bypass hooks
    if loop == "join, own divisor" and model in ("sparse embedding", "mixed dtypes"):
        return False  # hooks do not know the divisor; weights of two units round float16
    if model in ("unused by batch", "undefined by batch"):
        # There an exhausted rank keeps reporting the parameters of its last batch.
        return not (is_static or arguments == "find, skip" or joins)
    return True


ROWS = pairwise([*MODELS], [*ARGUMENTS], [*LOOPS], [*HOOKS], valid=is_valid)


class Verdict(NamedTuple):
    """Differences between the runs of one rank; see `first_difference`."""

    from_stock: str
    from_one_process: str
    shots: int


def wrapper(ddp: Callable[..., nn.Module], row: Row) -> Any:
    model, arguments, _, hook = row
    made = HOOKS[hook]
    if made is None and model == "sparse embedding" and ddp is StockDDP:
        made = lambda: (None, sparse_by_dense_hook)  # noqa: E731

    def wrap(module: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # `broadcast_buffers`
            wrapped = ddp(module, **ARGUMENTS[arguments])
        if made is not None:
            wrapped.register_comm_hook(*made())
        return wrapped

    return wrap


def compare(rank: int, world_size: int, row: Row) -> Verdict:
    model, loop, joins = MODELS[row[0]], LOOPS[row[2]], row[2].startswith("join")
    steps = [[model.batch(r, step) for r in range(world_size)] for step in range(STEPS)]
    number = STEPS + MORE * (joins and rank == 0)
    own = [[model.batch(rank, step)] for step in range(number)]
    # The same transport, whose sums are the same bits.
    over_gloo = functools.partial(fddp.DistributedDataParallel, transport="c10d")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "find_unused_parameters=True", UserWarning)
        stock, ours = (
            runs.record(runs.built(model, rank), wrapper(ddp, row), loop, own)
            for ddp in (StockDDP, over_gloo)
        )
    apart = ""
    if model.per_row and row[3] == "no hook" and row[2] != "forward local" and not joins:
        alone = runs.record(runs.built(model, 0), runs.OneProcess, loop, steps)
        apart = runs.first_difference(alone, ours, runs.ROUNDING)
    return Verdict(runs.first_difference(stock, ours), apart, len(ours))


@pytest.mark.parametrize("row", ROWS, ids=", ".join)
def test_same_bits_as_stock(ranks: RankPool, row: Row) -> None:
    for rank, verdict in enumerate(ranks.run(2, compare, row)):
        assert verdict.shots > 1
        assert not verdict.from_stock, f"rank {rank}, {verdict.from_stock}"
        assert not verdict.from_one_process, f"rank {rank}, {verdict.from_one_process}"


def compare_in_equal_buckets(rank: int, world_size: int, row: Row) -> Verdict:
    """The same where the control word travels by itself, and so makes no bucket longer."""
    with mock.patch("fddp.core.schedule.builder.piggyback_problem", return_value="not here"):
        return compare(rank, world_size, row)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("arguments", ["default", "small caps"])
@pytest.mark.parametrize("model", ["conv with batch norm", "mixed dtypes"])
def test_same_bits_on_other_numbers_of_ranks(
    ranks: RankPool, model: str, arguments: str, world_size: int
) -> None:
    # Sums of three depend on where elements lie in a bucket: the plans are the same, too.
    row = (model, arguments, "plain", "no hook")
    verdicts = ranks.run(world_size, compare_in_equal_buckets, row)
    assert [verdict.from_stock for verdict in verdicts] == [""] * world_size


@on_processes(2)
def test_own_divisor_with_sparse_gradients(rank: int, world_size: int) -> None:
    """Parameters are those of the twin with dense gradients."""
    model = MODELS["sparse embedding"]
    own = [[model.batch(rank, step)] for step in range(STEPS + MORE * (1 - rank))]
    found = []
    for sparse in (True, False):
        module = runs.built(model, 0)
        module.embedding.sparse = module.bag.sparse = sparse
        shots = runs.record(module, fddp.DistributedDataParallel, LOOPS["join, own divisor"], own)
        assert shots[0]["gradient bag.weight"].is_sparse == sparse
        found.append(
            [{path: shot[path] for path in shot if path.startswith("parameter")} for shot in shots]
        )
    assert runs.first_difference(found[1], found[0], runs.ROUNDING) == ""


# Programs that stock DDP gets wrong or rejects


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    loop: runs.Loop = loops.plain
    arguments: Mapping[str, Any] = MappingProxyType({})
    batch: Callable[[int, int], Tensor] = rows


VIEWS = {"gradient_as_bucket_view": True}
SMALL_CAPS = {"bucket_cap_mb": 1e-4}
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
    "backward twice, small caps": Case(mlp, loops.twice, SMALL_CAPS),
    "head by head": Case(modules.TwoHeads, loops.head_by_head, FIND),
    "two forwards, two backwards": Case(mlp, loops.two_forwards_two_backwards),
    "static graph, local first": Case(mlp, loops.local_first, {"static_graph": True}),
    "backward alone under no_sync": Case(mlp, loops.backward_local),
    "create_graph": Case(mlp, loops.with_graph),
    "create_graph, views": Case(mlp, loops.with_graph, {**VIEWS, **SMALL_CAPS}),
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
    "re-entrant, small caps": Case(REENTRANT, arguments=SMALL_CAPS),
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
    "heads by batch, small caps": Case(
        HEADS, loops.plain, {**FIND, **SMALL_CAPS}, modules.sometimes
    ),
    "layer used one or three times": Case(modules.RankDependentReuse, batch=modules.sometimes),
}


@pytest.mark.filterwarnings(
    "ignore:find_unused_parameters=True",
    "ignore:this module returns a function",
    "ignore:the step of an aborted backward",
    "ignore:Using backward.. with create_graph=True",
    "ignore:None of the inputs have requires_grad=True",  # of a checkpoint within another
)
@pytest.mark.parametrize("name", CASES)
@on_threads(2)
def test_same_as_one_process(group: Any, name: str) -> None:
    case = CASES[name]
    model = Model(case.build, case.batch)
    steps = [[case.batch(r, step) for r in range(2)] for step in range(8)]  # the fourth changes
    own = [[batches[group.rank]] for batches in steps]
    wrap = functools.partial(fddp.DistributedDataParallel, process_group=group, **case.arguments)
    # Both before any rank trains: checkpoints set the generator that modules are built with.
    module, single = runs.built(model, group.rank), runs.built(model, 0)
    ours = runs.record(module, wrap, case.loop, own, group.rank)
    alone = runs.record(single, runs.OneProcess, case.loop, steps)
    assert len(ours) > 1
    assert runs.first_difference(alone, ours, runs.ROUNDING) == ""


@on_threads(2)
def test_frozen_on_one_rank(group: Any) -> None:
    """Were one rank alone to raise, the others would wait for it in backward."""
    module, alone = (runs.built(Model(mlp, rows), 0) for _ in range(2))
    ddp = fddp.DistributedDataParallel(module, process_group=group)
    module[2].requires_grad_(group.rank == 0)
    for model in (ddp, alone):
        loss_of(model(rows(0, 0))).backward()
    if group.rank == 0:
        assert torch.allclose(module[2].bias.grad, alone[2].bias.grad / 2)
    with pytest.raises(RuntimeError, match=r"(?s)Expected to have finished reduction in.*2\.bias"):
        ddp(rows(0, 0))


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
@on_threads(2)
def test_gradients_that_were_there(group: Any) -> None:
    """What no rank has used keeps its own; the rest is averaged with what was there."""
    module = runs.built(Model(functools.partial(UnusedLayers, by_batch=False), rows), 0)
    ddp = fddp.DistributedDataParallel(module, process_group=group, **FIND)
    own = {name: torch.full_like(p, group.rank + 1.0) for name, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        parameter.grad = own[name]
    loss_of(ddp(rows(0, 0))).backward()
    used = module.first.weight
    (gradient,) = torch.autograd.grad(loss_of(module(rows(0, 0))), used)
    assert module.never.weight.grad is own["never.weight"]
    assert float(module.never.weight.grad.mean()) == group.rank + 1.0
    assert float((used.grad - gradient).mean()) == pytest.approx(1.5)


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True")
@on_threads(2)
def test_uneven_inputs_with_unused_layers(group: Any) -> None:
    """A rank that has run out uses nothing, whatever its last batch used."""
    model = Model(HEADS, modules.sometimes)
    steps = [
        [model.batch(r, step) for r in range(2) if r == 0 or step < STEPS]
        for step in range(STEPS + MORE)
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
    assert runs.first_difference(theirs[:count], ours[:count], runs.ROUNDING) == ""
    if group.rank == 0:
        assert runs.first_difference(theirs[-1:], ours[-1:], runs.ROUNDING) == ""


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
