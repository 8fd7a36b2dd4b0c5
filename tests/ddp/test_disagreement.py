"""Modules that are not alike on all ranks, wrapped."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fddp
from tests.support.endings import Ending, ending
from tests.support.groups import rank_of
from tests.support.polling import PROMPT_S
from tests.support.ranks import launch_over


class Net(nn.Module):
    """One weight, a frozen one that may be missing, and buffers in the order of `buffers`."""

    def __init__(self, frozen: Tensor | None = None, **buffers: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        if frozen is not None:
            self.frozen = nn.Parameter(frozen.clone(), requires_grad=False)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


TWO, FIVE, SIX = torch.arange(2.0), torch.arange(5.0), torch.arange(6.0)
#: what rank 0 wraps, what rank 1 does, and what the error says
DIFFERENCES: dict[str, tuple[dict[str, Tensor], dict[str, Tensor], str]] = {
    "one more buffer on rank 0": (
        {"b": TWO},
        {},
        "'b' of the module is torch.float32 (2,) on rank 0 and missing on rank 1",
    ),
    "one more buffer on rank 1": ({}, {"b": TWO}, "missing on rank 0 and torch.float32 (2,)"),
    "a longer buffer": ({"b": FIVE}, {"b": TWO}, "(5,) on rank 0 and torch.float32 (2,) on rank 1"),
    "swapped lengths": ({"b": TWO, "c": FIVE}, {"b": FIVE, "c": TWO}, "'b' of the module is"),
    "another shape": (
        {"b": SIX.view(2, 3)},
        {"b": SIX.view(3, 2)},
        "(2, 3) on rank 0 and torch.float32 (3, 2) on rank 1",
    ),
    "another dtype": ({"b": TWO}, {"b": TWO.double()}, "torch.float64 (2,) on rank 1"),
    "another layout": (
        {"b": torch.eye(2)},
        {"b": torch.eye(2).to_sparse()},
        "and torch.float32 (2, 2), torch.sparse_coo on rank 1",
    ),
    "another name": ({"b": TWO}, {"c": TWO}, "'b' of the module is torch.float32 (2,) on rank 0"),
    "a longer frozen parameter": ({"frozen": FIVE}, {"frozen": TWO}, "'frozen' of the module is"),
    "a frozen parameter more": ({"frozen": FIVE}, {}, "(5,) on rank 0 and missing on rank 1"),
}


def wrap_each(group: Any) -> dict[str, Ending]:
    seen = {}
    for name, sides in DIFFERENCES.items():
        module = Net(**sides[rank_of(group)])
        seen[name] = ending(lambda: fddp.DistributedDataParallel(module, process_group=group))  # noqa: B023
    return seen


@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_different_modules_are_raised_before_any_communication(
    request: pytest.FixtureRequest, transport: str
) -> None:
    """gloo would end the process, or write one leaf's values into another's."""
    for seen in launch_over(transport, request)(2, wrap_each):
        for name, (_, _, text) in DIFFERENCES.items():
            assert seen[name].kinds[0] == "PlanMismatchError", (name, seen[name])
            assert text in seen[name].text
            assert "build the module alike on all ranks" in seen[name].text


def wrap_in_another_order(group: Any) -> tuple[list[float], list[float]]:
    rank = rank_of(group)
    buffers = {"b": TWO + rank, "c": 10 + TWO + rank}
    module = Net(**dict(reversed(buffers.items())) if rank else buffers)
    wrapped = fddp.DistributedDataParallel(module, process_group=group)
    wrapped(torch.tensor(1.0)).backward()
    module.b += rank
    wrapped(torch.tensor(1.0)).backward()
    return module.b.tolist(), module.c.tolist()


@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_the_order_of_buffers_does_not_count(
    request: pytest.FixtureRequest, transport: str
) -> None:
    outcome = launch_over(transport, request)(2, wrap_in_another_order)
    assert outcome == [([0.0, 1.0], [10.0, 11.0])] * 2


def change_buffers(group: Any, on: tuple[int, ...]) -> Any:
    """What a step gives after a buffer's shape has changed on these ranks."""
    module = Net(b=TWO, c=TWO.long())
    wrapped = fddp.DistributedDataParallel(module, process_group=group)
    wrapped(torch.tensor(1.0)).backward()
    if rank_of(group) in on:
        module.b = FIVE + rank_of(group)
    begin_s = time.perf_counter()
    error = ending(lambda: wrapped(torch.tensor(1.0)).backward())
    took_s = time.perf_counter() - begin_s
    fddp.psum(torch.ones(1), group)  # the others have ended their step, too
    return error.kinds[0], error.text, module.b.tolist(), took_s


@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_buffers_whose_shape_changes(request: pytest.FixtureRequest, transport: str) -> None:
    launch = launch_over(transport, request)
    for kinds, text, _, took_s in launch(2, change_buffers, (0,)):
        assert kinds == "DesyncError"
        assert "'b' of the module is torch.float32 (5,) on rank 0" in text
        assert took_s < PROMPT_S
    first, second = launch(2, change_buffers, (1,))
    assert (first[0], first[2]) == ("RankLostError", TWO.tolist())
    assert first[3] < PROMPT_S
    assert second[0] == "DesyncError"
    assert "(5,) on rank 1 and torch.float32 (2,) on rank 0; keep buffers alike" in second[1]
    for kinds, _, value, _ in launch(2, change_buffers, (0, 1)):
        assert (kinds, value) == ("no error", FIVE.tolist())
