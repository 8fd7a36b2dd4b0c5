"""Copying of leaves into a bucket's buffer, and out of it.

CPU memory is processed by the compiled kernels of `fddp._C`, in one pass and without the GIL; other
devices by torch's multi-tensor operations, in a few kernel launches per bucket instead of several
per leaf. There, only reading stats waits for the device. `tests.reference.pack` is the same in
plain torch.

Common rules:
    * A buffer is one-dimensional and contiguous, and may be longer than its layout. Leaves and
      buffer have any of the reducible dtypes, but are all real or all complex.
    * A value is scaled in float32, or in float64 if either side has that precision, and then cast
      to the destination's dtype with torch's rounding. Complex values are scaled as pairs.
    * Autograd records nothing. Version counters of written tensors are incremented.
    * Bits depend neither on the number of threads nor on the machine's vector width.

[Note: zero weight]
A rank whose weight is zero contributes nothing, even if its gradients are NaN. As `0 * NaN` is NaN,
sources are not read if the scale is zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from fddp.native import extension
from fddp.native.layout import UNMEASURED
from fddp.native.layout import Layout as Layout
from fddp.native.layout import Stats as Stats
from fddp.native.torch_private import foreach_norm

_COMPILED = frozenset({"cpu"})  # types of the devices with compiled kernels


def pack_(
    buffer: Tensor,
    layout: Layout,
    sources: Sequence[Tensor | None],
    scale: float = 1.0,
    *,
    squares: Tensor | None = None,
) -> float:
    """Write every slice of `buffer`: the cast of `source * scale`.

    Args:
        buffer: shape `(n,)` with `n >= layout.numel`.
        layout: position of each leaf.
        sources: one per leaf, of its shape, in any memory order (expanded, transposed, conjugate
            views) or sparse; None for a leaf without a gradient, whose slice is zeroed. A source
            may be its own slice of the buffer.
        scale: factor; 0 zeroes all slices. See [Note: zero weight].
        squares: float64 of shape `(leaves,)` on the CPU, or None. Receives the sum of squares of
            each slice that is written, of its values afterwards, in the same pass, with a relative
            error of at most 2^-20 (1e-12 in float64). On other devices it is unchanged, see
            `sum_squares`.

    Returns:
        The largest magnitude that was read (of real and imaginary parts) times that of `scale`:
        infinity if a value is not finite, else at most the largest float64. Always NaN on devices
        other than the CPU, as reading it would wait for the device.

    Raises:
        ValueError: a shape, device or count does not fit, or a source overlaps the buffer.
        TypeError: a dtype is not reducible, or a source is not a plain tensor.

    Example:
        >>> import torch
        >>> layout = Layout(offsets=(0, 2), shapes=((2,), (1,)), strides=((1,), (1,)), numel=3)
        >>> buffer = torch.empty(3)
        >>> pack_(buffer, layout, [torch.tensor([1.0, 2.0]), None], scale=0.5)
        1.0
        >>> buffer
        tensor([0.5000, 1.0000, 0.0000])
    """
    return extension.compiled.pack_(buffer, layout.native, sources, scale, squares)


def pack_add_(
    buffer: Tensor,
    layout: Layout,
    sources: Sequence[Tensor | None],
    scale: float = 1.0,
    *,
    squares: Tensor | None = None,
) -> float:
    """Add the cast of `source * scale` to each slice. Slices of missing leaves are unchanged.

    Arguments, result and errors are those of `pack_`.

    Example:
        >>> import torch
        >>> layout = Layout(offsets=(0, 2), shapes=((2,), (1,)), strides=((1,), (1,)), numel=3)
        >>> buffer = torch.ones(3)
        >>> pack_add_(buffer, layout, [torch.tensor([1.0, -2.0]), None], scale=0.5)
        1.0
        >>> buffer
        tensor([1.5000, 0.0000, 1.0000])
    """
    return extension.compiled.pack_add_(buffer, layout.native, sources, scale, squares)


def sum_squares(buffer: Tensor, layout: Layout) -> Tensor:
    """Return the sum of squares of each slice of a buffer, without waiting for its device.

    Returns:
        Shape `(leaves,)`, on the device of the buffer, float64 if it has that.

    Example:
        >>> import torch
        >>> layout = Layout(offsets=(0, 2), shapes=((2,), (1,)), strides=((1,), (1,)), numel=3)
        >>> sum_squares(torch.tensor([3.0, 4.0, 2.0]), layout)
        tensor([25.,  4.], dtype=torch.float64)
    """
    own = slices(buffer, layout)
    if buffer.device.type in _COMPILED:
        squares = torch.empty(len(own), dtype=torch.float64)
        pack_(buffer, layout, own, squares=squares)  # in place, which only reads
        return squares
    widest = torch.float64 if _has_float64(buffer.device) else torch.float32
    dtype = torch.float32 if buffer.dtype.itemsize == 2 else None
    norms = foreach_norm([_real(each) for each in own], 2, dtype=dtype)
    return torch.stack(norms).to(widest).square()


def scale_(buffer: Tensor, scale: float = 1.0, *, stats: bool = True) -> Stats:
    """Multiply a whole buffer in place, and measure the result in the same pass.

    Args:
        buffer: shape `(n,)`.
        scale: factor; 1 writes nothing.
        stats: True to measure, which waits for devices other than the CPU.

    Returns:
        The stats of the result, or `Stats(nan, True)` if not requested.

    Raises:
        ValueError: the buffer is not one-dimensional and contiguous.
        TypeError: its dtype is not reducible, or it is not a plain tensor.

    Example:
        >>> import torch
        >>> buffer = torch.tensor([3.0, 4.0])
        >>> scale_(buffer, 2.0), buffer
        (Stats(sq_norm=100.0, finite=True), tensor([6., 8.]))
    """
    if scale == 1.0 and not stats:
        return UNMEASURED
    if buffer.device.type in _COMPILED:
        measured = Stats(*extension.compiled.scale_(buffer, scale))
        return measured if stats else UNMEASURED
    with torch.no_grad():
        if scale != 1.0:
            _real(buffer).mul_(scale)
        return read_stats([measure([buffer])]) if stats else UNMEASURED


def unpack_(
    outputs: Sequence[Tensor | None],
    layout: Layout,
    buffer: Tensor,
    scale: float = 1.0,
    *,
    stats: bool = True,
) -> Stats:
    """Write every output: the cast of its slice times `scale`, measured in the same pass.

    Args:
        outputs: one per leaf, of its shape, in any memory order without overlap; None to skip the
            leaf. Outputs must not overlap each other.
        layout: position of each leaf.
        buffer: shape `(n,)` with `n >= layout.numel`; read only.
        scale: factor, also applied if it is 0.
        stats: True to measure, which waits for devices other than the CPU.

    Returns:
        The stats of all written values, or `Stats(nan, True)` if not requested.

    Raises:
        ValueError: a shape, device or count does not fit, an output overlaps itself or the buffer.
        TypeError: a dtype is not reducible, an output is sparse or not a plain tensor.

    Example:
        >>> import torch
        >>> layout = Layout(offsets=(0, 2), shapes=((2,), (1,)), strides=((1,), (1,)), numel=3)
        >>> outputs = [torch.empty(2), None]
        >>> unpack_(outputs, layout, torch.tensor([1.0, 2.0, 3.0]), scale=2.0)
        Stats(sq_norm=20.0, finite=True)
        >>> outputs[0]
        tensor([2., 4.])
    """
    if buffer.device.type in _COMPILED:
        measured = Stats(*extension.compiled.unpack_(outputs, layout.native, buffer, scale))
        return measured if stats else UNMEASURED
    extension.compiled.foreach_unpack_(outputs, layout.native, buffer, scale)
    if not stats:
        return UNMEASURED
    return read_stats([measure([output for output in outputs if output is not None])])


def measure(tensors: Sequence[Tensor]) -> Tensor:
    """Measure tensors of one device without waiting for it; see `read_stats`.

    Returns:
        Two float64 numbers on the device (float32 on one without float64): the sum of squared
        magnitudes, and the number of elements that are NaN or infinite.
    """
    flat = [_real(tensor.resolve_conj()).reshape(-1) for tensor in tensors]
    whole = torch.cat(flat) if flat else torch.empty(0)
    widest = torch.float64 if _has_float64(whole.device) else torch.float32
    sq_norm = torch.linalg.vector_norm(whole, dtype=widest).square()
    return torch.stack([sq_norm, (~whole.isfinite()).sum().to(widest)])


def read_stats(measurements: Sequence[Tensor]) -> Stats:
    """Return the stats of all tensors given to `measure`. Waits once for each of their devices.

    Example:
        >>> import torch
        >>> read_stats([measure([torch.tensor([3.0])]), measure([torch.tensor([4.0])])])
        Stats(sq_norm=25.0, finite=True)
    """
    totals: dict[torch.device, Tensor] = {}
    for each in measurements:
        totals[each.device] = each + totals[each.device] if each.device in totals else each
    numbers = [total.tolist() for total in totals.values()]
    return Stats(sum(n[0] for n in numbers), not any(n[1] for n in numbers))


def flag_nonfinite(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, list[int]]:
    """Flag tensors that hold NaN or infinity, without waiting for a device.

    Args:
        tensors: at least one, dense, of any shapes, dtypes and devices.
        device: device of the flags; not the CPU if a tensor is on another device.

    Returns:
        Flags of shape `(n,)`, float32, 1.0 for NaN or infinity and else 0.0. And their order: for
        each flag the number of its tensor.

    Example:
        >>> import torch
        >>> nan = torch.tensor(float("nan"))
        >>> flag_nonfinite([torch.ones(2), nan.double(), nan], torch.device("cpu"))
        (tensor([0., 1., 1.]), [0, 2, 1])
    """
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(tensors):
        alike.setdefault((tensor.device, tensor.dtype), []).append(number)
    flags = [_flags([tensors[n] for n in numbers]) for numbers in alike.values()]
    order = [number for numbers in alike.values() for number in numbers]
    return torch.cat([each.to(device, non_blocking=True) for each in flags]), order


def _flags(alike: Sequence[Tensor]) -> Tensor:
    """`flag_nonfinite` of tensors of one device and dtype, in their order."""
    if alike[0].device.type in _COMPILED:
        return torch.tensor(
            [float(not scale_(each.contiguous().view(-1)).finite) for each in alike]
        )
    # An empty tensor has no largest magnitude.
    filled = [_real(each) if each.numel() else each.new_zeros(1) for each in alike]
    largest = torch.stack(foreach_norm(filled, math.inf))
    return largest.isfinite().logical_not().float()


def measures_late(device: torch.device) -> bool:
    """Return True if stats of this device's memory make the host wait for the device."""
    return device.type not in _COMPILED


def slices(buffer: Tensor, layout: Layout) -> list[Tensor]:
    """Return a result per leaf over a buffer's memory, without a copy, on any device.

    Each has a storage of its own, exactly as long as the leaf (so that saving it saves no more),
    and a version counter of its own. It keeps the buffer's memory alive, and cannot be resized.
    Shapes and strides are those of the layout, dtype and device those of the buffer.

    Raises:
        ValueError: the buffer is too short, not one-dimensional or not contiguous.
        TypeError: its dtype is not reducible.

    Example:
        >>> import torch
        >>> layout = Layout(offsets=(0, 2), shapes=((2,), (1,)), strides=((1,), (1,)), numel=3)
        >>> first, second = slices(torch.tensor([1.0, 2.0, 3.0]), layout)
        >>> second, second.untyped_storage().nbytes()
        (tensor([3.]), 4)
    """
    return extension.compiled.slices(buffer, layout.native)


@cache
def _has_float64(device: torch.device) -> bool:
    """Return True if a device computes in float64; Apple's GPUs and some of Intel's do not."""
    try:
        torch.ones(1, device=device).double().square()
    except (TypeError, RuntimeError):
        return False
    return True


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
