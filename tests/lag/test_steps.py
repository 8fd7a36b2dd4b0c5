"""Steps, operators and the wrapper on a device that lags, over two processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import fddp
from tests import lag
from tests.lag import scenarios
from tests.lag.rank import SMALL, Rank
from tests.support.models import batch, mlp, mlp_loss

if TYPE_CHECKING:
    from tests.support.ranks import RankPool


def run_on_rank(rank: int, world_size: int, *args: Any) -> None:
    scenarios.run(rank, *args)


def check(
    ranks: RankPool, names: tuple[str, ...], device_type: str, seeds: range = range(1)
) -> None:
    ranks.run(2, run_on_rank, names, device_type, seeds, timeout_s=280)


def test_all_results_are_those_of_the_cpu(ranks: RankPool, lagging: torch.device) -> None:
    check(ranks, tuple(scenarios.SCENARIOS), lagging.type)


@pytest.mark.nightly
@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_with_other_delays(ranks: RankPool, lagging: torch.device, name: str) -> None:
    check(ranks, (name,), lagging.type, range(1, 21))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_on_a_gpu(ranks: RankPool, name: str) -> None:
    check(ranks, (name,), "cuda")


def waits_on_rank(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    waits = lag.load()
    group = dist.new_group(backend="cpu:gloo,lag:lag")
    own = Rank(rank, group, torch.device("lag", 0))
    params, x = own.put(mlp()), own.put(batch(rank, 0))
    with fddp.GradSync(params, group=group, **SMALL) as sync:
        plain, informed = (sync.value_and_grad(mlp_loss, with_info=flag) for flag in (False, True))
        for _ in range(2):
            plain(params, x)
        waits.take_waits()
        plain(params, x)
        without = waits.take_waits()
        informed(params, x)
        assert len(sync.plan.buckets) > 2
        return without, waits.take_waits()


def test_the_host_waits_for_the_device_only_to_read_norms(
    ranks: RankPool, lagging: torch.device
) -> None:
    for without, informed in ranks.run(2, waits_on_rank):
        assert without == []
        assert informed == ["copy to the host"]
