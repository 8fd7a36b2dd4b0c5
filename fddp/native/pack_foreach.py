"""The functions of `fddp.native.pack` for memory that is not on the CPU.

Leaves are processed by torch's multi-tensor operations, in a few kernel launches per bucket instead
of several per leaf. Only reading stats waits for the device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from fddp.native.layout import UNMEASURED, Layout, Stats, arithmetic_dtype, views


def pack_(
    buffer: Tensor, layout: Layout, sources: Sequence[Tensor | None], scale: float = 1.0
) -> float:
    """See `fddp.native.pack.pack_`; always NaN."""
    _check("source", sources, layout, buffer)
    with torch.no_grad():
        slots = views(buffer, layout)
        if scale == 0.0:
            sources = [None] * len(slots)
        missing = [slot for slot, source in zip(slots, sources, strict=True) if source is None]
        if missing:
            torch._foreach_zero_(missing)
        _copy_scaled_(slots, sources, scale)
    return math.nan


def pack_add_(
    buffer: Tensor, layout: Layout, sources: Sequence[Tensor | None], scale: float = 1.0
) -> float:
    """See `fddp.native.pack.pack_add_`; always NaN."""
    _check("source", sources, layout, buffer)
    present = [i for i, source in enumerate(sources) if source is not None]
    if not present or scale == 0.0:
        return math.nan
    with torch.no_grad():
        slots = views(buffer, layout)
        terms = views(torch.empty_like(buffer), layout)
        _copy_scaled_(terms, sources, scale)
        torch._foreach_add_([_real(slots[i]) for i in present], [_real(terms[i]) for i in present])
    return math.nan


def scale_(buffer: Tensor, scale: float = 1.0, *, stats: bool = True) -> Stats:
    """See `fddp.native.pack.scale_`."""
    with torch.no_grad():
        if scale != 1.0:
            _real(buffer).mul_(scale)
        return _measure([buffer]) if stats else UNMEASURED


def unpack_(
    outputs: Sequence[Tensor | None],
    layout: Layout,
    buffer: Tensor,
    scale: float = 1.0,
    *,
    stats: bool = True,
) -> Stats:
    """See `fddp.native.pack.unpack_`."""
    _check("output", outputs, layout, buffer)
    with torch.no_grad():
        slots = views(buffer, layout)
        _copy_scaled_(
            outputs,
            [None if output is None else slot for slot, output in zip(slots, outputs, strict=True)],
            scale,
        )
        written = [output for output in outputs if output is not None]
        return _measure(written) if stats else UNMEASURED


def _copy_scaled_(
    targets: Sequence[Tensor | None], sources: Sequence[Tensor | None], scale: float
) -> None:
    """Set each target to the cast of its source times `scale`, if both are present."""
    groups: dict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for target, source in zip(targets, sources, strict=True):
        if target is not None and source is not None:
            groups[source.dtype, target.dtype].append((_real(target), _real(source)))
    for pairs in groups.values():
        to, of = map(list, zip(*pairs, strict=True))
        arithmetic = arithmetic_dtype(of[0].dtype, to[0].dtype)
        if scale == 1.0:
            torch._foreach_copy_(to, of)
        elif to[0].dtype == arithmetic:
            torch._foreach_copy_(to, of)
            torch._foreach_mul_(to, scale)
        else:
            # Not in place: torch would round the factor to the 16 bits of the target.
            exact = of[0].dtype in (to[0].dtype, arithmetic)
            wide = of if exact else [source.to(arithmetic) for source in of]
            torch._foreach_copy_(to, torch._foreach_mul(wide, scale))


def _real(tensor: Tensor) -> Tensor:
    """Return the tensor in a form for multi-tensor operations: dense, real, at least 1-d."""
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    dense = dense.resolve_neg().resolve_conj()
    if dense.is_complex():
        return torch.view_as_real(dense)
    # torch also rounds the factor for 16-bit tensors without a dimension.
    return dense if dense.dim() else dense.reshape(1)


def _measure(tensors: Sequence[Tensor]) -> Stats:
    if not tensors:
        return Stats(0.0, True)
    flat = torch.cat([_real(tensor).reshape(-1) for tensor in tensors])
    sq_norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64).square())
    # A non-finite sum may have overflowed although all elements are finite.
    return Stats(sq_norm, math.isfinite(sq_norm) or bool(flat.isfinite().all()))


def _check(role: str, leaves: Sequence[Tensor | None], layout: Layout, buffer: Tensor) -> None:
    # Multi-tensor copies would broadcast a smaller leaf, and drop an imaginary part.
    if len(leaves) != len(layout.shapes):
        raise ValueError(f"got {len(leaves)} {role}s for {len(layout.shapes)} leaves")
    for i, (leaf, shape) in enumerate(zip(leaves, layout.shapes, strict=True)):
        if leaf is None:
            continue
        if leaf.shape != shape:
            raise ValueError(
                f"{role} {i} has shape {list(leaf.shape)}, the layout says {list(shape)}"
            )
        if leaf.is_complex() != buffer.is_complex() or not (
            leaf.is_complex() or leaf.is_floating_point()
        ):
            raise TypeError(
                f"{role} {i} has dtype {leaf.dtype}, the buffer {buffer.dtype}: both must be "
                "floating or both complex"
            )
