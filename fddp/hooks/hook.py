"""Interface of communication hooks, which reduce one bucket at a time."""

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
    """Static metadata of a bucket.

    A schedule that divides buckets into shards passes this rank's shard to hooks. The leaves are
    then those with a part in the shard, and a leaf that is divided has the shape `(n,)` of its
    part.

    Attributes:
        index: number of the bucket in the plan.
        count: number of buckets in the plan.
        is_last: True if the bucket is the last one in launch order.
        numel: number of elements of the buffer.
        dtype: dtype of the buffer: that of the leaves, or the `reduce_dtype`.
        device: device of the buffer.
        paths: paths of the leaves, in the order of the buffer.
        shapes: shapes of the leaves.
        strides: strides of the leaves in the buffer, in elements.
        offsets: offset of each leaf in the buffer, in elements.
        is_scattered: True if each rank keeps its chunk of the sum only; see `Hook.scatters`.
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
    is_scattered: bool = False

    def flat(self, numel: int, dtype: torch.dtype) -> BucketSpec:
        """Metadata of a bucket with one leaf of shape `(numel,)` in place of this one."""
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
        spec: static metadata.
        buffer: this rank's gradients, multiplied by their weights and divided by `reference`;
            shape `(spec.numel,)`; zeros for missing gradients. A hook must not write it, but may
            pass it to `all_reduce`.
        reference: number by which the weighted gradients were divided; a hook must multiply values
            that it keeps by it.
        weight: weight of this rank's gradients; 0.0 if it contributes none.
    """

    spec: BucketSpec
    buffer: Tensor
    reference: float
    weight: float = 1.0

    def gradients(self) -> list[Tensor]:
        """Gradients of the leaves as views of the buffer; none of a sparse buffer."""
        if self.buffer.is_sparse:
            return []
        start = self.buffer.storage_offset()
        spec = self.spec
        return [
            self.buffer.as_strided(shape, strides, start + offset)
            for shape, strides, offset in zip(spec.shapes, spec.strides, spec.offsets, strict=True)
        ]


class AllReduce(ABC):
    """Collectives of a hook, in the group of ranks that reduce its bucket: a call is a sum, and the
    methods are the others.

    All ranks must start the same collectives, of the same sizes and dtypes, in the same order.

    Attributes:
        rank: this rank's number in the group.
        world_size: number of ranks in the group.
    """

    rank: int
    world_size: int

    @abstractmethod
    def __call__(self, tensor: Tensor) -> Future[Tensor]:
        """Start a sum over ranks.

        Args:
            tensor: contiguous, of any summable dtype. Donated: the sum may be written to its
                memory.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Future[Tensor]:
        """Start an all-gather.

        Args:
            tensor: contiguous, of any dtype; not written.

        Returns:
            Tensors of all ranks by rank, shape `(world_size, *tensor.shape)`.
        """

    @abstractmethod
    def all_to_all(self, tensor: Tensor) -> Future[Tensor]:
        """Start sending row `r` of a tensor to rank `r`.

        Args:
            tensor: contiguous, of any dtype, shape `(world_size, ...)`. Donated: the rows that
                arrive may be written to its memory.

        Returns:
            The rows that were sent to this rank, by rank; the shape of `tensor`.
        """


class Hook(ABC, Generic[S]):
    """Reduction of buckets: a pure pair of functions, `init` and `apply`, with state of type `S`.

    Each bucket has its own state, a tree (of tuples, lists and dicts) of tensors, numbers and
    None. It may differ between ranks. Subclasses are frozen dataclasses, so hooks are values: they
    are equal if their parameters are equal, and their repr has the parameters.

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
        """Name with parameters, which must be the same on all ranks."""
        return repr(self)

    #: True if the hook gets unweighted gradients and divides by the number of ranks itself; see
    #: `TorchHook`
    raw: bool = False

    #: True if a `raw` hook reduces sparse buckets, too, after the dense ones: `bucket.buffer` is
    #: this rank's gradient, a coalesced sparse tensor, and the result is sparse, too. Those of
    #: other hooks are averaged
    takes_sparse: bool = False

    @property
    def stages(self) -> int:
        """The most collectives of a bucket that `apply` starts one after the other, with
        `Future.then`. The stages of all buckets are interleaved, so that they overlap. Further
        ones, which are not declared, start when the result is needed. An error in a stage that
        follows the control word, as the last bucket's second one does, can't be reported in it, and
        closes the `GradSync`."""
        return 1

    @property
    def narrow(self) -> bool:
        """True if the hook sums in float16, whose range only serves mean weights from 1/64 to 1.
        Other weights are a `WeightError`."""
        return False

    @property
    def scatters(self) -> bool:
        """True if the hook can also replace a reduce-scatter. `apply` then returns only this rank's
        chunk of the sum for a bucket whose `spec.is_scattered` is True: of equal chunks, one for
        each rank of `all_reduce`, in rank order."""
        return False

    @abstractmethod
    def init(self, spec: BucketSpec) -> S:
        """The state before the first step. Must be deterministic."""

    @abstractmethod
    def apply(self, state: S, bucket: Bucket, all_reduce: AllReduce) -> Future[tuple[Tensor, S]]:
        """Start the reduction of a bucket.

        Args:
            state: state of the previous step; must not be written.
            bucket: this rank's gradients.
            all_reduce: starts collectives.

        Returns:
            Sum of the buffers over ranks, of any dtype and with as many elements as the buffer, and
            the state for the next step.
        """

    def parts(self, spec: BucketSpec) -> tuple[BucketSpec, ...]:
        """Tensors that `apply` passes to `all_reduce`, in this order. The next hook in a `chain`
        reduces them."""
        return (spec,)


@dataclass(frozen=True)
class Plain(Hook[tuple[()]]):
    """Plain sum over ranks."""

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
"""The default reduction; the identity of `chain`."""
