"""Communication hooks of a wrapped module: as with stock DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel as StockDDP

import tests.support.parity_runs as runs
from tests.support.beside_stock import DDP, STEPS, assert_same_as_stock, training
from tests.support.parity_models import MODELS, Model, loss_of, mlp, rows
from tests.support.ranks import RankPool

SPARSE = MODELS["sparse embedding"]


def local_after_two_steps(model: Any) -> None:
    alone, _ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


def doubled(state, bucket):  # type: ignore[no-untyped-def]  # stock rejects quoted annotations
    """A hook that replaces the buffer of each bucket, and writes the old one."""
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer() * 2)
    bucket.buffer().zero_()
    return future


REGISTER: dict[str, Callable[[Any], None]] = {
    "all-reduce": lambda model: model.register_comm_hook(None, default_hooks.allreduce_hook),
    "no-op": lambda model: model.register_comm_hook(None, debugging_hooks.noop_hook),
    "local SGD": local_after_two_steps,
    "doubled": lambda model: model.register_comm_hook(None, doubled),
}


def sparse(ddp: DDP, rank: int, name: str) -> Iterator[runs.Shot]:
    """Sparse gradients beside dense ones; two of the three buckets are sparse."""
    module = runs.built(SPARSE, rank)
    model = ddp(module)
    REGISTER[name](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(SPARSE.batch(rank, step))).backward()
        for table in (module.embedding.weight, module.bag.weight):
            table.grad = table.grad.coalesce()  # ours is
        yield runs.shot(module)
        optimizer.step()


@pytest.mark.parametrize("name", REGISTER)
def test_sparse_gradients(ranks: RankPool, name: str) -> None:
    assert_same_as_stock(ranks, partial(sparse, name=name))


def looked_at(ddp: DDP, rank: int) -> Iterator[Any]:
    """What a hook sees of sparse buckets and of dense ones."""
    seen: list[Any] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # stock rejects quoted annotations
        buffer, (param, *_) = bucket.buffer(), bucket.parameters()
        numbers = buffer.to_dense() if buffer.is_sparse else buffer
        views = [view.tolist() for view in bucket.gradients()]
        seen.append((param.shape, buffer.is_sparse, numbers.tolist(), views))
        return debugging_hooks.noop_hook(state, bucket)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(2, 4, sparse=True)
            self.image = nn.Conv2d(2, 3, (1, 2), bias=False)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.image(self.table(words).view(1, 2, 1, 2)).sum()

    torch.manual_seed(0)
    model = ddp(Both())
    model.register_comm_hook(None, hook)
    model(torch.tensor([rank])).backward()
    yield sorted(seen, key=str)
    yield runs.shot(model.module)


def test_buckets_look_the_same(ranks: RankPool) -> None:
    assert_same_as_stock(ranks, looked_at)


def halved(ddp: DDP, rank: int, dtype: torch.dtype) -> Iterator[runs.Shot]:
    module = runs.built(Model(lambda: mlp().to(dtype), rows), rank)
    model = ddp(module) if ddp is StockDDP else ddp(module, transport="c10d")
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    batches = [rows(rank, step).to(dtype) for step in range(STEPS)]
    return training(model, torch.optim.SGD(model.parameters(), lr=0.1), batches, module)


def joined(ddp: DDP, rank: int) -> Iterator[runs.Shot]:
    model = ddp(nn.Linear(1, 1, bias=False))
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    with model.join(divide_by_initial_world_size=False):
        for step in range(1 + rank):
            model.zero_grad()
            model(torch.full((1, 1), 0.1 + step)).sum().backward()
            yield runs.shot(model.module) if rank else {}


def test_builtin_float16_within_join(ranks: RankPool) -> None:
    assert_same_as_stock(ranks, joined)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_builtin_float16(ranks: RankPool, dtype: torch.dtype) -> None:
    assert_same_as_stock(ranks, partial(halved, dtype=dtype), world_size=3)
