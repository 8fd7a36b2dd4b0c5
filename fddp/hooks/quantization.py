"""Quantization of gradients to 8 or 4 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fddp.core.entrance import entrance
from fddp.hooks.compression import Compressed, Compressor, Stateless
from fddp.hooks.flat import padded, real, restored, wide
from fddp.hooks.future import Future
from fddp.hooks.hook import AllReduce, Bucket, BucketSpec


class Form(NamedTuple):
    """Form of a quantized chunk: the scales of its blocks, then its values, a byte or half a byte
    each."""

    bits: int  # of a value: 8 or 4
    length: int  # values of a chunk
    block: int  # values of a block; the last block of a chunk may be shorter
    dtype: torch.dtype  # of the scales

    def quantized(self, chunks: Tensor) -> Tensor:
        """Bytes of chunks of shape `(n, length)`; shape `(n, bytes)`.

        A block with a value that is not finite gets a scale that is not finite, and so do its
        values.
        """
        blocks, rows = self._blocks(chunks), len(chunks)
        magnitudes = blocks.abs()
        largest = 2 ** (self.bits - 1) - 1
        scales = magnitudes.amax(dim=2, keepdim=True) / largest
        divisors = torch.where(scales > 0, scales, 1)
        steps = torch.div(blocks, divisors, out=magnitudes).round_()
        steps.clamp_(-largest, largest)  # the scale of a tiny block is rounded
        head = scales.view(rows, -1).view(torch.int8)
        tail = steps.to(torch.int8).view(rows, -1)[:, : self.length]
        if self.bits == 4:
            pairs = padded(tail, self.length % 2)
            tail = (pairs[:, ::2] & 15) | (pairs[:, 1::2] << 4)
        return torch.cat([head, tail], dim=1)

    def values(self, chunks: Tensor) -> Tensor:
        """Inverse of `quantized`, up to rounding."""
        rows, head = len(chunks), -(-self.length // self.block) * self.dtype.itemsize
        aligned = chunks[:, :head].clone(memory_format=torch.contiguous_format)
        scales = aligned.view(self.dtype).view(rows, -1, 1)
        tail = chunks[:, head:]
        if self.bits == 4:
            pairs = torch.stack([(tail << 4) >> 4, tail >> 4], dim=2)  # with their signs
            tail = pairs.view(rows, -1)[:, : self.length]
        steps = self._blocks(tail)
        values = steps.to(self.dtype).mul_(scales)  # a tenth of the time of `scales * steps`
        return values.view(rows, -1)[:, : self.length]

    def sum(self, parts: Tensor) -> Tensor:
        """Sum of quantized chunks of shape `(ranks, n, bytes)`, in rank order, so that the bits
        are the same on every rank; shape `(n, length)`."""
        total = self.values(parts[0])
        for part in parts[1:]:
            total += self.values(part)
        return total

    def _blocks(self, chunks: Tensor) -> Tensor:
        """Chunks of shape `(n, length)`, padded with zeros and divided into blocks."""
        return padded(chunks, -self.length % self.block).view(len(chunks), -1, self.block)


@dataclass(frozen=True)
class Quantized(Stateless):
    """Hook that sends each value as a multiple of its block's scale; see `int8`."""

    block: int

    bits: ClassVar[int]
    scatters = True
    stages = 2

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block < 1:
            raise ValueError(f"block must be an int of at least 1, got {self.block!r}")

    def compress(
        self, state: tuple[()], bucket: Bucket, all_reduce: AllReduce
    ) -> Future[Compressed[tuple[()]]]:
        numbers, ranks, dtype = real(bucket.buffer), all_reduce.world_size, bucket.buffer.dtype
        form = Form(self.bits, -(-len(numbers) // ranks), self.block, wide(numbers.dtype))
        padding = ranks * form.length - len(numbers)
        own = form.quantized(padded(numbers.to(form.dtype), padding).view(ranks, -1))

        def joined(chunks: Tensor) -> Tensor:
            return restored(chunks.reshape(-1)[: len(numbers)], dtype)

        def summed(parts: Tensor) -> Compressed[tuple[()]]:
            return Compressed(joined(form.sum(parts)), lambda: joined(form.values(own)), state)

        if bucket.spec.is_scattered:
            return all_reduce.all_to_all(own.clone()).map(lambda rows: summed(rows.unsqueeze(1)))
        if ranks <= 2:  # the same bytes in one stage, and sums are not rounded
            return all_reduce.all_gather(own).map(summed)

        def share(parts: Tensor) -> Future[Compressed[tuple[()]]]:
            total = form.sum(parts.unsqueeze(1))
            rounded = form.quantized(total)

            def sent() -> Tensor:
                # The rounding of the sum counts as this rank's.
                values = form.values(own)
                values[all_reduce.rank] += (form.values(rounded) - total).view(-1)
                return joined(values)

            return all_reduce.all_gather(rounded.view(-1)).map(
                lambda sums: Compressed(joined(form.values(sums)), sent, state)
            )

        return all_reduce.all_to_all(own.clone()).then(share)

    def parts(self, spec: BucketSpec) -> tuple[BucketSpec, ...]:
        return ()


class Int8(Quantized):
    bits = 8


class Int4(Quantized):
    bits = 4


@entrance
def int8(block: int = 256) -> Compressor[tuple[()]]:
    """Quantization to 8 bits, with a scale of 32 bits (64 for float64) for each block (Dettmers et
    al. 2022, "8-bit Optimizers via Block-wise Quantization", with uniform steps).

    Sums do not fit in 8 bits. Each rank therefore receives all ranks' values of its chunk of the
    bucket, sums them in at least 32 bits, and sends the sum to all ranks, quantized again. For any
    number of ranks, an element of float32 costs `(1 + 4 / block) / 4` of the bytes of an
    all-reduce: 0.254 for blocks of 256. Two ranks exchange their values instead, for as many bytes,
    and the sum is not quantized.

    A step is the scale of a block: the largest magnitude in it, divided by 127. The sum of each
    element differs from the exact one by at most half a step of each rank's block and half a step
    of the sum's block, apart from the rounding of the sum. Replicas receive the same bits.
    `error_feedback` keeps both errors. A value that is not finite makes its block of the result not
    finite.

    The hook also replaces the reduce-scatters of `algorithm="reduce_scatter"`, along the outermost
    axis. Ranks keep their chunks of the sum, which are not quantized.

    Args:
        block: number of values that share a scale, which is set by the largest of them. Blocks
            start anew in each rank's chunk. A complex number counts as two values.

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


@entrance
def int4(block: int = 64) -> Compressor[tuple[()]]:
    """Quantization to 4 bits: as `int8`, with steps of the largest magnitude of a block divided by
    7. An element of float32 costs `(0.5 + 4 / block) / 4` of the bytes of an all-reduce: 0.141 for
    blocks of 64.

    Args:
        block: as for `int8`.

    Raises:
        ValueError: `block` is below 1.

    Example:
        >>> import fddp, torch
        >>> def mean(group):
        ...     grads = {"w": torch.tensor([7.0, 0.6, -3.4])}
        ...     with fddp.GradSync(grads, group=group, hook=fddp.hooks.int4()) as sync:
        ...         return sync(grads)["w"].tolist()
        >>> fddp.loopback(1, mean)[0]
        [7.0, 1.0, -3.0]
    """
    return Int4(block)
