"""Top-k sparsification of gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fddp.core.entrance import entrance
from fddp.hooks.compression import Compressed, ErrorFeedbackState, Stateless, error_feedback
from fddp.hooks.flat import joined_bytes, padded, real, restored, split_bytes, wide
from fddp.hooks.future import Future
from fddp.hooks.hook import AllReduce, Bucket, BucketSpec, Hook
from fddp.hooks.quantization import Form

_BLOCK = 256  # values of a block, whose places take one byte


@dataclass(frozen=True)
class TopK(Stateless):
    """Hook that sends the values of largest magnitude in each bucket; see `top_k`."""

    fraction: float

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ValueError(f"fraction must be above 0 and at most 1, got {self.fraction!r}")

    def compress(
        self, state: tuple[()], bucket: Bucket, all_reduce: AllReduce
    ) -> Future[Compressed[tuple[()]]]:
        buffer = bucket.buffer
        count = math.ceil(self.fraction * len(buffer))
        largest = torch.topk(buffer.abs(), count, sorted=False).indices
        index_dtype = torch.int32 if len(buffer) < 2**31 else torch.int64
        forms = [(buffer.dtype, (count,)), (index_dtype, (count,))]
        own = joined_bytes([buffer[largest], largest.to(index_dtype)])

        def summed(rows: Tensor) -> Compressed[tuple[()]]:
            total = buffer.new_zeros(len(buffer), dtype=wide(buffer.dtype))
            for row in rows:  # in rank order, so that the bits are the same on every rank
                values, indices = split_bytes(row, forms)
                total.index_add_(0, indices, values.to(total.dtype))
            return Compressed(total, sent, state)

        def sent() -> Tensor:
            return torch.zeros_like(buffer).index_copy_(0, largest, buffer[largest])

        return all_reduce.all_gather(own).map(summed)

    def parts(self, spec: BucketSpec) -> tuple[BucketSpec, ...]:
        return ()


@entrance
def top_k(fraction: float) -> Hook[ErrorFeedbackState[tuple[()]]]:
    """Top-k sparsification with error feedback (Stich et al. 2018, "Sparsified SGD with Memory").

    Each rank sends the values of largest magnitude in each bucket to all ranks, with indices of 4
    bytes. With N ranks, each rank receives `N * fraction * (itemsize + 4)` bytes for each element,
    compared to `2 * itemsize` for an all-reduce. Unlike those of `int8`, the bytes grow with the
    ranks: ranks choose different indices, so that a sum has up to as many values as all ranks sent.

    Args:
        fraction: fraction of the values of a bucket that is sent, above 0 and at most 1; rounded
            up.

    Raises:
        ValueError: `fraction` is out of range.

    Example:
        >>> import fddp, torch
        >>> def first_step(group):
        ...     grads = {"w": torch.tensor([1.0, 5.0, 2.0, 0.0])}
        ...     with fddp.GradSync(grads, group=group, hook=fddp.hooks.top_k(0.25)) as sync:
        ...         mean, state = sync.update(grads, sync.init_state())
        ...         return mean["w"].tolist(), state[0]["residual"].tolist()
        >>> fddp.loopback(2, first_step)[0]
        ([0.0, 5.0, 0.0, 0.0], [1.0, 0.0, 2.0, 0.0])
    """
    return error_feedback(TopK(fraction))


@dataclass(frozen=True)
class BlockTopK(Stateless):
    """Hook that sends the values of largest magnitude in each block; see `block_top_k`."""

    fraction: float

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ValueError(f"fraction must be above 0 and at most 1, got {self.fraction!r}")

    def compress(
        self, state: tuple[()], bucket: Bucket, all_reduce: AllReduce
    ) -> Future[Compressed[tuple[()]]]:
        numbers, dtype = real(bucket.buffer), bucket.buffer.dtype
        exact = wide(numbers.dtype)
        blocks = padded(numbers.to(exact), -len(numbers) % _BLOCK).view(-1, _BLOCK)
        count = math.ceil(self.fraction * _BLOCK)
        places = torch.topk(blocks.abs(), count, dim=1, sorted=False).indices
        form = Form(8, places.numel(), _BLOCK, exact)
        own = form.quantized(blocks.gather(1, places).view(1, -1)).view(-1)
        row = joined_bytes([places.to(torch.uint8), own])
        forms = [(torch.uint8, tuple(places.shape)), (own.dtype, tuple(own.shape))]

        def joined(rows: Sequence[Tensor]) -> Tensor:
            total = torch.zeros_like(blocks)
            for each in rows:  # in rank order, so that the bits are the same on every rank
                found, values = split_bytes(each, forms)
                total.scatter_add_(
                    1, found.long(), form.values(values.view(1, -1)).view(found.shape)
                )
            return restored(total.view(-1)[: len(numbers)], dtype)

        return all_reduce.all_gather(row).map(
            lambda rows: Compressed(joined([*rows]), lambda: joined([row]), state)
        )

    def parts(self, spec: BucketSpec) -> tuple[BucketSpec, ...]:
        return ()


@entrance
def block_top_k(fraction: float) -> Hook[ErrorFeedbackState[tuple[()]]]:
    """Top-k sparsification in blocks of 256 values, with error feedback: as `top_k`, with a quarter
    of the bytes for each value.

    Each rank sends the values of largest magnitude in each block to all ranks: a byte for the place
    in the block, and 8 bits for the value, as by `int8`. With N ranks, each rank receives
    `N * fraction * 2.02` bytes for each element.

    Args:
        fraction: fraction of the values of each block that is sent, above 0 and at most 1; rounded
            up to a multiple of 1 / 256.

    Raises:
        ValueError: `fraction` is out of range.

    Example:
        >>> import fddp, torch
        >>> def first_step(group):
        ...     grads = {"w": torch.tensor([127.0, 5.2, 2.0, 0.0])}
        ...     hook = fddp.hooks.block_top_k(2 / 256)
        ...     with fddp.GradSync(grads, group=group, hook=hook) as sync:
        ...         mean, _ = sync.update(grads, sync.init_state())
        ...         return mean["w"].tolist()
        >>> fddp.loopback(2, first_step)[0]
        [127.0, 5.0, 0.0, 0.0]
    """
    return error_feedback(BlockTopK(fraction))
