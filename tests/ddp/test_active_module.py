"""What dynamo learns of the running wrapper; see [Note: the active module]."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fddp
from tests.support.ranks import RankPool

StockDDP: Any = nn.parallel.DistributedDataParallel


def active() -> int | None:
    """Bucket size of the wrapper that dynamo sees, in bytes; None if it sees none."""
    found = StockDDP._get_active_ddp_module()
    return int(found.bucket_bytes_cap) if found else None


class Observed(nn.Module):
    """Linear layer that calls `observe` before and after another module."""

    def __init__(self, observe: Callable[[], None], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.own = nn.Linear(2, 2)
        self.inner = nn.Identity() if inner is None else inner
        self.observe = observe

    def forward(self, x: Tensor) -> Any:
        self.observe()
        x = self.inner(self.own(x))
        self.observe()
        return x


def wrapped(module: nn.Module, mebibytes: int) -> fddp.DistributedDataParallel:
    return fddp.DistributedDataParallel(module, bucket_cap_mb=mebibytes)


def run_nested(rank: int, world_size: int) -> list[int | None]:
    seen: list[int | None] = []

    def observe() -> None:
        seen.append(active())

    inner = wrapped(Observed(observe), 1)
    middle = wrapped(Observed(observe, inner), 2)
    stock = StockDDP(Observed(observe, middle), bucket_cap_mb=3)
    for _ in range(2):
        seen.append(active())
        stock(torch.ones(1, 2)).sum().backward()
    seen.append(active())
    return [None if nbytes is None else nbytes >> 20 for nbytes in seen]


def test_nested_wrappers_are_active_in_turn(ranks: RankPool) -> None:
    one_step = [None, 3, 2, 1, 1, 2, 3]
    for seen in ranks.run(1, run_nested):
        assert seen == [*one_step, *one_step, None]


def test_other_threads_see_their_own_and_a_failed_forward_is_not_active() -> None:
    seen: list[int | None] = []

    def fail() -> None:
        seen.append(active())
        thread = threading.Thread(target=lambda: seen.append(active()))
        thread.start()
        thread.join()
        raise KeyError("from the module")

    def run(group: Any) -> None:
        module = Observed(fail)
        ddp = fddp.DistributedDataParallel(module, process_group=group, bucket_cap_mb=1)
        with pytest.raises(KeyError, match="from the module"):
            ddp(torch.ones(1, 2))
        seen.append(active())

    fddp.loopback(1, run)
    assert seen == [1 << 20, None, None]


def test_steps_do_not_assign_to_the_class(ranks: RankPool) -> None:
    """As it would empty Python's caches of attributes."""
    assert ranks.run(1, run_steps) == [0]


def run_steps(rank: int, world_size: int) -> int:
    module = wrapped(nn.Linear(2, 2), 1)
    module(torch.ones(1, 2))
    before = StockDDP._active_ddp_module
    changes = 0

    def observe(*_: object) -> None:
        nonlocal changes
        changes += StockDDP._active_ddp_module is not before

    module.module.register_forward_hook(observe)
    for _ in range(3):
        module(torch.ones(1, 2))
        observe()
    return changes


def test_small_buckets_do_not_stop_the_compiler(ranks: RankPool) -> None:
    """Dynamo refuses buckets below its first one, of 1 MiB."""
    assert ranks.run(1, run_compiled) == [(1 << 20, 2)]


def run_compiled(rank: int, world_size: int) -> tuple[int | None, int]:
    seen: list[int | None] = []
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    module = Observed(lambda: seen.append(active()), compiled)
    ddp = fddp.DistributedDataParallel(module, bucket_cap_mb=0.1)
    ddp(torch.ones(1, 2)).sum().backward()
    return seen[0], sum(param.grad is not None for param in compiled.parameters())


def test_compiled_wrappers_are_compiled_once(ranks: RankPool) -> None:
    assert ranks.run(1, run_warm) == [3]


def run_warm(rank: int, world_size: int) -> int:
    ddp = wrapped(nn.Linear(2, 2), 1)
    compiled = torch.compile(ddp, backend="eager")
    compiled(torch.ones(1, 2)).sum().backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(3):
            compiled(torch.ones(1, 2)).sum().backward()
    return 3
