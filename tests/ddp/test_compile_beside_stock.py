"""`torch.compile` of a wrapped module: the same graphs as with stock DDP, and the same numbers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.nn.parallel import DistributedDataParallel as StockDDP
from torch.utils.checkpoint import checkpoint

import fddp
from tests.support.endings import ending
from tests.support.models import rand
from tests.support.ranks import RankPool

WIDTH = 600
CAP_MB = 1.3  # less than a layer
CLASSES = (StockDDP, fddp.DistributedDataParallel)


class Layers(nn.Module):
    """Layers of a bucket each, within a context."""

    def __init__(self, context: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self.context = context
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            for layer in self.layers:
                x = torch.relu(layer(x))
        return x


class Checkpointed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cos(checkpoint(layer, x, use_reentrant=False))
        return x


class Trivial(Layers):
    """Ends in operations without parameters, and in one on a scalar."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = x @ layer.weight.t() + layer.bias
            x = hidden + torch.where(hidden < 0.5, 0.3, 0.6)
        return (x + x).tanh()


CASES: dict[str, Callable[[], nn.Module]] = {
    "plain": partial(Layers, nullcontext),
    "autocast": partial(Layers, partial(torch.autocast, "cpu", torch.bfloat16)),
    "with gradients": partial(Layers, torch.enable_grad),
    "without gradients": partial(Layers, torch.no_grad),
    "checkpointed": partial(Checkpointed, nullcontext),
    "trivial end": partial(Trivial, nullcontext),
}


#: of `make test`; the others run in `make nightly`
SAMPLE = ("plain", "without gradients", "checkpointed", "trivial end")


class Compiled(NamedTuple):
    graphs: list[int]  # operations in each
    output: Tensor
    grads: dict[str, Tensor | None]
    breaks: list[str]


def sized(sizes: list[int], graph: Any, _: Any) -> Any:
    sizes.append(len(graph.graph.nodes))
    return graph


def compiled(wrapped: Any, case: str, rank: int) -> Compiled:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = wrapped(CASES[case](), bucket_cap_mb=CAP_MB)
    sizes: list[int] = []
    x = rand(4, WIDTH, seed=rank, dtype=torch.float32)
    output = torch.compile(model, backend=partial(sized, sizes))(x)
    if output.requires_grad:
        output.square().sum().backward()
    grads = {name: param.grad for name, param in model.module.named_parameters()}
    breaks = [] if case == "checkpointed" else torch._dynamo.explain(model)(x).break_reasons
    return Compiled(sizes, output, grads, [str(why.reason) for why in breaks])


def both_compiled(rank: int, world_size: int, case: str) -> list[Compiled]:
    return [compiled(wrapped, case, rank) for wrapped in CLASSES]


@pytest.mark.parametrize(
    "case",
    [case if case in SAMPLE else pytest.param(case, marks=pytest.mark.nightly) for case in CASES],
)
def test_graphs_outputs_and_gradients(ranks: RankPool, case: str) -> None:
    for stock, ours in ranks.run(2, both_compiled, case, timeout_s=100.0):
        assert ours.graphs == stock.graphs
        assert len(ours.graphs) > 1 or case == "checkpointed"  # a checkpoint is not split
        assert ours.breaks == stock.breaks
        assert all("DDPOptimizer" in reason for reason in ours.breaks)
        torch.testing.assert_close(ours.output, stock.output, rtol=0, atol=0)
        assert ours.output.requires_grad == stock.output.requires_grad
        torch.testing.assert_close(ours.grads, stock.grads, rtol=0, atol=0)


def buckets_with_ignored(rank: int, world_size: int) -> list[list[list[str]]]:
    """Per class: names of the parameters in each of DDPOptimizer's buckets."""
    found = []
    for wrapped in CLASSES:
        torch._dynamo.reset()
        module = Layers(nullcontext)
        wrapped._set_params_and_buffers_to_ignore_for_model(module, ["layers.1.weight"])
        model = wrapped(module, bucket_cap_mb=CAP_MB)
        optimizer = DDPOptimizer(
            bucket_bytes_cap=model.bucket_bytes_cap, backend_compile_fn=partial(sized, [])
        )
        with torch._dynamo.config.patch(optimize_ddp=False):
            torch.compile(model, backend=optimizer.compile_fn)(torch.ones(1, WIDTH))
        found.append([bucket.params for bucket in optimizer.buckets])
    return found


def test_buckets_with_an_ignored_parameter(ranks: RankPool) -> None:
    for stock, ours in ranks.run(2, buckets_with_ignored):
        assert ours == stock
        assert len(ours) > 1


def replicas_compiled(
    rank: int, world_size: int
) -> list[tuple[list[int], dict[str, Tensor | None]]]:
    """Per class: graphs and gradients of a module under torch's `replicate`."""
    composable = importlib.import_module("torch.distributed._composable.replicate")
    found = []
    for wrapped in CLASSES:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Layers(nullcontext)
        sizes: list[int] = []
        with mock.patch.object(composable, "DistributedDataParallel", wrapped):
            model = composable.replicate(module, bucket_cap_mb=CAP_MB)
            run = torch.compile(model, backend=partial(sized, sizes))
            run(rand(4, WIDTH, seed=rank, dtype=torch.float32)).sum().backward()
        found.append((sizes, {name: p.grad for name, p in module.named_parameters()}))
    return found


def test_replicas(ranks: RankPool) -> None:
    for (graphs, stock), (_, ours) in ranks.run(2, replicas_compiled, timeout_s=100.0):
        assert len(graphs) > 1
        torch.testing.assert_close(ours, stock, rtol=0, atol=0)


def compiled_backward(rank: int, world_size: int) -> list[Any]:
    """Per class: the error in compiled autograd, and gradients without it."""
    found = []
    for wrapped in CLASSES:
        torch._dynamo.reset()
        model = wrapped(nn.Linear(2, 1, bias=False))
        x = torch.full((1, 2), rank + 1.0)
        loss = model(x).sum()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            error = ending(loss.backward)
        grads = []
        # Stock's reducer still waits for the backward pass that failed.
        for local in (True, False) if wrapped is not StockDDP else ():
            model.zero_grad()
            if local:
                with model.no_sync():
                    loss = model(x).sum()
                    with compiled_autograd._enable(torch.compile(backend="eager")):
                        loss.backward()
            else:
                model(x).sum().backward()
            grads.append(model.module.weight.grad.tolist())
        found.append((error.kinds[0], "ompiled autograd" in error.text, grads))
    return found


def test_compiled_autograd_is_refused(ranks: RankPool) -> None:
    for rank, (stock, ours) in enumerate(ranks.run(2, compiled_backward)):
        assert stock == ("RuntimeError", True, [])
        assert ours == ("TransformError", True, [[[rank + 1.0] * 2], [[1.5, 1.5]]])
