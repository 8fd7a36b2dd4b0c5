"""Hooks that sum in another dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fddp.core.entrance import entrance
from fddp.hooks.compression import Compressed, Compressor, Stateless
from fddp.hooks.flat import real, restored
from fddp.hooks.future import Future
from fddp.hooks.hook import AllReduce, Bucket, BucketSpec


@dataclass(frozen=True)
class Cast(Stateless):
    """Hook that sums buckets in another dtype; see `cast`."""

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise ValueError(f"dtype must be a floating dtype of torch, got {self.dtype!r}")

    @property
    def name(self) -> str:
        return _NAMES.get(self.dtype) or f"cast({self.dtype})"

    @property
    def narrow(self) -> bool:
        return self.dtype is torch.float16

    def compress(
        self, state: tuple[()], bucket: Bucket, all_reduce: AllReduce
    ) -> Future[Compressed[tuple[()]]]:
        buffer = bucket.buffer

        def sent() -> Tensor:
            return restored(real(buffer).to(self.dtype), buffer.dtype)

        return all_reduce(real(buffer).to(self.dtype, copy=True)).map(
            lambda total: Compressed(restored(total, buffer.dtype), sent, state)
        )

    def parts(self, spec: BucketSpec) -> tuple[BucketSpec, ...]:
        return (spec.flat(spec.numel * (2 if spec.dtype.is_complex else 1), self.dtype),)


_NAMES = {torch.float16: "fp16_compress", torch.bfloat16: "bf16_compress"}

fp16_compress = Cast(torch.float16)
"""Sum in float16: half the bytes of float32. Values whose mean is above 65504 overflow."""

bf16_compress = Cast(torch.bfloat16)
"""Sum in bfloat16, which has the range of float32 and 8 bits of precision."""


@entrance
def cast(dtype: torch.dtype) -> Compressor[tuple[()]]:
    """Hook that sums buckets in another dtype; complex numbers as pairs.

    Args:
        dtype: a floating dtype. `fp16_compress` and `bf16_compress` are such hooks.

    Raises:
        ValueError: `dtype` is not a floating dtype.

    Example:
        >>> import fddp, torch
        >>> def mean(group):
        ...     grads = {"w": torch.tensor([1.0, 1 / 3], dtype=torch.float64)}
        ...     with fddp.GradSync(grads, group=group, hook=cast(torch.float32)) as sync:
        ...         return sync(grads)["w"]
        >>> fddp.loopback(2, mean)[0]
        tensor([1.0000, 0.3333], dtype=torch.float64)
    """
    return Cast(dtype)
