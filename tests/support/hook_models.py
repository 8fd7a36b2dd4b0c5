"""Gradients and hooks that several test modules of hooks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fddp
from fddp.hooks import AllReduce, Bucket, BucketSpec, Future, Hook
from fddp.tree.pytree import flatten
from tests.support.models import rand

# Several buckets, one of them of a single leaf.
SMALL = {"bucket_cap_mb": 0.001, "first_bucket_mb": 0.0005}


def params(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {
        "conv": torch.zeros(4, 3, 2, 2, dtype=dtype).to(memory_format=torch.channels_last),
        "empty": torch.zeros(0, 3, dtype=dtype),
        "matrix": torch.zeros(12, 10, dtype=dtype),
        "scalar": torch.zeros((), dtype=dtype),
        "vector": torch.zeros(17, dtype=dtype),
        "wide": torch.zeros(5, 30, dtype=dtype),
    }


def grads(rank: int, step: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {
        name: rand(leaf.numel(), seed=1000 * step + 10 * rank + i, dtype=dtype).view(leaf.shape)
        for i, (name, leaf) in enumerate(params(dtype).items())
    }


def late_loss(p: dict[str, Tensor], x: Tensor, again: bool) -> Tensor:
    """Of leaves w0 to w3. With `again`, a re-entrant checkpoint uses w3 a second time, after its
    bucket has left."""
    x = x.clone().requires_grad_()
    if again:
        x = checkpoint(lambda h: torch.tanh(h @ p["w3"]), x, use_reentrant=True)
    for leaf in p.values():
        x = torch.tanh(x @ leaf)
    return x.square().mean()


def weight(rank: int, step: int) -> float:
    """Another one on each rank and in each step; up to 1, for sums in float16."""
    return (7, 2, 5, 1)[(rank + step) % 4] / 8


def steps(
    group: Any,
    hook: Hook[Any] | None,
    count: int = 3,
    dtype: torch.dtype = torch.float64,
    weigh: Callable[[int, int], float] = lambda rank, step: 1.0,
    **options: Any,
) -> tuple[list[dict[str, Tensor]], list[Any]]:
    """Means and states of some steps; the state before the first one is the first."""
    with fddp.GradSync(params(dtype), group=group, hook=hook, **SMALL, **options) as sync:
        means, states = [], [sync.init_state()]
        for step in range(count):
            own = grads(sync.rank, step, dtype)
            mean, state = sync.update(own, states[-1], weight=weigh(sync.rank, step))
            means.append(mean)
            states.append(state)
        return means, states


def same_leaves(a: Any, b: Any) -> bool:
    """Return True if two trees hold the same tensors and numbers, in any containers."""

    def key(leaf: Any) -> bytes:
        return torch.as_tensor(leaf).contiguous().view(-1).view(torch.uint8).numpy().tobytes()

    return sorted(map(key, flatten(a)[0])) == sorted(map(key, flatten(b)[0]))


@dataclass(frozen=True)
class Same(Hook[tuple[()]]):
    """`allreduce`, as another hook, which `chain` does not leave out."""

    def init(self, spec: BucketSpec) -> tuple[()]:
        return ()

    def apply(
        self, state: tuple[()], bucket: Bucket, all_reduce: AllReduce
    ) -> Future[tuple[Tensor, tuple[()]]]:
        return all_reduce(bucket.buffer.clone()).map(lambda total: (total, state))


@dataclass(frozen=True)
class Halves(Hook[dict[str, Any]]):
    """Sums the buffer in two stages, of unequal halves, and counts steps."""

    def init(self, spec: BucketSpec) -> dict[str, Any]:
        return {"steps": 0, "seen": torch.zeros(2, dtype=spec.dtype)}

    def apply(
        self, state: dict[str, Any], bucket: Bucket, all_reduce: AllReduce
    ) -> Future[tuple[Tensor, dict[str, Any]]]:
        first, second = self.parts(bucket.spec)
        head, tail = bucket.buffer.split([first.numel, second.numel])

        def rest(one: Tensor) -> Future[tuple[Tensor, dict[str, Any]]]:
            return all_reduce(tail.clone()).map(
                lambda two: (
                    torch.cat([one, two]),
                    {"steps": state["steps"] + 1, "seen": state["seen"] + len(one)},
                )
            )

        return all_reduce(head.clone()).then(rest)

    def parts(self, spec: BucketSpec) -> tuple[BucketSpec, ...]:
        head = spec.numel // 3
        return spec.flat(head, spec.dtype), spec.flat(spec.numel - head, spec.dtype)


def weighted_sum(trees: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """Leaf by leaf, in float64 or complex128."""
    wide = torch.promote_types(trees[0]["vector"].dtype, torch.float64)
    return {
        name: torch.stack([t[name].to(wide) * w for t, w in zip(trees, weights, strict=True)]).sum(
            0
        )
        for name in trees[0]
    }


def name_of(value: Any) -> str:
    """Return the id of a parameter that may be a hook."""
    return value.name if isinstance(value, Hook) else str(value)
