"""Operations of the device in a step, and the bytes that they move, beside those of torch's DDP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fddp
from benchmarks import host_time
from benchmarks.models import Workload, convolutional, stack, transformer
from fddp.tree.pytree import flatten
from tests import lag
from tests.lag.rank import on_two_ranks

#: those of the benchmarks, as small as they can be with several buckets
MODELS = {
    "mlp": stack("", layers=4, width=32, rows=2),
    "small": stack("", layers=30, width=4, rows=2),
    "transformer": transformer("", tokens=16, length=4, width=64, blocks=1),
    "conv": convolutional("", widths=(4, 8), pixels=4),
}
CAP_MB = 0.008
VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
#: modes of torch's DDP that copy no gradient back
MODES: tuple[dict[str, Any], ...] = (VIEW, {**VIEW, "static_graph": True})
KINDS = ("collectives", "collective bytes", "events", "waits")
WARM_UP = 3

Counts: TypeAlias = dict[str, int]


def operations(counts: Counts) -> int:
    """Launches of kernels, and copies."""
    return counts.get("kernels", 0) + counts.get("copies", 0)


def counted(step: Callable[[], object]) -> Counts:
    """Counts of a step after some others."""
    for _ in range(WARM_UP):
        step()
    lag.load().take_counts()
    step()
    torch.accelerator.synchronize()
    found: Counts = lag.load().take_counts()
    return found


class Modules:
    """Steps of a model as a module.

    Args:
        keeps: True for gradients that are set to zero before a step; else to None.
    """

    def __init__(self, workload: Workload, device: torch.device, *, keeps: bool) -> None:
        self.workload, self.device, self.keeps = workload, device, keeps
        self.local = self.counted(lambda module: module)

    def counted(self, wrap: Callable[[nn.Module], nn.Module]) -> Counts:
        """Counts of a step of a wrapped module."""
        module, batch = self.workload.build().to(self.device), self.workload.batch(dist.get_rank())
        wrapped, batch = wrap(module), batch.to(self.device)

        def step() -> None:
            module.zero_grad(set_to_none=not self.keeps)
            wrapped(batch).backward()

        return counted(step)

    def added(self, make: Callable[..., nn.Module], **options: Any) -> Counts:
        """Counts beyond those of the module alone."""
        found = self.counted(lambda module: make(module, bucket_cap_mb=CAP_MB, **options))
        return dict(Counter(found) - Counter(self.local))


def added_of_function(workload: Workload, device: torch.device, group: dist.ProcessGroup) -> Counts:
    """Counts of `value_and_grad` beyond those of the gradients of this rank."""
    params, loss_fn, buffers = workload.to_function(workload.build().to(device))
    batch = workload.batch(dist.get_rank()).to(device)
    args = (batch,) if buffers is None else (buffers, batch)
    leaves, treedef = flatten(params)

    def local() -> object:
        own = [leaf.detach().requires_grad_() for leaf in leaves]
        result = loss_fn(treedef.unflatten(own), *args)
        return torch.autograd.grad(result if buffers is None else result[0], own)

    caps = {"bucket_cap_mb": CAP_MB, "first_bucket_mb": CAP_MB}
    with fddp.GradSync(params, group=group, **caps) as sync:
        step, held = sync.value_and_grad(loss_fn, has_aux=buffers is not None), [None]

        def step_and_hold() -> None:  # as in a loop, until the next gradients are there
            held[0] = step(params, *args)

        return dict(Counter(counted(step_and_hold)) - Counter(counted(local)))


def counts_on_rank(rank: int, world_size: int) -> dict[str, dict[str, list[Counts]]]:
    lag.load().seed(0, scale=0.0)
    device, group = torch.device("lag", 0), dist.new_group(backend="cpu:gloo,lag:lag")
    found = {}
    # Measured steps wait for the device, as the wrapper's first ones.
    with mock.patch("fddp.ddp.logging_data._FIRST_STEPS", 0):
        for name, workload in MODELS.items():
            fresh, kept = (Modules(workload, device, keeps=keeps) for keeps in (False, True))
            stock, ours = (
                partial(each, process_group=group)
                for each in (DistributedDataParallel, fddp.DistributedDataParallel)
            )
            found[name] = {
                "DDP": [fresh.added(stock, **mode) for mode in MODES],
                "wrapper": [fresh.added(ours, **mode) for mode in ({}, VIEW)],
                "function": [added_of_function(workload, device, group)],
                "DDP, kept": [kept.added(stock, **VIEW)],
                "wrapper, kept": [kept.added(ours, **VIEW)],
            }
    return found


@pytest.fixture(scope="module")
def measured(lagging: str) -> list[dict[str, dict[str, list[Counts]]]]:
    return on_two_ranks(counts_on_rank)


@pytest.mark.parametrize("way", ["wrapper", "function", "wrapper, kept"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_does_no_more_than_one_of_ddp(measured: Any, name: str, way: str) -> None:
    for found in measured:
        theirs = found[name]["DDP, kept" if way.endswith("kept") else "DDP"]
        least = {kind: min(each.get(kind, 0) for each in theirs) for kind in KINDS}
        for own in found[name][way]:
            assert operations(own) <= min(map(operations, theirs))
            for kind in KINDS:
                assert own.get(kind, 0) <= least[kind], kind
            assert own.get("bytes", 0) <= min(each["bytes"] for each in theirs)


def host_time_on_rank(rank: int, world_size: int) -> list[host_time.Case]:
    return host_time.run_rank(1, (1, 3))


@pytest.mark.nightly
def test_the_time_of_the_host_is_measured(lagging: str) -> None:
    for cases in on_two_ranks(host_time_on_rank):
        assert [case.leaves for case in cases] == [1, 3]
        assert len(host_time.figures(cases)) == 12
