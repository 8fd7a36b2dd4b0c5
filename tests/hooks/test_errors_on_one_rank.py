"""Hooks that raise on one rank: an error of the step on all ranks, after which they continue."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fddp
from fddp.hooks import Hook
from tests.support.endings import ending
from tests.support.models import batch, mlp, mlp_loss
from tests.support.ranks import TRANSPORTS, Launch, RankPool

SMALL: Any = {"bucket_cap_mb": 0.001, "first_bucket_mb": 0.0003}
LIMIT_S = 240.0  # far longer than the time limit of a test
FAILS: dict[int, int] = {}  # by rank: the bucket in which its hook raises


@dataclass(frozen=True)
class OneRankRaises(Hook[tuple[()]]):
    """Sums, by two collectives at once and a third one; raises where `FAILS` says."""

    where: str = ""
    stages = 2

    def init(self, spec: Any) -> tuple[()]:
        return ()

    def apply(self, state: Any, bucket: Any, all_reduce: Any) -> Any:
        def at(place: str) -> None:
            if self.where == place and FAILS.get(all_reduce.rank) == bucket.spec.index:
                raise ArithmeticError("no root")

        at("first")
        half, rest = all_reduce(bucket.buffer / 2), None
        at("amid")
        rest = all_reduce.all_gather(bucket.buffer[:1])

        def second(total: Any) -> Any:
            at("second")
            assert rest.wait().numel() == all_reduce.world_size
            ranks = all_reduce.world_size
            return all_reduce(total / ranks).map(lambda total: (2 * total, state))

        return half.then(second)


def raise_on_one(group: Any, where: str, bucket: int) -> Any:
    hook = OneRankRaises(where)
    with fddp.GradSync(mlp(), group=group, hook=hook, timeout_s=LIMIT_S, **SMALL) as sync:
        step = sync.value_and_grad(mlp_loss)
        for _ in range(2):  # after the first one the plan is rebuilt
            before = step(mlp(), batch(0, 0))[1]
        if sync.rank == 1:
            FAILS[1] = bucket
        try:
            seen = ending(lambda: step(mlp(), batch(0, 1)))
        finally:
            if sync.rank == 1:
                del FAILS[1]
        after = step(mlp(), batch(0, 0))[1]
        same = fddp.tree_map(torch.equal, before, after)
        return seen, all(leaf for layer in same.values() for leaf in layer.values())


@pytest.mark.parametrize("launch", TRANSPORTS, indirect=True)
@pytest.mark.parametrize("where", ["first", "amid", "second"])
def test_an_error_in_one_rank_s_hook_is_reported_to_all(launch: Launch, where: str) -> None:
    for bucket in (0,) if where == "second" else (0, 1):  # later ones follow the control word
        outcomes = launch(3, raise_on_one, where, bucket)
        for rank, (seen, continues) in enumerate(outcomes):
            assert continues
            if rank == 1:
                assert (seen.kinds[0], seen.text) == ("ArithmeticError", "no root")
            else:
                assert seen.kinds[0] == "PeerError"
                assert "rank 1 failed at step 2: OneRankRaises(where=" in seen.text
                assert f"on bucket {bucket} (" in seen.text
                assert "ArithmeticError: no root" in seen.text


def torch_hook_on_rank(rank: int, world_size: int, backend: str, where: str) -> Any:
    """The other ranks wait for a collective that this rank's hook does not start."""
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=LIMIT_S))
    # gloo's group ends once its pending operations have: their error would be another one.
    own = dist.new_group(backend=backend, timeout=timedelta(seconds=10))
    module = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 2))
    ddp = fddp.DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.0001)
    fails = [False]

    def hook(_: Any, bucket: Any) -> Any:
        def at(place: str) -> None:
            if fails[0] and rank == 1 and (where, bucket.index()) == (place, 0):
                raise ArithmeticError("no root")

        at("hook")
        work = dist.all_reduce(bucket.buffer().div_(world_size), group=own, async_op=True)

        def take(future: Any) -> Any:
            at("future")
            return future.value()[0]

        return work.get_future().then(take)  # type: ignore[union-attr]

    ddp.register_comm_hook(None, hook)
    for fails[0] in (False, False, True):
        seen = ending(lambda: ddp(torch.ones(3, 4)).sum().backward())
    with ddp.no_sync():  # it is open
        ddp(torch.ones(3, 4)).sum().backward()
    # A collective of the hook's own group may be pending. The step's group is usable.
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    if where == "future":
        fails[0] = False
        ddp(torch.ones(3, 4)).sum().backward()
    return seen, total.item()


@pytest.mark.parametrize("where", ["hook", "future"])
@pytest.mark.parametrize("backend", ["gloo", "fddp"])
def test_torch_s_hooks_that_wait_for_another_rank_are_given_up(
    ranks: RankPool, backend: str, where: str
) -> None:
    outcomes = ranks.run(3, torch_hook_on_rank, backend, where, timeout_s=60.0)
    for rank, (seen, total) in enumerate(outcomes):
        assert total == 3.0
        if rank == 1:
            assert seen.kinds[0] in ("ArithmeticError", "RuntimeError"), seen
            assert "no root" in seen.text
        else:
            assert seen.kinds[0] == "PeerError", seen
            assert "rank 1 failed at step" in seen.text
            assert "own group may stay unmatched) TorchHook(hook) on bucket 0 (" in seen.text
            assert "no root" in seen.text
