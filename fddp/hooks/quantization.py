"""Quantization of gradients to 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fddp.hooks.compression import Compressed, Compressor, Stateless
from fddp.hooks.flat import joined_bytes, real, restored, split_bytes, wide
from fddp.hooks.future import Future
from fddp.hooks.hook import AllReduce, Bucket, BucketSpec


@dataclass(frozen=True)
class Int8(Stateless):
    """Hook that sends each value as one of 255 multiples of its block's scale; see `int8`."""

    block: int

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block < 1:
            raise ValueError(f"block must be an int of at least 1, got {self.block!r}")

    def compress(
        self, state: tuple[()], bucket: Bucket, all_reduce: AllReduce
    ) -> Future[Compressed[tuple[()]]]:
        buffer = bucket.buffer
        numbers = real(buffer)
        count = len(numbers)
        padded = pad(numbers.to(wide(numbers.dtype)), (0, -count % self.block))
        blocks = padded.view(-1, self.block)
        scales = blocks.abs().amax(dim=1, keepdim=True) / 127
        steps = torch.where(scales > 0, blocks / scales, blocks).round().to(torch.int8)
        forms = [(part.dtype, tuple(part.shape)) for part in (scales, steps)]

        def values(scales: Tensor, steps: Tensor) -> Tensor:
            return (scales * steps).view(-1)[:count]

        def summed(rows: Tensor) -> Compressed[tuple[()]]:
            total = numbers.new_zeros(count, dtype=scales.dtype)
            for row in rows:  # in rank order, so that the bits are the same on every rank
                total += values(*split_bytes(row, forms))
            return Compressed(restored(total, buffer.dtype), sent, state)

        def sent() -> Tensor:
            return restored(values(scales, steps), buffer.dtype)

        return all_reduce.all_gather(joined_bytes([scales, steps])).map(summed)

    def parts(self, spec: BucketSpec) -> tuple[BucketSpec, ...]:
        return ()


def int8(block: int = 256) -> Compressor[tuple[()]]:
    """Quantization to 8 bits, with a scale of 32 bits (64 for float64) for each block (Dettmers et
    al. 2022, "8-bit Optimizers via Block-wise Quantization", with uniform steps).

    Sums do not fit in 8 bits, so each rank's values are gathered on all ranks, which sum them. With
    N ranks, each rank receives `N * (1 + 4 / block)` bytes for each float32 element, compared to 8
    for an all-reduce. Use it for few ranks, for example between hosts with the algorithm
    "hierarchical".

    Args:
        block: number of values that share a scale, which is set by the largest of them. A complex
            number counts as two values.

    Raises:
        ValueError: `block` is below 1.

    Example:
        >>> import fddp, torch
        >>> def mean(group):
        ...     grads = {"w": torch.tensor([127.0, 0.4, -3.0])}
        ...     with fddp.GradSync(grads, group=group, hook=fddp.hooks.int8()) as sync:
        ...         return sync(grads)["w"].tolist()
        >>> fddp.loopback(2, mean)[0]
        [127.0, 0.0, -3.0]
    """
    return Int8(block)
