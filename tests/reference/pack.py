"""The functions of `fddp.native.pack` in plain torch: slow, one leaf at a time, plain to see.

Tests hold the compiled kernels and the multi-tensor path against these, to the bit; only squares
are summed in another order. Arguments are not checked here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from fddp.native.layout import UNMEASURED, Layout, Stats, views


def pack_(
    buffer: Tensor,
    layout: Layout,
    sources: Sequence[Tensor | None],
    scale: float = 1.0,
    *,
    squares: Tensor | None = None,
) -> float:
    """See `fddp.native.pack.pack_`."""
    peak = 0.0
    with torch.no_grad():
        for view, source in zip(views(buffer, layout), sources, strict=True):
            if source is None or scale == 0.0:
                view.zero_()
            else:
                source = _plain(source)
                peak = max(peak, _peak(source))
                view.copy_(_scaled(source, view.dtype, scale))
        if squares is not None:
            squares.copy_(sum_squares(buffer, layout))
    return _scaled_peak(peak, scale)


def pack_add_(
    buffer: Tensor,
    layout: Layout,
    sources: Sequence[Tensor | None],
    scale: float = 1.0,
    *,
    squares: Tensor | None = None,
) -> float:
    """See `fddp.native.pack.pack_add_`."""
    peak = 0.0
    with torch.no_grad():
        for i, (view, source) in enumerate(zip(views(buffer, layout), sources, strict=True)):
            if source is not None and scale != 0.0:
                source = _plain(source)
                peak = max(peak, _peak(source))
                _real(view).add_(_real(_scaled(source, view.dtype, scale)))
                if squares is not None:
                    squares[i] = _measure([view]).sq_norm
    return _scaled_peak(peak, scale)


def sum_squares(buffer: Tensor, layout: Layout) -> Tensor:
    """See `fddp.native.pack.sum_squares`."""
    norms = [_measure([view]).sq_norm for view in views(buffer, layout)]
    return torch.tensor(norms, dtype=torch.float64)


def scale_(buffer: Tensor, scale: float = 1.0, *, stats: bool = True) -> Stats:
    """See `fddp.native.pack.scale_`."""
    with torch.no_grad():
        if scale != 1.0:
            buffer.copy_(_scaled(buffer, buffer.dtype, scale))
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
    with torch.no_grad():
        for view, output in zip(views(buffer, layout), outputs, strict=True):
            if output is not None:
                output.copy_(_scaled(view, output.dtype, scale))
        written = [output for output in outputs if output is not None]
        return _measure(written) if stats else UNMEASURED


def _plain(source: Tensor) -> Tensor:
    return source.to_dense() if source.layout is not torch.strided else source


def _peak(source: Tensor) -> float:
    parts = _real(source).double().abs()
    return float(parts.nan_to_num(math.inf, math.inf).max()) if parts.numel() else 0.0


def _scaled_peak(peak: float, scale: float) -> float:
    if peak in (0.0, math.inf):
        return peak
    scaled = peak * abs(scale)
    return scaled if scaled < sys.float_info.max else sys.float_info.max


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.resolve_neg().resolve_conj()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _scaled(source: Tensor, target: torch.dtype, scale: float) -> Tensor:
    wide = source.to(_arithmetic_dtype(source.dtype, target))
    scaled = _real(wide) * scale
    return (torch.view_as_complex(scaled) if wide.is_complex() else scaled).to(target)


def _measure(tensors: Sequence[Tensor]) -> Stats:
    sq_norm = sum(float(_real(tensor).double().square().sum()) for tensor in tensors)
    return Stats(sq_norm, all(bool(tensor.isfinite().all()) for tensor in tensors))


def _arithmetic_dtype(source: torch.dtype, target: torch.dtype) -> torch.dtype:
    """The dtype in which a value is scaled between these two."""
    return torch.promote_types(torch.promote_types(source, target), torch.float32)
