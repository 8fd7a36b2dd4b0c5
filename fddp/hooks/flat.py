"""Functions on flat tensors, shared by several hooks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad


def real(flat: Tensor) -> Tensor:
    """Real view of a flat tensor, complex numbers as pairs; shape `(n,)` or `(2 * n,)`. A sparse
    tensor is returned as it is.

    Example:
        >>> real(torch.tensor([1 + 2j]))
        tensor([1., 2.])
    """
    if flat.is_sparse or not flat.is_complex():
        return flat
    return torch.view_as_real(flat).view(-1)


def restored(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of `real`, converted to `dtype`.

    Example:
        >>> restored(torch.tensor([1.0, 2.0], dtype=torch.float16), torch.complex64)
        tensor([1.+2.j])
    """
    if numbers.is_sparse or not dtype.is_complex:
        return numbers.to(dtype)
    return torch.view_as_complex(numbers.to(dtype.to_real()).view(-1, 2))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Dtype for computations: at least 32 bits.

    Example:
        >>> wide(torch.float16), wide(torch.complex128)
        (torch.float32, torch.complex128)
    """
    return torch.promote_types(dtype, torch.float32)


def padded(rows: Tensor, count: int) -> Tensor:
    """Rows with `count` zeros behind each; contiguous, and `rows` itself if possible.

    Example:
        >>> padded(torch.ones(1, 2), 1)
        tensor([[1., 1., 0.]])
    """
    return pad(rows, (0, count)) if count else rows.contiguous()


def split_views(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of consecutive parts of a flat tensor, with these shapes.

    Example:
        >>> split_views(torch.arange(3), [(2,), ()])
        [tensor([0, 1]), tensor(2)]
    """
    parts = torch.split_with_sizes(flat, [prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def joined_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenated bytes of contiguous tensors, shape `(n,)`, uint8.

    Example:
        >>> joined_bytes([torch.tensor([1], dtype=torch.int16), torch.tensor([[7]]).to(torch.int8)])
        tensor([1, 0, 7], dtype=torch.uint8)
    """
    return torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors])


def split_bytes(
    joined: Tensor, forms: Sequence[tuple[torch.dtype, tuple[int, ...]]]
) -> list[Tensor]:
    """Inverse of `joined_bytes`, for tensors of these dtypes and shapes.

    Example:
        >>> split_bytes(torch.tensor([1, 0, 7], dtype=torch.uint8), [(torch.int16, (1,))])
        [tensor([1], dtype=torch.int16)]
    """
    parts, start = [], 0
    for dtype, shape in forms:
        stop = start + prod(shape) * dtype.itemsize
        parts.append(joined[start:stop].clone().view(dtype).view(shape))  # the copy is aligned
        start = stop
    return parts
