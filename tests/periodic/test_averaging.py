"""Averages of parameters: what they are, and when they are due."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from torch.distributed.device_mesh import init_device_mesh

import fddp
from fddp.averaging import Averager, Periodic, average
from tests.support.endings import Ending, ending
from tests.support.groups import rank_of
from tests.support.models import rand, same_bits
from tests.support.ranks import Launch, RankPool
from tests.support.unsupported_tensors import Rounding

# What


def tree(rank: int) -> Any:
    return {
        "layers": [
            OrderedDict(w=rand(3, 4, seed=rank), b=rand(4, seed=10 + rank).float()),
            (rand(2, 2, seed=20 + rank).to(torch.complex128),),
        ],
        "seen": torch.tensor(rank),
        "none": None,
    }


def mean(world_size: int, weights: list[float] | None = None) -> Any:
    """In one process."""
    weights = weights or [1.0] * world_size
    trees = [tree(rank) for rank in range(world_size)]

    def of_leaves(*leaves: Tensor) -> Tensor:
        total = sum(w * leaf for w, leaf in zip(weights, leaves, strict=True))
        assert isinstance(total, Tensor)
        return total / sum(weights)

    return fddp.tree_map(of_leaves, *trees)


def check_mean(results: list[Any], expected: Any) -> None:
    for rank, result in enumerate(results):
        assert result["seen"] == rank
        assert result["none"] is None
        result["seen"] = expected["seen"]
        torch.testing.assert_close(result, expected)
    assert same_bits(results)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_average_matches_one_process(launch: Launch, world_size: int) -> None:
    check_mean(launch(world_size, averaged, None), mean(world_size))


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_of_weight_0_keeps_its_nan_to_itself(launch: Launch, world_size: int) -> None:
    """And gets the mean of the others. Without a weight its NaN is everybody's."""
    for found in launch(world_size, spoiled):
        whole, weighted, in_place = found
        assert all(leaf.isnan().all() for leaf in whole.values())
        assert same_bits([weighted, in_place])
        expected = sum(r for r in range(world_size) if r != 1) / (world_size - 1)
        assert all((leaf == expected).all() for leaf in weighted.values())


def spoiled(group: Any) -> Any:
    rank = rank_of(group)
    value = float("nan") if rank == 1 else float(rank)
    own = {"w": torch.full((3,), value), "c": torch.full((2,), value, dtype=torch.complex64)}
    sound = all(bool(leaf.isfinite().all()) for leaf in own.values())
    in_place = fddp.tree_map(torch.clone, own)
    with Averager(own, Periodic(1), group=group) as averager:
        whole = averager.average(own, 0)
        weighted = averager.average(own, 1, weight=float(sound))
        averager.average_(in_place, 2, weight=float(sound))
    return whole, weighted, in_place


def averaged(group: Any, weights: list[float] | None) -> Any:
    rank = rank_of(group)
    own = tree(rank)
    result = average(own, group=group, weight=weights[rank] if weights else 1.0)
    assert same_bits([own, tree(rank)])
    return result


@pytest.mark.parametrize("world_size", [2, 4])
def test_averaging_twice_is_averaging_once(launch: Launch, world_size: int) -> None:
    # Divided by a power of two: to the bit.
    for once, twice in launch(world_size, repeated):
        assert same_bits([once, twice])


def repeated(group: Any) -> tuple[Any, Any]:
    once = average(tree(rank_of(group)), group=group)
    return once, average(once, group=group)


def test_only_due_averages_are_taken() -> None:
    for results in fddp.loopback(2, over_steps):
        due = [step for step, same in enumerate(results) if same]
        assert due == [1, 4]


def over_steps(group: Any) -> list[bool]:
    """For each step, whether ranks agree after it."""
    agree = []
    with Averager(tree(0), Periodic(3, warmup_steps=1), group=group) as averager:
        for step in range(6):
            own = tree(group.rank)
            result = averager.average(own, step)
            assert (result is own) == (not averager.when.due(step))
            w = result["layers"][0]["w"]
            agree.append(bool(torch.equal(w, fddp.broadcast(w, group=group))))
    votes = average({"agree": torch.tensor(agree, dtype=torch.float64)}, group=group)
    return [bool(vote == 1) for vote in votes["agree"]]


def test_the_mean_is_written_bit_by_bit() -> None:
    """Whatever the class of a tensor makes of `copy_`."""

    def run(group: Any) -> list[float]:
        params = {"w": (torch.tensor([0.3, 1.2]) + group.rank).as_subclass(Rounding)}
        with Averager(params, Periodic(1), group=group) as averager:
            averager.average_(params, 0)
        return params["w"].as_subclass(Tensor).tolist()

    first, second = fddp.loopback(2, run)
    assert first == second
    assert first == pytest.approx([0.8, 1.7])


@pytest.mark.parametrize("by_name", [True, False])
def test_a_module_is_averaged_in_place(by_name: bool) -> None:
    for ids_kept, weights in fddp.loopback(2, lambda group: in_place(group, by_name=by_name)):
        assert ids_kept
        torch.testing.assert_close(weights, torch.full((2, 2), 0.5))


