"""The contract of communication hooks: how one bucket is reduced, as a value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fddp.errors import HookError as HookError
from fddp.hooks.future import Future

S = TypeVar("S")


@dataclass(frozen=True)
class BucketSpec:
    """What does not change about a bucket: what a hook's state is made for.

    A schedule that cuts buckets into shards hands hooks this rank's shard: leaves are then those
    that it holds any part of, and one that is cut has the shape `(n,)` of its part.

    Attributes:
        index: the bucket's number in the plan.
        count: number of buckets in the plan.
        is_last: whether it is the last one to leave in a step.
        numel: elements of the buffer.
        dtype: of the buffer; that of the leaves, or the `reduce_dtype`.
        device: where the buffer is.
        paths: the leaves, in the order in which they lie in the buffer.
        shapes: of the leaves.
        strides: of the leaves in the buffer, in elements.
        offsets: where each leaf begins in the buffer, in elements.
    """

    index: int
    count: int
    is_last: bool
    numel: int
    dtype: torch.dtype
    device: torch.device
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]

    def flat(self, numel: int, dtype: torch.dtype) -> BucketSpec:
        """A tensor of shape `(numel,)` in the bucket's place, as one leaf."""
        return replace(
            self,
            numel=numel,
            dtype=dtype,
            paths=(f"bucket {self.index}",),
            shapes=((numel,),),
            strides=((1,),),
            offsets=(0,),
        )


@dataclass(frozen=True)
class Bucket:
    """A bucket's gradients on one rank.

    Attributes:
        spec: what does not change about it.
        buffer: shape `(spec.numel,)`: this rank's gradients, each times its weight and divided by
            `reference`; zeros for what it does not have. A hook does not write it, but may give
            it to `all_reduce`.
        reference: what weighted gradients were divided by, a weight. It may be another one in
            another step: what a hook keeps from step to step is multiplied by it.
    """

    spec: BucketSpec
    buffer: Tensor
    reference: float

    def gradients(self) -> list[Tensor]:
        """The leaves' gradients as views of the buffer."""
        start = self.buffer.storage_offset()
        spec = self.spec
        return [
            self.buffer.as_strided(shape, strides, start + offset)
            for shape, strides, offset in zip(spec.shapes, spec.strides, spec.offsets, strict=True)
        ]


class AllReduce(ABC):
    """Starts collectives for a hook, in the group of ranks among which its bucket is reduced.

    All ranks must start the same ones, of the same sizes and dtypes, in the same order.

    Attributes:
        rank: this rank's number in the group.
        world_size: number of ranks in the group.
    """

    rank: int
    world_size: int

    @abstractmethod
    def __call__(self, tensor: Tensor) -> Future[Tensor]:
        """Starts a sum over ranks.

        Args:
            tensor: contiguous, of any summable dtype; given away: its memory takes the sum.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Future[Tensor]:
        """Starts collecting every rank's tensor.

        Args:
            tensor: contiguous, of any dtype; not written.

        Returns:
            Shape `(world_size, *tensor.shape)`, by rank.
        """


class Hook(ABC, Generic[S]):
    """How buckets are reduced: a pure pair of `init` and `apply`, with state of type `S`.

    State is a tree (of tuples, lists and dicts) of tensors and numbers, one for each bucket. It may
    differ from rank to rank. Subclasses are frozen dataclasses, so that hooks are values: equal
    where their parameters are, and printed with them.

    Example:
        >>> import fddp, torch
        >>> from dataclasses import dataclass
        >>> from fddp.hooks import Hook
        >>> @dataclass(frozen=True)
        ... class Sign(Hook[tuple[()]]):
        ...     def init(self, spec):
        ...         return ()
        ...     def apply(self, state, bucket, all_reduce):
        ...         signs = all_reduce(bucket.buffer.sign())
        ...         return signs.map(lambda total: (total / all_reduce.world_size, state))
        >>> def mean_of_signs(group):
        ...     grads = {"w": torch.tensor([3.0, -1.0, 2.0]) * (1 - 2 * group.rank)}
        ...     with fddp.GradSync(grads, group=group, hook=Sign()) as sync:
        ...         return sync({"w": grads["w"] + 2.5})["w"].tolist()
        >>> fddp.loopback(2, mean_of_signs)
        [[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
    """

    @property
    def name(self) -> str:
        """The hook and its parameters in words; ranks compare it."""
        return repr(self)

    #: whether buffers are this rank's own gradients, which the hook itself divides by the number of
    #: ranks; see `TorchHook`
    raw: bool = False

    @property
    def narrow(self) -> bool:
        """Whether it sums in float16, which bears weights only near the agreed unit. A bucket whose
        weights turn out otherwise is reduced again without the hook."""
        return False

    @abstractmethod
    def init(self, spec: BucketSpec) -> S:
        """The state before the first step; the same call gives the same state."""

    @abstractmethod
    def apply(self, state: S, bucket: Bucket, all_reduce: AllReduce) -> Future[tuple[Tensor, S]]:
        """Starts the reduction of a bucket.

        Args:
            state: not written.
            bucket: what this rank brings.
            all_reduce: starts collectives.

        Returns:
            The sum over ranks of what they brought, with as many elements as the buffer and of any
            dtype, and the state for the next step.
        """

    def parts(self, spec: BucketSpec) -> tuple[BucketSpec, ...]:
        """What `apply` gives to `all_reduce`, in this order; what a hook behind it in a `chain`
        works on."""
        return (spec,)


@dataclass(frozen=True)
class Plain(Hook[tuple[()]]):
    """The sum as it is."""

    @property
    def name(self) -> str:
        return "allreduce"

    def init(self, spec: BucketSpec) -> tuple[()]:
        return ()

    def apply(
        self, state: tuple[()], bucket: Bucket, all_reduce: AllReduce
    ) -> Future[tuple[Tensor, tuple[()]]]:
        return all_reduce(bucket.buffer).map(lambda total: (total, state))


allreduce = Plain()
"""What happens without a hook; the identity of `chain`."""
