"""Helpers on flat tensors that several hooks share."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


def real(flat: Tensor) -> Tensor:
    """A flat tensor's numbers, complex ones as pairs; shape `(n,)` or `(2 * n,)`, a view.

    Example:
        >>> real(torch.tensor([1 + 2j]))
        tensor([1., 2.])
    """
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def restored(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """What `real` took apart, in `dtype`.

    Example:
        >>> restored(torch.tensor([1.0, 2.0], dtype=torch.float16), torch.complex64)
        tensor([1.+2.j])
    """
    if not dtype.is_complex:
        return numbers.to(dtype)
    return torch.view_as_complex(numbers.to(dtype.to_real()).view(-1, 2))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: 32 bits at least.

    Example:
        >>> wide(torch.float16), wide(torch.complex128)
        (torch.float32, torch.complex128)
    """
    return torch.promote_types(dtype, torch.float32)


def joined_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Contiguous tensors as one run of bytes, shape `(n,)`, uint8.

    Example:
        >>> joined_bytes([torch.tensor([1], dtype=torch.int16), torch.tensor([[7]]).to(torch.int8)])
        tensor([1, 0, 7], dtype=torch.uint8)
    """
    return torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors])


def split_bytes(
    joined: Tensor, forms: Sequence[tuple[torch.dtype, tuple[int, ...]]]
) -> list[Tensor]:
    """The tensors that `joined_bytes` was given, by dtype and shape.

    Example:
        >>> split_bytes(torch.tensor([1, 0, 7], dtype=torch.uint8), [(torch.int16, (1,))])
        [tensor([1], dtype=torch.int16)]
    """
    parts, start = [], 0
    for dtype, shape in forms:
        stop = start + prod(shape) * dtype.itemsize
        # Copied, so that it is aligned.
        parts.append(joined[start:stop].clone().view(dtype).view(shape))
        start = stop
    return parts