def in_place(group: Any, *, by_name: bool) -> tuple[bool, Tensor]:
    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, group.rank)
    parameters: Any = dict(module.named_parameters()) if by_name else module
    before = [id(p) for p in module.parameters()]
    with Averager(parameters, Periodic(2), group=group) as averager:
        averager.average_(parameters, 1)
        assert module.weight.eq(group.rank).all()
        averager.average_(parameters, 2)
    assert module.weight.requires_grad
    assert module.weight.grad is None
    return before == [id(p) for p in module.parameters()], module.weight.detach()


@pytest.mark.parametrize("launch", ["shm"], indirect=True)
def test_averages_are_no_memory_that_ranks_share(launch: Launch) -> None:
    """A forked process that writes parameters, such as a worker of a data loader, writes a copy."""
    assert launch(2, written_by_a_child) == [(0, [0.5, 0.5])] * 2


def written_by_a_child(group: Any) -> tuple[int, list[float]]:
    averaged = average({"w": torch.full((2,), float(rank_of(group)))}, group=group)
    pid = os.fork()
    if pid == 0:
        averaged["w"].zero_()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return status, averaged["w"].tolist()


# As torch's


def train_averaged(averager: Any, module: nn.Module, steps: int) -> list[list[Tensor]]:
    """Parameters after each step."""
    seen = []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        module(rand(3, 4, seed=100 * step + dist.get_rank())).square().mean().backward()
        optimizer.step()
        averager(module, step)
        seen.append([p.detach().clone() for p in module.parameters()])
    return seen


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()


@pytest.mark.parametrize("warmup", [0, 3])
def test_parity_with_torchs_periodic_averager(ranks: RankPool, warmup: int) -> None:
    for ours, torchs in ranks.run(2, periodic, warmup):
        assert same_bits([ours, torchs])


def periodic(rank: int, world_size: int, warmup: int) -> Any:
    stock = PeriodicModelAverager(period=4, warmup_steps=warmup)
    expected = train_averaged(
        lambda module, _: stock.average_parameters(module.parameters()), model(), 12
    )
    module = model()
    with Averager(named(module), Periodic(4, warmup_steps=warmup)) as averager:
        ours = train_averaged(
            lambda module, step: averager.average_(named(module), step), module, 12
        )
    return ours, expected


def named(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())


def test_parity_with_torchs_hierarchical_averager(ranks: RankPool) -> None:
    for ours, torchs in ranks.run(4, hierarchical):
        torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=1e-12)


def hierarchical(rank: int, world_size: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock = HierarchicalModelAverager(OrderedDict({2: 2, 4: 4}), warmup_steps=4)
    expected = train_averaged(
        lambda module, _: stock.average_parameters(module.parameters()), model(), 10
    )
    module = model()
    local = init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "local"))["local"]
    with (
        Averager(named(module), Periodic(2, warmup_steps=4), group=local) as often,
        Averager(named(module), Periodic(4, warmup_steps=4)) as rarely,
    ):

        def averaged(module: nn.Module, step: int) -> None:
            often.average_(named(module), step)
            rarely.average_(named(module), step)

        ours = train_averaged(averaged, module, 10)
    return ours, expected


# Errors


def test_ranks_must_have_the_same_tree(launch: Launch) -> None:
    for end in launch(2, unlike):
        assert end.kinds[0] == "PlanMismatchError"
        assert "'b'" in end.text


def unlike(group: Any) -> Ending:
    names = ["a", "b"] if rank_of(group) else ["a"]
    return ending(lambda: average({name: torch.zeros(1) for name in names}, group=group))


def test_averages_of_parameters_and_of_gradients_do_not_meet(launch: Launch) -> None:
    once, often, value = "parameter average", "periodic average", 0.5
    for outcome in launch(2, averaging_what_others_do_not):
        assert [end.kinds[0] for end in outcome[:-1]] == ["DesyncError"] * 3
        sides = [("GradSync", once), (once, often), (often, "GradSync")]
        for end, (first, second) in zip(outcome[:-1], sides, strict=True):
            assert f"rank 0 opens a {first} where rank 1 opens a {second}" in end.text
        assert outcome[-1] == value, "all can go on"


def averaging_what_others_do_not(group: Any) -> list[Any]:
    rank, own = rank_of(group), torch.tensor(float(rank_of(group)))
    calls = [
        lambda: fddp.GradSync(own, group=group)(own),
        lambda: average(own, group=group),
        lambda: Averager(own, Periodic(1), group=group).average(own, 0),
    ]
    ends = [ending(calls[(number + rank) % 3]) for number in range(3)]
    return [*ends, average(own, group=group).item()]


def test_nothing_to_average(launch: Launch) -> None:
    for end in launch(2, only_integers):
        assert end.kinds[0] == "NoGradientError"


def only_integers(group: Any) -> Ending:
    return ending(lambda: average({"n": torch.zeros(2, dtype=torch.int64)}, group=group))
