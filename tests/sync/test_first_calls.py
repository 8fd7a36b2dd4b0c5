"""Calls that newcomers try: they work, or the error says what to write."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import nn

import fddp
from tests.support.endings import ending


def network() -> nn.Module:
    layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    layers[0].requires_grad_(False)
    return layers


def trained(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def test_a_module_stands_for_its_trained_parameters() -> None:
    module = network()
    plan = fddp.plan_buckets(module)
    assert plan == fddp.plan_buckets(trained(module))
    assert plan.paths == ("1.bias", "1.weight", "2.bias", "2.weight")
    ready_s = dict.fromkeys(plan.paths, 0.01)
    by_model = fddp.plan_optimal(module, ready_s, fddp.PRESETS["nvlink4"])
    assert by_model == fddp.plan_optimal(trained(module), ready_s, "nvlink4")


def test_grad_sync_of_a_module() -> None:
    def mean(group: Any) -> tuple[Any, Any, str]:
        module = network()
        with fddp.GradSync(module, group=group) as sync:
            grads = {
                name: torch.full_like(p, 1.0 + group.rank) for name, p in trained(module).items()
            }
            return sync.plan, sync(grads), ending(lambda: sync(module)).text

    for plan, grads, text in fddp.loopback(2, mean):
        assert plan == fddp.plan_buckets(network())
        assert all((grad == 1.5).all() for grad in grads.values())
        assert "For a module, pass the tensors by name: dict(module.named_parameters())" in text


def test_a_frozen_module_has_nothing_to_plan() -> None:
    text = "the Linear has 2 parameters, and none with requires_grad; set it"
    with pytest.raises(fddp.NoGradientError, match=text):
        fddp.plan_buckets(nn.Linear(2, 2).requires_grad_(False))


def lazy_on(ranks: Collection[int], rank: int) -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3) if rank in ranks else nn.Linear(2, 3))


CALLS: dict[str, Callable[[nn.Module, Any], object]] = {
    "GradSync": lambda module, group: fddp.GradSync(module, group=group),
    "broadcast": lambda module, group: fddp.broadcast(module, group=group),
    "check_replicas": fddp.check_replicas,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("lazy", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_lazy_modules_name_the_way_out_on_every_rank(name: str, lazy: tuple[int, ...]) -> None:
    def call(group: Any) -> str:
        module = lazy_on(lazy, group.rank)
        return str(ending(lambda: CALLS[name](module, group)).text)

    for text in fddp.loopback(2, call):
        assert "leaf '0.bias' " in text
        assert "has no shape yet; run one forward pass through the lazy module first" in text


def test_a_plan_of_a_lazy_module_names_the_way_out() -> None:
    module = lazy_on((0,), 0)
    for tree in (module, dict(module.named_parameters())):
        with pytest.raises(TypeError, match=r"leaf '0\.bias' is a torch.*run one forward pass"):
            fddp.plan_buckets(tree)
    module(torch.ones(1, 2))
    assert fddp.plan_buckets(module).paths == ("0.bias", "0.weight")


def test_replicas_of_a_module_are_its_parameters() -> None:
    def check(group: Any) -> tuple[str, str]:
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)
        for param in module.parameters():
            param.zero_()
        module[1].running_mean += group.rank
        alike = ending(lambda: fddp.check_replicas(module, group)).text
        module[0].bias += group.rank
        return str(alike), str(ending(lambda: fddp.check_replicas(module, group)).text)

    for alike, differ in fddp.loopback(2, check):
        assert alike == ""
        assert "replicas differ, first in leaf '0.bias'" in differ


def test_broadcast_of_a_module_has_frozen_parameters_too() -> None:
    def send(group: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        module = nn.Linear(2, 2).requires_grad_(False)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(group.rank)
        return fddp.broadcast(module, 1, group=group), dict(module.named_parameters())

    for sent, own in fddp.loopback(2, send):
        assert sent.keys() == own.keys()
        assert all((value == 1.0).all() for value in sent.values())


def test_number_of_ranks_is_a_topology() -> None:
    plan = fddp.plan_buckets(network())
    assert fddp.make_schedule(plan, 4) == fddp.make_schedule(plan, fddp.Topology(world=4))


@pytest.mark.parametrize("cost", ["nvlink4", {"world": "nvlink4"}])
def test_preset_by_name(cost: Any) -> None:
    schedule = fddp.make_schedule(fddp.plan_buckets(network()), 4)
    ready_s = [0.01] * 4
    by_model = fddp.simulate(schedule, fddp.PRESETS["nvlink4"], ready_s)
    assert fddp.simulate(schedule, cost, ready_s) == by_model


PLAN = fddp.plan_buckets({"w": torch.zeros(4)})


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: fddp.make_schedule({"w": 1}, 4),
            "make_schedule(fddp.plan_buckets(tree), topology)",
        ),
        (lambda: fddp.make_schedule(PLAN, "4"), "Topology(host=4, local=8), or a number of ranks"),
        (lambda: fddp.make_schedule(PLAN, True), "or a number of ranks, got a bool"),
        (
            lambda: fddp.simulate(PLAN, "nvlink4", [0.01]),
            "write simulate(fddp.make_schedule(plan, ranks), cost, ready_times_s)",
        ),
        (
            lambda: fddp.simulate(fddp.make_schedule(PLAN, 4), "nvlink", [0.01]),
            "cost must be a CostModel or one of the presets internet-100m",
        ),
        (
            lambda: fddp.simulate(fddp.make_schedule(PLAN, 4), 1e-9, [0.01]),
            "gloo-loopback, got 1e-09",
        ),
    ],
)
def test_errors_of_plans_and_schedules(call: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        call()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda step, p: step(params=p),
            "as in step(params, ...), at argnums=0; got 0 arguments by",
        ),
        (lambda step, p: step(p, accumulated=p), "write accumulated=(tree, weight)"),
    ],
)
def test_errors_of_steps(call: Any, text: str) -> None:
    def train(group: Any) -> tuple[Any, float]:
        params = {"w": torch.ones(2)}
        with fddp.GradSync(params, group=group) as sync:
            step = sync.value_and_grad(lambda params: params["w"].sum())
            wrong = ending(lambda: call(step, params) if group.rank == 0 else step(params))
            return wrong, step(params)[0].item()  # still usable

    (first, loss), (second, _) = fddp.loopback(2, train)
    assert first.kinds[0] == "TypeError"
    assert text in first.text
    assert second.kinds[0] == "PeerError"
    assert loss == 2.0


def test_unpacking_a_missing_batch_says_what_to_write() -> None:
    def train(group: Any) -> Any:
        params = {"w": torch.ones(2)}
        batches = [(1.0, 2.0)] * (1 + group.rank)
        with fddp.GradSync(params, group=group) as sync:
            step = sync.value_and_grad(lambda p, batch: p["w"].sum() * batch[0])

            def unpacked() -> None:
                for x, y in fddp.uneven(batches, sync):
                    step(params, (x, y))

            return ending(unpacked)

    first, second = fddp.loopback(2, train)
    assert first.kinds[0] == "TypeError"
    assert "`for batch in fddp.uneven(...): step(params, batch)`" in first.text
    assert "FddpError" in second.kinds
