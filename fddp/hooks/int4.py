"""Quantization to 4 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fddp.hooks.compression import Compressed, Compressor, Stateless
from fddp.hooks.flat import joined_bytes, real, restored, split_bytes, wide
from fddp.hooks.future import Future
from fddp.hooks.hook import AllReduce, Bucket, BucketSpec

_LARGEST = 7  # multiple of the scale; with its sign, 4 bits


@dataclass(frozen=True)
class Int4(Stateless):
    """Hook that sends each value as one of 15 multiples of its block's scale; see `int4`."""

    block: int

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block < 2 or self.block % 2:
            raise ValueError(f"block must be an even int of at least 2, got {self.block!r}")

    def compress(
        self, state: tuple[()], bucket: Bucket, all_reduce: AllReduce
    ) -> Future[Compressed[tuple[()]]]:
        numbers, dtype = real(bucket.buffer), bucket.buffer.dtype
        count = len(numbers)
        padded = pad(numbers.to(wide(numbers.dtype)), (0, -count % self.block))
        blocks = padded.view(-1, self.block)
        scales = blocks.abs().amax(dim=1, keepdim=True) / _LARGEST
        steps = torch.where(scales > 0, blocks / scales, blocks).round().clamp(-_LARGEST, _LARGEST)
        nibbles = (steps + _LARGEST).to(torch.uint8).view(-1, 2)
        pairs = nibbles[:, 0] + 16 * nibbles[:, 1]
        forms = [(part.dtype, tuple(part.shape)) for part in (scales, pairs)]

        def values(scales: Tensor, pairs: Tensor) -> Tensor:
            steps = torch.stack([pairs % 16, pairs // 16], dim=1).to(scales.dtype) - _LARGEST
            return (scales * steps.view(-1, self.block)).view(-1)[:count]

        def summed(rows: Tensor) -> Compressed[tuple[()]]:
            total = numbers.new_zeros(count, dtype=scales.dtype)
            for row in rows:  # in rank order, so that the bits are the same on every rank
                total += values(*split_bytes(row, forms))
            return Compressed(
                restored(total, dtype), lambda: restored(values(scales, pairs), dtype), state
            )

        return all_reduce.all_gather(joined_bytes([scales, pairs])).map(summed)

    def parts(self, spec: BucketSpec) -> tuple[BucketSpec, ...]:
        return ()


def int4(block: int = 128) -> Compressor[tuple[()]]:
    """Quantization to 4 bits, with a scale of 32 bits (64 for float64) for each block.

    A value becomes the nearest of 15 multiples of its block's scale, the largest magnitude divided
    by 7. Use it with `error_feedback`, for outer gradients (`fddp.periodic`). Each rank's values
    are gathered on all ranks: with N ranks, each receives `N * (0.5 + 4 / block)` bytes for each
    float32 element. A value that is not finite makes its block of the result not finite.

    Args:
        block: number of values that share a scale; even. A complex number counts as two values.

    Raises:
        ValueError: `block` is odd or below 2.

    Example:
        >>> import fddp, torch
        >>> def mean(group):
        ...     grads = {"w": torch.tensor([7.0, 0.4, -3.0])}
        ...     with fddp.GradSync(grads, group=group, hook=fddp.hooks.int4()) as sync:
        ...         return sync(grads)["w"].tolist()
        >>> fddp.loopback(2, mean)[0]
        [7.0, 0.0, -3.0]
    """
    return Int4(block)
