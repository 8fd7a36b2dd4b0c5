"""Delayed parameters: averaged together once another one's gradient is there."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable

import fddp
from fddp.ddp.delayed_all_reduce import Delayed
from tests.support.endings import ending
from tests.support.groups import rank_of
from tests.support.models import rand, same_bits


def at_end_of_backward(what: Any) -> None:
    Variable._execution_engine.queue_callback(what)  # type: ignore[attr-defined]


_SEEDING = threading.Lock()  # ranks may be threads, which share torch's generator


def model(rank: int) -> nn.Sequential:
    with _SEEDING:
        torch.manual_seed(rank)
        return nn.Sequential(
            nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 1).double(), nn.Linear(1, 1)
        )


def delayed_of(module: nn.Sequential, group: Any, at_end: Any = at_end_of_backward) -> Delayed:
    """All but the first layer, whose gradients come last."""
    named = [(n, p) for n, p in module.named_parameters() if not n.startswith("0.")]
    return Delayed(named, module[0].weight, group, at_end=at_end)


def loss(module: nn.Sequential, rank: int, number: int) -> Tensor:
    hidden = module[1](module[0](rand(5, 3, seed=10 * number + rank).float()))
    total = module[2](hidden.double()).square().sum()
    assert isinstance(total, Tensor)
    return total


def grads(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def own_grads(rank: int, numbers: list[int]) -> dict[str, Tensor | None]:
    """Of one process that starts from rank 0's delayed parameters and its own others."""
    module = model(0)
    module[0].load_state_dict(model(rank)[0].state_dict())
    for number in numbers:
        loss(module, rank, number).backward()
    return grads(module)


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_mean_over_ranks(world_size: int) -> None:
    own = [own_grads(rank, [0]) for rank in range(world_size)]
    for rank, (result, parameters) in enumerate(fddp.loopback(world_size, one_step)):
        for name, grad in result.items():
            if name.startswith("0."):
                assert same_bits([grad, own[rank][name]])
            elif name.startswith("3."):
                assert grad is None
            else:
                expected = sum(g for each in own if (g := each[name]) is not None) / world_size
                torch.testing.assert_close(grad, expected)
        started = dict(model(0).named_parameters())
        for name, value in parameters.items():
            assert same_bits([value, started[name].detach()]) == (
                rank == 0 or not name.startswith("0.")
            )


def one_step(group: Any) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    module = model(rank_of(group))
    delayed = delayed_of(module, group)
    loss(module, rank_of(group), 0).backward()
    delayed.close()
    return grads(module), {n: p.detach() for n, p in module.named_parameters()}


def test_gradients_gather_until_the_trigger_has_its_own() -> None:
    own = [own_grads(rank, [0, 1, 2]) for rank in range(2)]
    for result, averages in fddp.loopback(2, three_backwards):
        assert averages == [0, 0, 1]
        for name in ("1.weight", "1.bias", "2.weight", "2.bias"):
            first, second = own[0][name], own[1][name]
            assert first is not None
            assert second is not None
            torch.testing.assert_close(result[name], (first + second) / 2)


def three_backwards(group: Any) -> tuple[dict[str, Tensor | None], list[int]]:
    """Only the third one reaches the trigger; how many averages there were after each."""
    rank, count, seen = rank_of(group), 0, []

    def at_end(what: Any) -> None:
        nonlocal count
        count += 1
        at_end_of_backward(what)

    module = model(rank)
    delayed = delayed_of(module, group, at_end)
    for number in range(3):
        module[0].requires_grad_(number == 2)
        loss(module, rank, number).backward()
        seen.append(count)
    delayed.close()
    return grads(module), seen


def test_gradients_keep_their_tensors() -> None:
    def run(group: Any) -> None:
        module = model(group.rank)
        delayed = delayed_of(module, group)
        loss(module, group.rank, 0).backward()
        first = module[1].weight.grad
        loss(module, group.rank, 1).backward()
        delayed.close()
        assert module[1].weight.grad is first

    fddp.loopback(2, run)


def test_a_rank_without_some_gradient_gets_the_mean() -> None:
    def run(group: Any) -> Any:
        module = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
        for layer in module:
            nn.init.ones_(layer.weight)
        named = [("1", module[1].weight)]
        delayed = Delayed(named, module[0].weight, group, at_end=at_end_of_backward)
        total = module[0](torch.ones(1, 2)).sum()
        if group.rank == 1:
            total = total + module[1](torch.full((1, 2), 2.0)).sum()
        total.backward()
        delayed.close()
        return module[1].weight.grad.tolist()

    assert fddp.loopback(2, run) == [[[1.0, 1.0]]] * 2


def test_sparse_gradients() -> None:
    def run(group: Any) -> Any:
        words, out = nn.Embedding(3, 2, sparse=True), nn.Linear(2, 1, bias=False)
        nn.init.ones_(out.weight)
        delayed = Delayed(
            [("words", words.weight)],
            out.weight,
            group,
            sparse=["words", "of another module"],
            at_end=at_end_of_backward,
        )
        out(words(torch.tensor([group.rank]))).sum().backward()
        delayed.close()
        return words.weight.grad.to_dense()[:, 0].tolist()

    assert fddp.loopback(2, run) == [[0.5, 0.5, 0.0]] * 2


def test_a_trigger_without_gradient_is_refused() -> None:
    module = nn.Linear(2, 2)
    trigger = nn.Parameter(torch.zeros(3), requires_grad=False)
    end = fddp.loopback(
        1,
        lambda group: ending(
            lambda: Delayed(module.named_parameters(), trigger, group, at_end=at_end_of_backward)
        ),
    )[0]
    assert end.kinds[0] == "ValueError"
    assert "param_to_hook_all_reduce, of shape (3,), does not require a gradient" in end.text


def test_ranks_must_delay_the_same_parameters() -> None:
    def run(group: Any) -> str:
        module = nn.Linear(2, 1 + group.rank)
        named = module.named_parameters()
        end = ending(lambda: Delayed(named, module.weight, group, at_end=at_end_of_backward))
        return end.kinds[0]

    assert fddp.loopback(2, run) == ["PlanMismatchError"] * 2


def test_parameters_do_not_keep_it_alive() -> None:
    assert fddp.loopback(1, let_go) == [None]


def let_go(group: Any) -> None:
    module = model(0)
    gc.disable()
    try:
        delayed = delayed_of(module, group)
        reference = weakref.ref(delayed)
        del delayed
        assert reference() is None
    finally:
        gc.enable()
    loss(module, 0, 0).backward()
