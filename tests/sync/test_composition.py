"""Steps that are compiled or nested, that share things, or run under other defaults."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fddp


def params() -> dict[str, Tensor]:
    return {"a": torch.ones(2), "b": torch.ones(3)}


def loss_fn(p: dict[str, Tensor], x: float) -> Tensor:
    return x * (p["a"].sum() * p["b"].sum())


def test_steps_inside_compiled_functions() -> None:
    def run(group: Any) -> Any:
        with fddp.GradSync(params(), group=group) as sync:
            step = sync.value_and_grad(loss_fn)

            @torch.compile(backend="eager")
            def train(p: dict[str, Tensor], x: float) -> Any:
                _, grads = step(p, x)
                grads = sync(grads)
                return {name: p[name] - 0.5 * grads[name] for name in p}

            return train(params(), 1.0 + group.rank)

    (result,) = fddp.loopback(1, run)
    assert result["a"].tolist() == [-0.5, -0.5]
    assert result["b"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("where", ["hook", "checkpoint"])
def test_a_step_during_backward_of_another_is_refused(where: str) -> None:
    def run(group: Any) -> tuple[str, list[float]]:
        with fddp.GradSync(params(), group=group) as sync:
            inner = sync.value_and_grad(loss_fn)

            def outer_fn(p: dict[str, Tensor]) -> Tensor:
                if group.rank == 0 and where == "hook":
                    p["a"].register_hook(lambda grad: inner(params(), 1.0) and grad)
                if where == "hook":
                    return loss_fn(p, 1.0)

                def layer(x: Tensor) -> Tensor:
                    if group.rank == 0 and torch.is_grad_enabled():
                        inner(params(), 1.0)
                    return x * p["b"].sum()

                x = p["a"].sum()
                return checkpoint(layer, x, use_reentrant=True)

            with pytest.raises((fddp.ReentryError, fddp.PeerError)) as info:
                sync.value_and_grad(outer_fn)(params())
            if group.rank == 0:
                text = "rank 0 at step 0: a step was called on rank 0 while"
                assert str(info.value).startswith(text)
            return type(info.value).__name__, sync(params())["a"].tolist()

    assert fddp.loopback(2, run) == [("ReentryError", [1.0, 1.0]), ("PeerError", [1.0, 1.0])]


def test_local_results_never_change() -> None:
    def run(group: Any) -> None:
        kept: list[Tensor] = []

        def keeping(p: dict[str, Tensor]) -> Tensor:
            kept.append(3.0 * p["a"].sum())
            return kept[0] + p["b"].sum()

        select = "b".__eq__
        with fddp.GradSync(params(), group=group, select=select) as sync:
            _, grads = sync.value_and_grad(keeping)(params())
        before = grads["a"].clone()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            kept[0].backward()
        (2.0 * kept[0].detach()).requires_grad_().backward()
        assert torch.equal(grads["a"], before)

    fddp.loopback(2, run)


def test_errors_travel_between_processes() -> None:
    error = fddp.PeerError("rank 1 failed", {1: "ValueError: bad"})
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.failures) == (str(error), error.failures)
    lost = pickle.loads(pickle.dumps(fddp.RankLostError("gone", (2,))))
    assert (str(lost), lost.ranks) == ("gone", (2,))


@pytest.mark.parametrize("checkpoints", [0, 1, 2])
def test_leaves_of_others_that_ranks_share(checkpoints: int) -> None:
    """Inside so many nested checkpoints; their gradients stay."""
    shared = torch.ones(2, requires_grad=True)
    shared.grad = before = torch.full((2,), 9.0)

    def layer(h: Tensor) -> Tensor:
        return (h * shared).sum()

    for _ in range(checkpoints):
        layer = functools.partial(checkpoint, layer, use_reentrant=True)

    def run(group: Any) -> None:
        with fddp.GradSync(params(), group=group) as sync:
            step = sync.value_and_grad(lambda p: layer(p["a"].clone()) + p["b"].sum())
            for _ in range(30):
                assert step(params())[1]["a"].tolist() == [1.0, 1.0]

    fddp.loopback(3, run)
    assert shared.grad is before
    assert shared.grad.tolist() == [9.0, 9.0]


def test_default_device_and_dtype_of_the_caller() -> None:
    def run(group: Any) -> None:
        table = torch.ones(4, 2, device="cpu", dtype=torch.float32)
        tree = {"table": table, "w": torch.ones(2, device="cpu", dtype=torch.float32)}
        with fddp.GradSync(tree, group=group, sparse=["table"]) as sync:
            for _ in fddp.uneven([1] * (1 + group.rank), sync):
                grads = sync(tree)
                assert grads["table"].to_dense().tolist() == table.tolist()
                assert grads["w"].tolist() == [1.0, 1.0]

    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        fddp.loopback(2, run)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


class _OwnCheckpoint(torch.autograd.Function):
    """Runs `layer` again in backward, as home-made checkpoints do."""

    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            torch.autograd.backward(ctx.layer(own), grad)
        return None, own.grad


@pytest.mark.parametrize("leads_to_a_parameter", [True, False])
def test_home_made_checkpoints(leads_to_a_parameter: bool) -> None:
    outside = torch.ones(2, requires_grad=True)
    outside.grad = torch.full((2,), 9.0)

    def run(group: Any) -> Any:
        def home_made(p: dict[str, Tensor]) -> Tensor:
            x = p["a"].clone() if leads_to_a_parameter else torch.ones(2, requires_grad=True)
            hidden = _OwnCheckpoint.apply(lambda h: h * outside * p["b"].sum(), x)
            return hidden.sum() + 0.0 * outside.sum()

        with fddp.GradSync(params(), group=group) as sync:
            return sync.value_and_grad(home_made)(params())[1]

    for grads in fddp.loopback(2, run):
        assert grads["b"].tolist() == [2.0] * 3
        if leads_to_a_parameter:
            assert grads["a"].tolist() == [3.0, 3.0]
    assert outside.grad.tolist() == [9.0, 9.0]
