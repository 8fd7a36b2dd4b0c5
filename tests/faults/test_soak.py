"""A short soak on two processes, and the rule by which `make soak` judges a long one."""

from __future__ import annotations

import gc
import time

import pytest
import torch
import torch.distributed as dist

import fddp
from tests.faults.soak.rank import RankResult, Soak, run_rank
from tests.faults.soak.resources import FLOORS, Usage, growths
from tests.faults.soak.script import SHARES, draw
from tests.support.on_ranks import on_processes
from tests.support.process_resources import open_file_count
from tests.support.ranks import RankPool

STEPS = 120


def soak_on_rank(rank: int, world_size: int) -> RankResult:
    return run_rank(Soak(steps=STEPS, minutes=5.0, seed=3, samples=12, shown=False))


@pytest.mark.nightly
def test_nothing_grows_and_replicas_stay_equal(ranks: RankPool) -> None:
    results = ranks.run(2, soak_on_rank)
    assert [one.turns for one in results] == [STEPS, STEPS]
    assert results[0].digest == results[1].digest
    assert results[0].compared > 10
    assert len(results[0].kinds) >= len(SHARES) - 3  # of the rare ones, some are not drawn
    for one in results:
        grown = [growth for growth in growths(one.usages) if not growth.is_flat]
        # What a process allocates for the first time is not over in so few steps.
        assert not [growth for growth in grown if not growth.name.endswith("_bytes")]


@on_processes(2)
def test_a_released_wrapper_keeps_no_descriptor(rank: int, world_size: int) -> None:
    module, counts = torch.nn.Linear(2, 2), []
    for _ in range(4):
        wrapped = fddp.DistributedDataParallel(module)
        wrapped(torch.ones(1, 2)).sum().backward()
        del wrapped
        gc.collect()
        dist.barrier()
        # A thread frees what belonged to the wrapper.
        until_s, lowest = time.monotonic() + 1.0, open_file_count()
        while time.monotonic() < until_s:
            time.sleep(0.02)
            lowest = min(lowest, open_file_count())
        counts.append(lowest)
    assert counts[-1] <= counts[1], counts


def usages(**slopes: float) -> list[Usage]:
    """Samples of a process that is busy, in which some resources grow from sample to sample."""
    found = []
    for n in range(150):
        busy = Usage(3e8, 2e8, 1e8, 2e7, 60 + n % 2, 5, 20, 500, 3e5 + 100 * (n % 3))
        grown = {name: getattr(busy, name) + slope * n for name, slope in slopes.items()}
        found.append(busy._replace(**grown))
    return found


def test_a_steady_process_is_flat() -> None:
    assert all(growth.is_flat for growth in growths(usages()))


@pytest.mark.parametrize("name", Usage._fields)
def test_growth_is_reported(name: str) -> None:
    # Over a third of the run, half more than is let pass; of descriptors that is their noise.
    slope = 1.5 * max(FLOORS[name], 3.0) / 50
    grown = [growth.name for growth in growths(usages(**{name: slope})) if not growth.is_flat]
    assert grown == [name]


def test_growth_is_not_taken_for_noise() -> None:
    # A spread about the median would be as wide as what has grown.
    assert not all(growth.is_flat for growth in growths(usages(descriptors=1.0)))


def test_ranks_draw_the_same_turns() -> None:
    turns = [draw(seed=5, number=number, ranks=3) for number in range(2000)]
    assert turns == [draw(seed=5, number=number, ranks=3) for number in range(2000)]
    assert {turn.kind for turn in turns} == {*SHARES}
    assert all(any(turn.weights) for turn in turns)
    assert any(0.0 in turn.weights for turn in turns)
