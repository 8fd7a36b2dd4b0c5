"""Stock DDP and fddp's, on the same models and batches: the same bits after every step.

Models whose result is a mean over rows are held against one process on the joined batch, too.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
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
from tests.support.parity_models import MODELS
from tests.support.ranks import RankPool

# One process adds up rows in another order; all models that are compared with it are float64.
ROUNDING = 1e-12


NO_ARGUMENTS: Mapping[str, Any] = {}


class Option(NamedTuple):
    """A way to wrap and train a model."""

    arguments: Mapping[str, Any] = NO_ARGUMENTS  # of the constructor
    loop: runs.Loop = runs.plain
    hook: Callable[[], tuple[Any, Any]] | None = None  # makes the state of a hook, and the hook
    uneven: bool = False  # rank 1 has fewer batches
    exact: bool = True  # gradients are not rounded on the way


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


def joining(*, divide_by_initial_world_size: bool) -> runs.Loop:
    return functools.partial(runs.uneven, divide_by_initial_world_size=divide_by_initial_world_size)


OPTIONS = {
    "default": Option(),
    "gradient_as_bucket_view": Option({"gradient_as_bucket_view": True}),
    "find_unused_parameters": Option({"find_unused_parameters": True}),
    "static_graph": Option({"static_graph": True}),
    "small caps": Option({"bucket_cap_mb": 1e-4}),
    "bucket_cap_mb_list": Option({"bucket_cap_mb_list": [1e-4, 3e-4, 1e-3]}),
    "batched_grad_copy": Option({"batched_grad_copy": True}),
    "forward_sync_buffers off": Option({"forward_sync_buffers": False}),
    "broadcast_buffers off": Option({"broadcast_buffers": False}),
    "no_sync": Option(loop=runs.micro_batches),
    "no_sync, views": Option({"gradient_as_bucket_view": True}, runs.micro_batches),
    "forward under no_sync": Option(loop=runs.forward_local, exact=False),
    "zeroed in place": Option(loop=runs.zeroed_in_place),
    "zeroed in place, views": Option({"gradient_as_bucket_view": True}, runs.zeroed_in_place),
    "never zeroed": Option(loop=runs.never_zeroed),
    "never zeroed, views": Option({"gradient_as_bucket_view": True}, runs.never_zeroed),
    "two forwards": Option(loop=runs.two_forwards),
    "retain_graph": Option(loop=runs.retained),
    "evaluation between": Option(loop=runs.evaluated),
    "float16 hook": Option(hook=lambda: (None, default_hooks.fp16_compress_hook), exact=False),
    "bfloat16 hook": Option(hook=lambda: (None, bfloat16_hook), exact=False),
    "PowerSGD hook": Option(hook=power_sgd, exact=False),
    "join": Option(loop=joining(divide_by_initial_world_size=True), uneven=True),
    "join, own divisor": Option(loop=joining(divide_by_initial_world_size=False), uneven=True),
    "join, no_sync": Option(loop=runs.uneven_micro_batches, uneven=True),
    # For models with layers that are not used.
    "find, views": Option({"find_unused_parameters": True, "gradient_as_bucket_view": True}),
    "find, no_sync": Option({"find_unused_parameters": True}, runs.micro_batches),
    "find, zeroed in place": Option({"find_unused_parameters": True}, runs.zeroed_in_place),
    "find, never zeroed": Option({"find_unused_parameters": True}, runs.never_zeroed),
    "find, small caps": Option({"find_unused_parameters": True, "bucket_cap_mb": 1e-4}),
    "find, join": Option(
        {"find_unused_parameters": True},
        joining(divide_by_initial_world_size=True),
        uneven=True,
    ),
    "find, skip": Option({"find_unused_parameters": True, "skip_all_reduce_unused_params": True}),
    "static_graph, no_sync": Option({"static_graph": True}, runs.micro_batches_after_one),
}

_FLAGGED = {
    "unused layers": [
        *(option for option in OPTIONS if option.startswith("find")),
        "static_graph",
        "static_graph, no_sync",
    ],
    "unused by batch": [
        option for option in OPTIONS if option.startswith("find") and option != "find, skip"
    ],
    "re-entrant": ["static_graph", "static_graph, no_sync"],
    "undefined gradients": list(OPTIONS),
    "undefined by batch": [option for option in OPTIONS if not option.startswith("static_graph")],
}
_PLAIN = [option for option in OPTIONS if not option.startswith("find, ")]
_LEFT_OUT = {
    # torch's compression has no kernel for these, and its PowerSGD takes no scalars.
    ("sparse embedding", "float16 hook"),
    ("sparse embedding", "bfloat16 hook"),
    ("sparse embedding", "PowerSGD hook"),
    ("complex", "PowerSGD hook"),
    ("mixed dtypes", "PowerSGD hook"),
    # Hooks do not know the divisor; see `sparse_by_dense_hook`.
    ("sparse embedding", "join, own divisor"),
    # Stock DDP shows hooks such gradients with their elements in the order of memory.
    ("channels last", "PowerSGD hook"),
    # There an exhausted rank keeps reporting the parameters of its last batch.
    ("unused by batch", "find, join"),
    ("undefined by batch", "find, join"),
}
CASES = [
    (model, option)
    for model in MODELS
    for option in _FLAGGED.get(model, _PLAIN)
    if (model, option) not in _LEFT_OUT
]


class Verdict(NamedTuple):
    """Differences between the runs of one rank; see `first_difference`."""

    from_stock: str
    from_one_process: str
    shots: int


def wrapper(
    ddp: Callable[..., nn.Module],
    option: Option,
    substitute: Callable[..., Any] | None = None,  # a hook for models without one
) -> Any:
    def wrap(module: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # `broadcast_buffers`
            model = ddp(module, **option.arguments)
        if option.hook is not None:
            model.register_comm_hook(*option.hook())
        elif substitute is not None:
            model.register_comm_hook(None, substitute)
        return model

    return wrap


def compare(rank: int, world_size: int, model_name: str, option_name: str) -> Verdict:
    model, option = MODELS[model_name], OPTIONS[option_name]
    batches = [[model.batch(r, step) for step in range(runs.STEPS)] for r in range(world_size)]
    own = batches[rank]
    if option.uneven:
        own = own[: runs.STEPS - 7 * rank]
    # The same transport, whose sums are the same bits.
    over_gloo = functools.partial(fddp.DistributedDataParallel, transport="c10d")
    by_dense = sparse_by_dense_hook if model_name == "sparse embedding" else None
    stock, ours = (
        runs.record(runs.built(model, rank), wrapped, option.loop, own)
        for wrapped in (wrapper(StockDDP, option, by_dense), wrapper(over_gloo, option))
    )
    apart = ""
    if model.per_row and option.exact and not option.uneven:
        alone = runs.record(
            runs.built(model, 0), runs.OneProcess, option.loop, runs.joined(batches)
        )
        apart = runs.first_difference(alone, ours, ROUNDING)
    return Verdict(runs.first_difference(stock, ours), apart, len(ours))


def compare_in_equal_buckets(
    rank: int, world_size: int, model_name: str, option_name: str
) -> Verdict:
    """The same where the control word travels by itself, and so makes no bucket longer."""
    with mock.patch("fddp.core.schedule.builder.with_piggybacked_word", lambda schedule: schedule):
        return compare(rank, world_size, model_name, option_name)


@pytest.mark.parametrize(("model", "option"), CASES, ids=map(", ".join, CASES))
def test_same_bits_as_stock(ranks: RankPool, model: str, option: str) -> None:
    for rank, verdict in enumerate(ranks.run(2, compare, model, option)):
        assert verdict.shots > 1
        assert not verdict.from_stock, f"rank {rank}, {verdict.from_stock}"
        assert not verdict.from_one_process, f"rank {rank}, {verdict.from_one_process}"


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("option", ["default", "small caps"])
@pytest.mark.parametrize("model", ["mlp", "transformer", "conv with batch norm", "mixed dtypes"])
def test_same_bits_on_other_numbers_of_ranks(
    ranks: RankPool, model: str, option: str, world_size: int
) -> None:
    # Sums of three depend on where elements lie in a bucket: the plans are the same, too.
    verdicts = ranks.run(world_size, compare_in_equal_buckets, model, option)
    assert [verdict.from_stock for verdict in verdicts] == [""] * world_size


def sparse_beside_dense(rank: int, world_size: int) -> str:
    """Compare parameters of the model with sparse gradients, and of its twin with dense ones."""
    model, option = MODELS["sparse embedding"], OPTIONS["join, own divisor"]
    own = [model.batch(rank, step) for step in range(runs.STEPS - 7 * rank)]
    wrapped = wrapper(functools.partial(fddp.DistributedDataParallel, transport="c10d"), option)
    found = []
    for sparse in (True, False):
        module = runs.built(model, 0)
        module.embedding.sparse = module.bag.sparse = sparse
        shots = runs.record(module, wrapped, option.loop, own)
        assert shots[0]["gradient bag.weight"].is_sparse == sparse
        found.append(
            [{path: shot[path] for path in shot if path.startswith("parameter")} for shot in shots]
        )
    return runs.first_difference(found[1], found[0], ROUNDING)


def test_own_divisor_with_sparse_gradients(ranks: RankPool) -> None:
    assert ranks.run(2, sparse_beside_dense) == ["", ""]
