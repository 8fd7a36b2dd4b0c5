"""Layouts, leaves and buffers to pack, and comparisons to the bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from fddp.native import extension, pack
from fddp.native.layout import Layout, Stats, contiguous_strides

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
SCALES = (0.0, 1.0, 0.5, 1 / 3, -2.0, 1e-3, 3e38, math.inf, math.nan)


def multi_tensor(name: str) -> Any:
    """A function of `pack` as it runs on devices without compiled kernels."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with patch.object(pack, "_COMPILED", frozenset()):
            return getattr(pack, name)(*args, **kwargs)

    def run_packing(
        buffer: Tensor, layout: Layout, sources: Sequence[Tensor | None], scale: float = 1.0
    ) -> float:
        getattr(extension.compiled, f"foreach_{name}")(buffer, layout.native, sources, scale)
        return math.nan

    return run_packing if name.startswith("pack_") else run


pack_foreach = SimpleNamespace(
    **{
        name: multi_tensor(name)
        for name in ("pack_", "pack_add_", "scale_", "unpack_", "sum_squares")
    }
)
IMPLEMENTATIONS: dict[str, Any] = {"compiled": pack, "multi-tensor": pack_foreach}
FORMS = ("dense", "other order", "sliced", "expanded", "negated", "conjugate", "sparse", "missing")


def flat_layout(*numels: int) -> Layout:
    offsets = [sum(numels[:i]) for i in range(len(numels))]
    return Layout(tuple(offsets), tuple((n,) for n in numels), ((1,),) * len(numels), sum(numels))


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal bits, the sign of zero included; which NaN it is does not matter."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    ours, theirs = (torch.view_as_real(t) if t.is_complex() else t for t in (actual, expected))
    bad = theirs.isnan()
    assert torch.equal(ours.isnan(), bad), (actual, expected)
    same = (ours == theirs) & (ours.signbit() == theirs.signbit()) | bad
    assert bool(same.all()), (actual, expected)


def assert_same_stats(actual: Stats, expected: Stats) -> None:
    assert actual.finite == expected.finite
    assert actual.sq_norm == pytest.approx(expected.sq_norm, rel=1e-12, nan_ok=True)


def squares_error(dtype: torch.dtype) -> float:
    """Largest relative error of sums of squares of compiled packing."""
    return 1e-12 if dtype.to_real() == torch.float64 else 2.0**-20


def assert_same_squares(actual: Tensor, expected: Tensor, rel: float, least: float = 0.0) -> None:
    assert actual.dtype == torch.float64
    finite = expected.isfinite()
    assert torch.equal(actual.isfinite(), finite), (actual, expected)
    torch.testing.assert_close(actual[finite], expected[finite], rtol=rel, atol=least)


class Case(NamedTuple):
    layout: Layout
    buffer: Tensor
    leaves: list[Tensor | None]
    scale: float


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int, wild: bool) -> Tensor:
    """Numbers over a wide range; with `wild`, some that are not finite, zero or subnormal."""
    generator = torch.Generator().manual_seed(seed)
    real = dtype.to_real()
    pair = (*shape, 2) if dtype.is_complex else shape
    numbers = torch.randn(pair, generator=generator, dtype=torch.float64)
    numbers *= 2.0 ** torch.randint(-12, 12, pair, generator=generator)
    numbers = numbers.to(real)
    if wild:
        info = torch.finfo(real)
        odd = torch.tensor(
            [math.nan, math.inf, -math.inf, -0.0, info.max, info.tiny / 4], dtype=torch.float64
        ).to(real)
        which = torch.randint(0, 4 * len(odd), pair, generator=generator)
        numbers = torch.where(which < len(odd), odd[which % len(odd)], numbers)
    return torch.view_as_complex(numbers) if dtype.is_complex else numbers


def shaped(form: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int, wild: bool) -> Any:
    """A tensor of this shape whose memory has this form, or None."""
    dense = values(shape, dtype, seed, wild)
    if form == "missing":
        return None
    if form == "other order":
        return dense.movedim(0, -1).contiguous().movedim(-1, 0) if shape else dense
    if form == "sliced":
        room = torch.zeros([2 * n for n in shape], dtype=dtype)
        window = room[tuple(slice(None, None, 2) for _ in shape)]
        return window.copy_(dense)
    if form == "expanded" and shape and shape[0] > 0:
        return dense[:1].expand(shape)
    if form == "negated" and not dtype.is_complex and dtype in (torch.float32, torch.float64):
        return torch.complex(dense, dense).conj().imag
    if form == "conjugate":
        return dense.conj()
    if form == "sparse" and shape:
        return dense.to_sparse()
    return dense.requires_grad_()


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    offsets, shapes, strides = [], [], []
    end = 0
    for _ in range(draw(st.integers(0, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        order = draw(st.permutations(range(len(shape))))
        inner = contiguous_strides([shape[d] for d in order])
        offsets.append(end + draw(st.sampled_from((0, 0, 3))))
        shapes.append(shape)
        strides.append(tuple(inner[order.index(d)] for d in range(len(shape))))
        end = offsets[-1] + math.prod(shape)
    return Layout(tuple(offsets), tuple(shapes), tuple(strides), end)


@st.composite
def cases(draw: st.DrawFn, forms: tuple[str, ...]) -> Case:
    layout = draw(layouts())
    family = draw(st.sampled_from((REAL, COMPLEX)))
    dtypes = st.sampled_from(family)
    seed, wild = draw(st.integers(0, 2**32)), draw(st.booleans())
    leaves = [
        shaped(draw(st.sampled_from(forms)), shape, draw(dtypes), seed + i, wild)
        for i, shape in enumerate(layout.shapes)
    ]
    spare = draw(st.integers(0, 3))
    room = values((2 + layout.numel + spare,), draw(dtypes), seed - 1, wild)
    return Case(layout, room[2:], leaves, draw(st.sampled_from(SCALES)))
