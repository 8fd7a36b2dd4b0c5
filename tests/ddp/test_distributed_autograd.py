"""Gradients of a wrapped module in contexts of distributed autograd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor
from torch.distributed import rpc

from tests.support.groups import init_rpc
from tests.support.parity_models import UndefinedGradients
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
    rank: int, world_size: int, shared_file: str, steps: list[tuple[Layers, Layers]], manual: bool
) -> list[Any]:
    """Gradients of each step in its context, and those in `.grad` at the end."""
    init_rpc(rank, shared_file)
    ddp = DDP(net(), bucket_cap_mb=TINY_CAP_MB, find_unused_parameters=True)
    ddp.require_manual_backward_finalization = manual
    found: list[Any] = []
    for number, through in enumerate(steps):
        with dist_autograd.context() as context:
            x = batch(rank, number).requires_grad_()
            loss = ddp(x * 1.0, through=through[rank]).square().mean()
            dist_autograd.backward(context, [loss])
            if manual:
                ddp.finalize_backward()
            here = dist_autograd.get_gradients(context)
            found.append({n: here.get(p) for n, p in ddp.module.named_parameters()})
    found.append(grads(ddp.module))
    rpc.shutdown()
    return found


@pytest.mark.parametrize("manual", [False, True])
def test_ranks_without_a_gradient_get_the_mean(tmp_path: Path, manual: bool) -> None:
    steps: list[tuple[Layers, Layers]] = [
        ((0, 1), (0, 1)),
        ((0, 1), (0,)),
        ((1,), (0, 2)),
        ((2,), (1,)),
    ]
    outcomes = run_fresh(2, steps_in_contexts, str(tmp_path / "store"), steps, manual)
    assert [outcome.error for outcome in outcomes] == [None, None]
    for outcome in outcomes:
        *found, outside = outcome.result
        assert not any(isinstance(grad, Tensor) for grad in outside.values())
        for number, through in enumerate(steps):

            def loss(model: Net, rank: int, number: int = number, through: Any = through) -> Tensor:
                x = batch(rank, number).requires_grad_()
                return model(x, through=through[rank]).square().mean()

            assert_close(found[number], mean_of(2, loss))


def undefined_in_a_context(rank: int, world_size: int, shared_file: str) -> list[dict[str, Any]]:
    """Gradients in a context and in `.grad`, of a module where some are undefined."""
    init_rpc(rank, shared_file)
    torch.manual_seed(0)
    ddp = DDP(UndefinedGradients(by_batch=False))
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [ddp(batch(rank)).square().mean()])
        here = dist_autograd.get_gradients(context)
        in_context = {n: here.get(p) for n, p in ddp.module.named_parameters()}
    ddp(batch(rank)).square().mean().backward()
    rpc.shutdown()
    return [in_context, grads(ddp.module)]


def test_undefined_gradients_in_a_context_are_zeros(tmp_path: Path) -> None:
    # Stock DDP fails in an internal assertion of torch here.
    for outcome in run_fresh(2, undefined_in_a_context, str(tmp_path / "store")):
        assert outcome.error is None
        in_context, outside = outcome.result
        assert not outside["scales.1"].any()
        assert_close(in_context, outside)


def weighted_in_a_context(rank: int, world_size: int, shared_file: str) -> str:
    """Text of the error of a weighted pass in a context."""
    init_rpc(rank, shared_file)
    ddp = DDP(net())
    text = ""
    with dist_autograd.context() as context, ddp.weighted(1 + rank):
        try:
            dist_autograd.backward(context, [ddp(batch(rank)).square().mean()])
        except Exception as error:
            text = str(error)
    rpc.shutdown()
    return text


def test_weights_in_a_context_are_refused(tmp_path: Path) -> None:
    for outcome in run_fresh(2, weighted_in_a_context, str(tmp_path / "store")):
        assert outcome.error is None
        assert "distributed autograd can't be weighted; leave out weighted()" in outcome.result
