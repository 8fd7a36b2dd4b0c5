"""Composition of hooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import Tensor

from fddp.core.entrance import entrance
from fddp.hooks.future import Future
from fddp.hooks.hook import AllReduce, Bucket, BucketSpec, Hook, allreduce


@dataclass(frozen=True)
class Chain(Hook[tuple[Any, tuple[Any, ...]]]):
    """Hook whose sums are computed by another hook.

    The state is that of the outer hook, and one state of the inner hook for each sum of the outer
    hook.
    """

    outer: Hook[Any]
    inner: Hook[Any]

    @property
    def name(self) -> str:
        return f"chain({self.outer.name}, {self.inner.name})"

    @property
    def stages(self) -> int:
        return self.outer.stages * self.inner.stages

    @property
    def narrow(self) -> bool:
        return self.outer.narrow or self.inner.narrow

    def init(self, spec: BucketSpec) -> tuple[Any, tuple[Any, ...]]:
        parts = self.outer.parts(spec)
        if not parts:
            raise ValueError(
                f"{self.outer.name} leaves no sum to {self.inner.name} behind it: it sums by "
                f"itself; put it last in the chain"
            )
        return self.outer.init(spec), tuple(self.inner.init(part) for part in parts)

    def apply(
        self, state: tuple[Any, tuple[Any, ...]], bucket: Bucket, all_reduce: AllReduce
    ) -> Future[tuple[Tensor, tuple[Any, tuple[Any, ...]]]]:
        own, inner = state
        inner_reduce = _InnerReduce(self, inner, bucket, all_reduce)
        result = self.outer.apply(own, bucket, inner_reduce)
        return result.map(lambda end: (end[0], (end[1], inner_reduce.states())))

    def parts(self, spec: BucketSpec) -> tuple[BucketSpec, ...]:
        return tuple(inner for part in self.outer.parts(spec) for inner in self.inner.parts(part))


class _InnerReduce(AllReduce):
    """All-reduce by the inner hook. The n-th call uses its n-th state."""

    def __init__(
        self, chain: Chain, states: Sequence[Any], bucket: Bucket, all_reduce: AllReduce
    ) -> None:
        self.rank, self.world_size = all_reduce.rank, all_reduce.world_size
        self._chain = chain
        self._states = states
        self._reference, self._weight = bucket.reference, bucket.weight
        self._parts = chain.outer.parts(bucket.spec)
        self._all_reduce = all_reduce
        self._results: list[Future[tuple[Tensor, Any]]] = []

    def __call__(self, tensor: Tensor) -> Future[Tensor]:
        call = len(self._results)
        part = self._parts[call] if call < len(self._parts) else None
        if part is None or (part.numel, part.dtype) != (tensor.numel(), tensor.dtype):
            raise ValueError(
                f"sum {call} of {self._chain.outer.name} is of {tensor.numel()} elements of "
                f"{tensor.dtype} where its parts say {part and (part.numel, part.dtype)}; return "
                f"from parts() every tensor that apply() passes to all_reduce, in order"
            )
        bucket = Bucket(part, tensor.view(-1), self._reference, self._weight)
        result = self._chain.inner.apply(self._states[call], bucket, self._all_reduce)
        self._results.append(result)
        return result.map(lambda end: end[0].view(tensor.shape).to(tensor.dtype))

    def all_gather(self, tensor: Tensor) -> Future[Tensor]:
        return self._all_reduce.all_gather(tensor)

    def all_to_all(self, tensor: Tensor) -> Future[Tensor]:
        return self._all_reduce.all_to_all(tensor)

    def states(self) -> tuple[Any, ...]:
        """States of the inner hook for the next step. Called when all sums are done."""
        return tuple(result.wait()[1] for result in self._results)


@entrance
def chain(*hooks: Hook[Any]) -> Hook[Any]:
    """Composition of hooks: each hook's sums are computed by the next one, the last one sums over
    ranks.

    Composition is associative, up to the nesting of states, and `allreduce` is its identity. Hooks
    that sum by themselves (`top_k`, `int8`, `int4`) leave nothing to the hooks behind them, so such
    a hook must be the last one.

    Raises:
        ValueError: one of several hooks is a `TorchHook`; or, when states are initialised, a hook
            behind another has nothing to sum.

    Example:
        >>> from fddp.hooks import allreduce, chain, fp16_compress, power_sgd
        >>> chain(power_sgd(2), allreduce, fp16_compress).name
        'chain(error_feedback(PowerSgd(rank=2)), fp16_compress)'
    """
    several = [hook for hook in hooks if hook != allreduce]
    raw = [hook.name for hook in several if hook.raw]
    if raw and len(several) > 1:
        raise ValueError(f"{raw[0]} divides by the number of ranks itself; use it alone")
    return reduce(Chain, several) if several else allreduce
