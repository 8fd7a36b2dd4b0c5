"""Models trained with stock DDP and with fddp's: the same bits after every step.

The rows have every pair of a model, arguments, a loop and a hook that stock DDP takes. Those whose
result is a mean over rows are held against one process, too.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as StockDDP

import fddp
import tests.support.parity_runs as runs
import tests.support.training_loops as loops
from tests.support.pairwise import Row, pairwise
from tests.support.parity_models import MODELS
from tests.support.ranks import RankPool

STEPS = 9
FEWER = 3  # steps that rank 1 lacks, where inputs are uneven


def bfloat16_hook(state, bucket):
    """torch's own takes CUDA only. DDP compares annotations as objects, so that it has none."""
    return default_hooks._compress_hook(torch.bfloat16, state, bucket)


def power_sgd() -> tuple[Any, Any]:
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=1
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
    own = [[batches[rank]] for batches in steps[: STEPS - FEWER * rank * joins]]
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


def sparse_beside_dense(rank: int, world_size: int) -> str:
    """Compare parameters of the model with sparse gradients, and of its twin with dense ones."""
    model = MODELS["sparse embedding"]
    own = [[model.batch(rank, step)] for step in range(STEPS - FEWER * rank)]
    found = []
    for sparse in (True, False):
        module = runs.built(model, 0)
        module.embedding.sparse = module.bag.sparse = sparse
        shots = runs.record(module, fddp.DistributedDataParallel, LOOPS["join, own divisor"], own)
        assert shots[0]["gradient bag.weight"].is_sparse == sparse
        found.append(
            [{path: shot[path] for path in shot if path.startswith("parameter")} for shot in shots]
        )
    return runs.first_difference(found[1], found[0], runs.ROUNDING)


def test_own_divisor_with_sparse_gradients(ranks: RankPool) -> None:
    assert ranks.run(2, sparse_beside_dense) == ["", ""]
