"""What fddp's class warns of or refuses where stock DDP is silent."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.endings import ending, warnings_of
from tests.support.groups import impatient
from tests.support.on_ranks import on_processes, on_threads
from tests.support.wrapped_net import DDP


@on_processes(2)
def test_gradients_of_other_tensors_are_not_local_in_silence(rank: int, world_size: int) -> None:
    """Not on threads: levels of torch's forward mode are global to a process."""
    model = DDP(nn.Linear(2, 1, bias=False))
    x = torch.full((1, 2), rank + 1.0)

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, params, (x,)).sum()

    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    leaves = {name: param.clone().requires_grad_() for name, param in params.items()}

    def local() -> None:
        with model.no_sync():
            torch.func.grad(loss)(params)

    for number, (call, warns) in enumerate(
        [
            (lambda: torch.func.grad(loss)(params), True),
            (lambda: torch.func.jvp(loss, (params,), (params,)), True),
            (lambda: loss(leaves), True),
            (lambda: loss(params), False),
            (local, False),
            (lambda: torch.func.grad(lambda y: model(y).sum())(x), False),
        ]
    ):
        assert any("fddp.GradSync" in text for text in warnings_of(call)) == warns, number


@pytest.mark.slow
@on_threads(1)
def test_hooks_of_dropped_wrappers_do_not_pile_up(group: Any) -> None:
    """Two for each parameter and wrapper. Those of the wrapper dropped last stay."""
    module = nn.Linear(2, 1)
    model = DDP(module, process_group=group)
    hooks = model.steps.parameters.hooks
    assert hooks.hook_count() == 4
    for _ in range(5):
        other = DDP(module, process_group=group)
        other(torch.ones(1, 2)).sum().backward()
        del other
        gc.collect()
        assert hooks.hook_count() == 8


class Lazy(nn.Linear):
    def forward(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        out = super().forward(x)
        return lambda: out


@pytest.mark.parametrize(
    ("module", "is_grad", "warns"),
    [(Lazy, True, True), (Lazy, False, False), (nn.Linear, True, False)],
)
@on_threads(1)
def test_outputs_that_hide_their_tensors_bring_a_warning(
    group: Any, module: Any, is_grad: bool, warns: bool
) -> None:
    model = DDP(module(2, 1), process_group=group)
    with torch.set_grad_enabled(is_grad):
        texts = warnings_of(partial(model, torch.ones(1, 2)))
    assert any("hides its tensors" in text for text in texts) == warns


@on_threads(2)
def test_a_graph_that_does_not_change_may_be_declared_static(group: Any) -> None:
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    module.forward = lambda x, used: module[used](x)
    model = DDP(module, process_group=group, find_unused_parameters=True)
    assert "can_set_static_graph" not in model._get_ddp_logging_data()
    for used, can_set in ((0, 1), (0, 1), (1, 0)):
        model(torch.ones(1, 2), used).sum().backward()
        assert model._get_ddp_logging_data()["can_set_static_graph"] == can_set


@on_threads(2)
def test_modules_that_differ_are_refused_on_all_ranks(group: Any) -> None:
    module = nn.Linear(2, 2, bias=group.rank == 0)
    text = ending(partial(DDP, module, process_group=group)).text
    assert "_set_params_and_buffers_to_ignore_for_model of a wrapped module" in text
    assert "rank 0 has" in text
    assert "rank 1 has" in text


@on_processes(2)
def test_a_wrapper_that_waits_is_named(rank: int, world_size: int) -> None:
    group = impatient()
    model = DDP(nn.BatchNorm1d(2), init_sync=False, process_group=group)
    if rank == 0:  # it alone synchronises buffers
        text = ending(lambda: model(torch.ones(2, 2))).text
        assert text.startswith(
            "opening a DistributedDataParallel on rank 0 of 2: rank 1 did not open"
        )
    dist.barrier()
