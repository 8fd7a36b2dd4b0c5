"""Every hook with every algorithm over every transport, generated from tables."""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import fddp
from fddp.hooks import (
    Hook,
    TorchHook,
    allreduce,
    auto,
    bf16_compress,
    block_top_k,
    chain,
    error_feedback,
    fp16_compress,
    int8,
    power_sgd,
    top_k,
)
from tests.support.hook_models import SMALL, Halves, Same, weighted_sum
from tests.support.models import largest_difference, rand, same_bits
from tests.support.ranks import HOSTS, RankPool, on_hosts, split_into_hosts

pytestmark = pytest.mark.slow  # together, some ten seconds


class HookCase(NamedTuple):
    """A hook of the table.

    Attributes:
        hook: the hook.
        exact: True if it computes the mean up to rounding.
        tolerance: largest difference between transports, which sum in other associations.
    """

    hook: Hook[Any]
    exact: bool = False
    tolerance: float = 1e-9


HOOKS = {
    "allreduce": HookCase(allreduce, exact=True),
    "same": HookCase(Same(), exact=True),
    "halves": HookCase(Halves(), exact=True),
    "fp16": HookCase(fp16_compress, tolerance=0.01),
    "bf16": HookCase(bf16_compress, tolerance=0.1),
    "int8": HookCase(int8(4)),
    "int8+feedback": HookCase(error_feedback(int8())),
    "top_k": HookCase(top_k(0.25)),
    "top_k(all)": HookCase(top_k(1.0), exact=True),
    "block_top_k": HookCase(block_top_k(0.1)),
    "power_sgd": HookCase(power_sgd(1)),
    "auto": HookCase(auto([int8(4), top_k(0.1)], tolerance=1.0, every=2, smallest=1)),
    "power_sgd(3)": HookCase(power_sgd(3)),
    "power_sgd+power_sgd": HookCase(chain(power_sgd(3), power_sgd(1))),
    "power_sgd+fp16": HookCase(chain(power_sgd(2), fp16_compress), tolerance=0.1),
    "power_sgd+top_k": HookCase(chain(power_sgd(2), top_k(0.5))),
    "power_sgd+int8": HookCase(chain(power_sgd(2), int8(4))),
    "torch": HookCase(TorchHook(None, default_hooks.allreduce_hook), exact=True),
}
"""Hooks of one and of several stages, that sum or gather, in one dtype or another."""

MESH = fddp.Topology(host=2, local=2)
ALGORITHMS: dict[str, dict[str, Any]] = {
    "all_reduce": {},
    "all_reduce over a mesh": {"mesh": MESH},
    "hierarchical": {"mesh": MESH, "algorithm": "hierarchical"},
}


class Tree(NamedTuple):
    """Leaves of float64, by name, and the caps of their buckets."""

    shapes: dict[str, tuple[int, ...]]
    caps: dict[str, Any]


UNLIKE_SHARDS = Tree({"matrix": (16, 16), "vector": (256,)}, {})
"""One bucket. With two ranks a host, the shard of one is a matrix, which `power_sgd` sums in two
stages, and the shard of the other has none."""
TREES = {
    "unlike shards": UNLIKE_SHARDS,
    "one bucket": Tree({"empty": (0, 3), "matrix": (12, 10), "scalar": (), "vector": (170,)}, {}),
    "several buckets": Tree({"matrix": (12, 10), "vector": (17,), "wide": (5, 30)}, SMALL),
}
STEPS = 3


class Combination(NamedTuple):
    hook: str
    algorithm: str
    tree: str


COMBINATIONS = [
    Combination(*names)
    for names in product(HOOKS, ALGORITHMS, TREES)
    if names[:2] != ("torch", "hierarchical")  # refused: it reduces over all ranks by itself
]


