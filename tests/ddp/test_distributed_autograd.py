"""Gradients of a wrapped module in contexts of distributed autograd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.autograd as dist_autograd
from torch import Tensor
from torch.distributed import rpc

from tests.support.ranks import run_fresh
from tests.support.wrapped_net import (
    DDP,
    TINY_CAP_MB,
    Net,
    assert_close,
    batch,
    grads,
    mean_of,
    net,
)

Layers = tuple[int, ...]


def steps_in_contexts(
    rank: int, world_size: int, shared_file: str, steps: list[tuple[Layers, Layers]]
) -> list[Any]:
    """Gradients of each step in its context, and those in `.grad` at the end."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{shared_file}")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    ddp = DDP(net(), bucket_cap_mb=TINY_CAP_MB, find_unused_parameters=True)
    found: list[Any] = []
    for number, through in enumerate(steps):
        with dist_autograd.context() as context:
            x = batch(rank, number).requires_grad_()
            loss = ddp(x * 1.0, through=through[rank]).square().mean()
            dist_autograd.backward(context, [loss])
            here = dist_autograd.get_gradients(context)
            found.append({n: here.get(p) for n, p in ddp.module.named_parameters()})
    found.append(grads(ddp.module))
    rpc.shutdown()
    return found


def test_ranks_without_a_gradient_get_the_mean(tmp_path: Path) -> None:
    steps: list[tuple[Layers, Layers]] = [
        ((0, 1), (0, 1)),
        ((0, 1), (0,)),
        ((1,), (0, 2)),
        ((2,), (1,)),
    ]
    outcomes = run_fresh(2, steps_in_contexts, str(tmp_path / "store"), steps)
    assert [outcome.error for outcome in outcomes] == [None, None]
    for outcome in outcomes:
        *found, outside = outcome.result
        assert not any(isinstance(grad, Tensor) for grad in outside.values())
        for number, through in enumerate(steps):

            def loss(model: Net, rank: int, number: int = number, through: Any = through) -> Tensor:
                x = batch(rank, number).requires_grad_()
                return model(x, through=through[rank]).square().mean()

            assert_close(found[number], mean_of(2, loss))
