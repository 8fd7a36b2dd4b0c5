"""The kernels of `fddp._C` as torch operators for graphs: `torch.ops.fddp.pack` and others.

The functions of `fddp.native.pack` write into given memory. A graph needs functions whose results
alias nothing and have shapes that are known without running them. These operators run the same
kernels that way. Importing this module registers them. All are linear and have derivatives.

    pack(Tensor[] leaves, int[] offsets, int numel, ScalarType dtype, float scale) -> Tensor
    unpack(Tensor buffer, int[] offsets, int[] ndims, int[] sizes, float scale) -> Tensor[]
    scale(Tensor buffer, float scale) -> Tensor

Example:
    >>> import torch
    >>> leaves = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])]
    >>> buffer = torch.ops.fddp.pack(leaves, [0, 2], 3, torch.float32, 2.0)
    >>> buffer
    tensor([2., 4., 6.])
    >>> torch.ops.fddp.unpack(buffer, [0, 2], [1, 2], [2, 1, 1], 0.5)
    [tensor([1., 2.]), tensor([[3.]])]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from fddp.native.layout import Layout, contiguous_strides
from fddp.native.pack import pack_, scale_, unpack_

Shape = tuple[int, ...]

_KNOWN_LAYOUTS = 256

LIBRARY: Any = torch.library.Library("fddp", "FRAGMENT")  # type: ignore[no-untyped-call]
"""Registration of the operators; it ends with the process."""

LIBRARY.define(
    "pack(Tensor[] leaves, int[] offsets, SymInt numel, ScalarType dtype, float scale=1.0) "
    "-> Tensor"
)
LIBRARY.define(
    "unpack(Tensor buffer, int[] offsets, int[] ndims, int[] sizes, float scale=1.0) -> Tensor[]"
)
LIBRARY.define("scale(Tensor buffer, float scale) -> Tensor")


def shapes_of(ndims: Sequence[int], sizes: Sequence[int]) -> tuple[Shape, ...]:
    """Split a flat list of sizes into shapes.

    Example:
        >>> shapes_of([2, 0, 1], [4, 5, 6])
        ((4, 5), (), (6,))
    """
    bounds = [0]
    for ndim in ndims:
        bounds.append(bounds[-1] + ndim)
    return tuple(tuple(sizes[start:end]) for start, end in pairwise(bounds))


@lru_cache(maxsize=_KNOWN_LAYOUTS)
def _layout(offsets: tuple[int, ...], shapes: tuple[Shape, ...], numel: int) -> Layout:
    return Layout(offsets, shapes, tuple(map(contiguous_strides, shapes)), numel)


def _pack(
    leaves: Sequence[Tensor],
    offsets: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    scale: float = 1.0,
) -> Tensor:
    buffer = _pack_shape(leaves, offsets, numel, dtype)
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)
    if sum(map(prod, shapes)) < numel:
        buffer.zero_()  # gaps between slices are part of the result
    pack_(buffer, _layout(tuple(offsets), shapes, numel), leaves, scale)
    return buffer


def _unpack(
    buffer: Tensor,
    offsets: Sequence[int],
    ndims: Sequence[int],
    sizes: Sequence[int],
    scale: float = 1.0,
) -> list[Tensor]:
    leaves = _unpack_shapes(buffer, offsets, ndims, sizes)
    layout = _layout(tuple(offsets), shapes_of(ndims, sizes), buffer.numel())
    unpack_(leaves, layout, buffer.contiguous(), scale, stats=False)
    return leaves


def _scale(buffer: Tensor, scale: float) -> Tensor:
    scaled = buffer.clone(memory_format=torch.contiguous_format)
    scale_(scaled, scale, stats=False)
    return scaled


def _pack_shape(
    leaves: Sequence[Tensor], offsets: Sequence[int], numel: int, dtype: torch.dtype, *_: Any
) -> Tensor:
    if not leaves:
        raise ValueError("fddp::pack needs at least one leaf, whose device the buffer takes")
    return leaves[0].new_empty((numel,), dtype=dtype)


def _unpack_shapes(
    buffer: Tensor, offsets: Sequence[int], ndims: Sequence[int], sizes: Sequence[int], *_: Any
) -> list[Tensor]:
    return [buffer.new_empty(shape) for shape in shapes_of(ndims, sizes)]


def _scale_shape(buffer: Tensor, scale: float) -> Tensor:
    return buffer.new_empty(buffer.shape)


# Derivatives: pack and unpack are each other's transpose, scale is its own.


def _keep_for_pack(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    leaves, ctx.offsets, _, _, ctx.scale = inputs
    ctx.shapes = [leaf.shape for leaf in leaves]
    ctx.dtypes = [leaf.dtype for leaf in leaves]


def _pack_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    ndims = [len(shape) for shape in ctx.shapes]
    sizes = [size for shape in ctx.shapes for size in shape]
    grads = torch.ops.fddp.unpack(grad, ctx.offsets, ndims, sizes, ctx.scale)
    cast = [leaf.to(dtype) for leaf, dtype in zip(grads, ctx.dtypes, strict=True)]
    return cast, None, None, None, None


def _keep_for_unpack(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    buffer, ctx.offsets, ctx.ndims, ctx.sizes, ctx.scale = inputs
    ctx.numel, ctx.dtype = buffer.numel(), buffer.dtype
    ctx.zeros = buffer.new_zeros


def _unpack_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    shapes = shapes_of(ctx.ndims, ctx.sizes)
    present = [
        ctx.zeros(shape) if grad is None else grad
        for grad, shape in zip(grads, shapes, strict=True)
    ]
    grad = torch.ops.fddp.pack(present, ctx.offsets, ctx.numel, ctx.dtype, ctx.scale)
    return grad, None, None, None, None


def _keep_for_scale(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.scale = inputs[1]


def _scale_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.fddp.scale(grad, ctx.scale), None


for name, kernel, shape, backward, setup_context in (
    ("pack", _pack, _pack_shape, _pack_backward, _keep_for_pack),
    ("unpack", _unpack, _unpack_shapes, _unpack_backward, _keep_for_unpack),
    ("scale", _scale, _scale_shape, _scale_backward, _keep_for_scale),
):
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fddp::{name}", shape, lib=LIBRARY)
    torch.library.register_autograd(
        f"fddp::{name}", backward, setup_context=setup_context, lib=LIBRARY
    )