def grads(tree: str, rank: int, step: int) -> dict[str, Tensor]:
    return {
        name: rand(*shape, 1, seed=1000 * step + 10 * rank + i).view(shape)
        for i, (name, shape) in enumerate(TREES[tree].shapes.items())
    }


def train(group: Any, which: Combination) -> tuple[str, list[dict[str, Tensor]]]:
    """Name of the transport, and the mean of each step."""
    hook, tree = HOOKS[which.hook].hook, TREES[which.tree]
    options = {**ALGORITHMS[which.algorithm], **tree.caps}
    own = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in tree.shapes.items()}
    means = []
    with fddp.GradSync(own, group=group, hook=hook, **options) as sync:
        state = sync.init_state()
        for step in range(STEPS):
            mean, state = sync.update(grads(which.tree, sync.rank, step), state)
            means.append(mean)
        return sync.transport, means


@cache
def expected(which: Combination) -> list[dict[str, Tensor]]:
    """Means of the steps: of a hook that keeps all bits, else those of threads."""
    if HOOKS[which.hook].exact:
        trees = [[grads(which.tree, rank, step) for rank in range(4)] for step in range(STEPS)]
        return [weighted_sum(everyones, [0.25] * 4) for everyones in trees]
    return fddp.loopback(4, train, which)[0][1]


def check(which: Combination, runs: list[list[dict[str, Tensor]]], tolerance: float) -> None:
    assert same_bits(runs)
    differences = map(largest_difference, runs[0], expected(which))
    assert max(differences) <= tolerance


@pytest.mark.parametrize("which", [w for w in COMBINATIONS if w.hook != "torch"], ids="-".join)
def test_on_threads(which: Combination) -> None:
    runs = fddp.loopback(4, train, which)
    check(which, [means for _, means in runs], tolerance=1e-12)


ON_PROCESSES = [
    (transport, which)
    for transport, which in product(HOSTS, COMBINATIONS)
    if which[1:] == ("hierarchical", "unlike shards")
    # Between hosts, a flat all-reduce goes through c10d.
    or (which[1:] == ("all_reduce", "several buckets") and transport != "shm+c10d")
]


def name_of(value: str | Combination) -> str:
    return value if isinstance(value, str) else "-".join(value)


@pytest.mark.parametrize(("transport", "which"), ON_PROCESSES, ids=name_of)
def test_on_processes(ranks: RankPool, transport: str, which: Combination) -> None:
    runs = ranks.run(4, on_hosts, transport, train, which)
    assert {name for name, _ in runs} == {transport}
    check(which, [means for _, means in runs], HOOKS[which.hook].tolerance)


class UnlikeSum(Same):
    """Sums one element more on rank 3."""

    def apply(self, state: Any, bucket: Any, all_reduce: Any) -> Any:
        return all_reduce(torch.zeros(8 + dist.get_rank() // 3)).map(
            lambda _: (bucket.buffer, state)
        )


def sum_unlike(rank: int, world_size: int) -> tuple[str, str]:
    own, options = {"w": torch.ones(4)}, ALGORITHMS["hierarchical"]
    with (
        split_into_hosts(HOSTS["c10d"]),
        fddp.GradSync(own, hook=UnlikeSum(), timeout_s=20, **options) as sync,
        pytest.raises(fddp.FddpError) as caught,
    ):
        sync(own)
    return type(caught.value).__name__, str(caught.value)


def test_operations_that_differ_between_hosts(ranks: RankPool) -> None:
    """Ranks of the same place within their host compare them; the others lose one of these ranks,
    or both."""
    ends = ranks.run(4, sum_unlike)
    assert [kind for kind, _ in ends] == ["RankLostError", "DesyncError"] * 2
    both = "is all_reduce of torch.float32 (8,) on rank 1 and all_reduce of torch.float32 (9,) on"
    assert [both in text for _, text in ends] == [False, True] * 2
    assert all(re.search(r"lost rank (1, rank 3|[13])\b", text) for _, text in ends[::2])
