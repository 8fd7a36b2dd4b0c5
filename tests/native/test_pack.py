"""Compiled and multi-tensor pack and unpack against the plain reference, to the bit."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fddp.native import pack
from fddp.native.layout import Layout, Stats, contiguous_strides, views
from tests.reference import pack as pack_reference
from tests.support.pack_cases import (
    COMPLEX,
    FORMS,
    IMPLEMENTATIONS,
    REAL,
    Case,
    assert_same_bits,
    assert_same_squares,
    assert_same_stats,
    cases,
    flat_layout,
    pack_foreach,
    shaped,
    squares_error,
    values,
)

# Agreement


@pytest.mark.parametrize("name", ["pack_", "pack_add_"])
@given(case=cases(FORMS))
def test_packing_agrees(name: str, case: Case) -> None:
    before = case.buffer.clone()
    expected = case.buffer.clone()
    args = case.layout, case.leaves, case.scale
    peak = getattr(pack_reference, name)(expected, *args)
    assert getattr(pack, name)(case.buffer, *args) == peak
    assert_same_bits(case.buffer, expected)
    getattr(pack_foreach, name)(before, *args)
    assert_same_bits(before, expected)


@pytest.mark.parametrize("name", ["pack_", "pack_add_"])
@given(case=cases(FORMS))
def test_squares_are_those_of_the_slices_afterwards(name: str, case: Case) -> None:
    """Of those that are written; the others keep their numbers. Bits are those of a pass that sums
    none."""
    plain, expected = case.buffer.clone(), case.buffer.clone()
    found, sums = (torch.full((len(case.leaves),), -1.0, dtype=torch.float64) for _ in range(2))
    args = case.layout, case.leaves, case.scale
    peak = getattr(pack, name)(plain, *args)
    getattr(pack_reference, name)(expected, *args, squares=sums)
    assert getattr(pack, name)(case.buffer, *args, squares=found) == peak
    assert_same_bits(case.buffer, plain)
    assert_same_squares(found, sums, squares_error(case.buffer.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@given(
    exponents=st.lists(st.integers(-130, 126), min_size=1, max_size=4),
    numel=st.integers(1, 1500) | st.just(40_000),
    seed=st.integers(0, 99),
)
def test_squares_have_their_precision_in_the_range_of_the_dtype(
    dtype: torch.dtype, exponents: list[int], numel: int, seed: int
) -> None:
    """Also where squares leave the range of float32. Each part of the numbers has a magnitude."""
    whole = torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for part, exponent in zip(whole.chunk(len(exponents)), exponents, strict=False):
        part *= 2.0**exponent
    source, buffer = whole.to(dtype), torch.empty(numel, dtype=dtype)
    expected, found = torch.empty(2, 1, dtype=torch.float64)
    args = flat_layout(numel), [source]
    pack_reference.pack_(buffer, *args, squares=expected)
    pack.pack_(buffer, *args, squares=found)
    assert_same_squares(found, expected, squares_error(dtype))


@pytest.mark.parametrize("name", ["pack_", "pack_add_"])
@given(
    numel=st.integers(1, 1200),
    place=st.integers(0, 1199),
    largest=st.sampled_from([3e4, -3e4, math.inf, -math.inf, math.nan]),
)
def test_long_leaves_agree_with_their_squares(
    name: str, numel: int, place: int, largest: float
) -> None:
    """Longer than the blocks in which floats are copied and squared in one pass, with the largest
    magnitude at any place of one."""
    source, before = torch.randn(2, numel, generator=torch.Generator().manual_seed(numel))
    source[place % numel] = largest
    buffer, expected = before.clone(), before.clone()
    found, sums = torch.empty(2, 1, dtype=torch.float64)
    args = flat_layout(numel), [source], 0.7
    peak = getattr(pack_reference, name)(expected, *args, squares=sums)
    assert getattr(pack, name)(buffer, *args, squares=found) == peak
    assert_same_bits(buffer, expected)
    assert_same_squares(found, sums, squares_error(torch.float32))


@given(cases(("missing",)))
def test_sums_of_squares_agree(case: Case) -> None:
    before, expected = case.buffer.clone(), pack_reference.sum_squares(case.buffer, case.layout)
    found = pack.sum_squares(case.buffer, case.layout)
    assert_same_squares(found, expected, squares_error(case.buffer.dtype))
    assert_same_bits(case.buffer, before)
    # For narrower dtypes, a norm of torch is one of float32, and so may be the squares of numbers.
    float32 = torch.finfo(torch.float32)
    if case.layout.offsets and bool((expected.sqrt() < float32.max / 2).all()):
        found = pack_foreach.sum_squares(case.buffer, case.layout)
        assert_same_squares(found, expected, 1e-5, case.layout.numel * float32.tiny)


@pytest.mark.parametrize("dtype", [*REAL, torch.complex64], ids=str)
def test_a_large_leaf_is_scaled_and_copied_in_one_pass(dtype: torch.dtype) -> None:
    count = 1 << 20  # elements, in any dtype at least 1 MiB
    large = values((count,), dtype, seed=1, wild=True).reshape(1024, -1).T
    shapes = ((3,), tuple(large.shape))
    layout = Layout((0, 3), shapes, ((1,), large.stride()), count + 3)
    sources = [torch.ones(3, dtype=dtype), large]
    buffer, expected = (torch.zeros(count + 3, dtype=dtype) for _ in range(2))
    pack_reference.pack_(expected, layout, sources, 1 / 3)
    with torch.profiler.profile(record_shapes=True) as profile:
        pack_foreach.pack_(buffer, layout, sources, 1 / 3)
    assert_same_bits(buffer, expected)
    passes = [
        event.name
        for event in profile.events()
        if event.cpu_parent is None and event.input_shapes[0][:1] == [1024]
    ]
    assert [name for name in passes if name in ("aten::mul", "aten::copy_")] == ["aten::mul"]


def test_devices_without_float64_measure_in_float32() -> None:
    buffer = torch.tensor([3.0, 4.0, 2.0])
    with mock.patch.object(pack, "_has_float64", return_value=False):
        found = [pack.measure([buffer]), pack_foreach.sum_squares(buffer, flat_layout(2, 1))]
    assert [each.dtype for each in found] == [torch.float32] * 2
    assert [each.tolist() for each in found] == [[29.0, 0.0], [25.0, 4.0]]


@pytest.mark.parametrize(
    ("form", "dtype", "target"),
    [
        ("dense", torch.float16, torch.bfloat16),
        ("dense", torch.bfloat16, torch.float64),
        ("sparse", torch.float32, torch.float32),
        ("conjugate", torch.complex64, torch.complex64),
    ],
    ids=str,
)
def test_packing_a_large_leaf_agrees(form: str, dtype: torch.dtype, target: torch.dtype) -> None:
    """Whether or not its form and dtypes allow one pass."""
    count = 1 << 20
    args = flat_layout(count), [shaped(form, (count,), dtype, seed=1, wild=True)], 1 / 3
    buffer, expected = (torch.zeros(count, dtype=target) for _ in range(2))
    pack_reference.pack_(expected, *args)
    pack_foreach.pack_(buffer, *args)
    assert_same_bits(buffer, expected)


@pytest.mark.parametrize("name", ["pack_", "pack_add_"])
def test_magnitudes_on_other_devices_are_unknown(name: str) -> None:
    buffer, source = torch.empty(3, device="meta"), torch.empty(3, device="meta")
    assert math.isnan(getattr(pack, name)(buffer, flat_layout(3), [source], 0.5))


@given(cases(("dense", "other order", "sliced", "missing")))
def test_unpack_agrees(case: Case) -> None:
    def outputs() -> list[Tensor | None]:
        return [None if leaf is None else leaf.detach().clone() for leaf in case.leaves]

    args = case.layout, case.buffer, case.scale
    buffer = case.buffer.clone()
    expected, others = outputs(), outputs()
    stats = pack_reference.unpack_(expected, *args)
    assert_same_stats(pack.unpack_(case.leaves, *args), stats)
    assert_same_stats(pack_foreach.unpack_(others, *args), stats)
    for leaf, other, reference in zip(case.leaves, others, expected, strict=True):
        if reference is not None:
            assert_same_bits(leaf.detach(), reference)
            assert_same_bits(other, reference)
    assert_same_bits(case.buffer, buffer)


@given(cases(("missing",)))
def test_scale_agrees(case: Case) -> None:
    buffers = [case.buffer.clone() for _ in range(2)]
    expected = pack_reference.scale_(case.buffer, case.scale)
    for buffer, ops in zip(buffers, IMPLEMENTATIONS.values(), strict=True):
        assert_same_stats(ops.scale_(buffer, case.scale), expected)
        assert_same_bits(buffer, case.buffer)


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("scale", [0.5, 1 / 3, 1e-3])
def test_same_dtype_gives_the_bits_of_torch_mul(dtype: torch.dtype, scale: float) -> None:
    source = values((10_007,), dtype, seed=1, wild=True)
    buffer = torch.empty_like(source)
    pack.pack_(buffer, flat_layout(10_007), [source], scale)
    assert_same_bits(buffer, torch.mul(source, scale))


@pytest.mark.parametrize("source", REAL, ids=str)
@pytest.mark.parametrize("target", REAL, ids=str)
def test_every_16_bit_pattern_is_cast_as_torch_casts(
    source: torch.dtype, target: torch.dtype
) -> None:
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    numbers = patterns.view(source) if source.itemsize == 2 else patterns.view(torch.float16)
    numbers = numbers.to(source) * (1 + 2**-11) if source.itemsize > 2 else numbers
    buffer = torch.empty(2**16, dtype=target)
    pack.pack_(buffer, flat_layout(2**16), [numbers])
    assert_same_bits(buffer, numbers.to(target))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("target", REAL, ids=str)
def test_a_gpu_gives_the_bits_of_the_reference(target: torch.dtype) -> None:
    shapes = ((3, 4), (), (1000,), (2, 0))
    offsets = (0, 12, 13, 1013)
    layout = Layout(offsets, shapes, tuple(map(contiguous_strides, shapes)), 1013)
    for source in REAL:
        leaves = [values(shape, source, seed=i, wild=True).cuda() for i, shape in enumerate(shapes)]
        buffer = torch.zeros(layout.numel, dtype=target, device="cuda")
        expected = buffer.clone()
        for name in ("pack_", "pack_add_"):
            peak = getattr(pack, name)(buffer, layout, [*leaves[:3], None], 1 / 3)
            assert math.isnan(peak)
            getattr(pack_reference, name)(expected, layout, [*leaves[:3], None], 1 / 3)
            assert_same_bits(buffer.cpu(), expected.cpu())
        copies = [leaf.clone() for leaf in leaves]
        stats = pack_reference.unpack_(copies, layout, buffer, 3.0)
        assert_same_stats(pack.unpack_(leaves, layout, buffer, 3.0), stats)
        for leaf, result, view in zip(
            leaves, pack.slices(buffer, layout), views(buffer, layout), strict=True
        ):
            assert leaf.device == result.device
            assert_same_bits(result.cpu(), view.cpu())


# Zero weight, finiteness


@pytest.mark.parametrize("scale", [0.0, -0.0])
def test_a_scale_of_zero_gives_exact_zeros(ops: Any, scale: float) -> None:
    layout = flat_layout(3)
    source = torch.tensor([math.nan, math.inf, -1.0])
    buffer = torch.full((3,), math.nan)
    assert not ops.pack_(buffer, layout, [source], scale) > 0.0
    assert_same_bits(buffer, torch.zeros(3))
    assert not ops.pack_add_(buffer.fill_(-0.0), layout, [source], scale) > 0.0
    assert_same_bits(buffer, torch.full((3,), -0.0))


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_missing_leaves_are_zeros_under_any_scale(ops: Any, scale: float) -> None:
    buffer = torch.full((4,), math.nan)
    ops.pack_(buffer, flat_layout(4), [None], scale)
    assert_same_bits(buffer, torch.zeros(4))


@pytest.mark.parametrize("dtype", REAL + COMPLEX, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_value_is_found_wherever_it_is(dtype: torch.dtype, bad: float) -> None:
    numel = 71
    layout = flat_layout(3, numel)
    target = torch.complex64 if dtype.is_complex else torch.float32
    for position in range(numel):
        source = torch.ones(numel, dtype=dtype)
        source[position] = complex(1.0, bad) if dtype.is_complex else bad
        buffer = torch.empty(3 + numel, dtype=target)
        assert pack.pack_(buffer, layout, [None, source], 0.5) == math.inf
        assert pack.pack_add_(buffer.zero_(), layout, [None, source], 0.5) == math.inf
        assert not pack.scale_(buffer, 2.0).finite
        assert not pack.scale_(buffer).finite
        assert not pack.unpack_([None, source.clone()], layout, buffer, 2.0).finite


def test_statistics_of_pack_reads_and_unpack_writes() -> None:
    layout = flat_layout(1)
    buffer = torch.empty(1, dtype=torch.float16)
    assert pack.pack_(buffer, layout, [torch.tensor([1e30])]) == pytest.approx(1e30)
    assert buffer.isinf()
    output = torch.empty(1, dtype=torch.float16)
    stats = pack.unpack_([output], layout, torch.tensor([1e30]))
    assert stats == Stats(math.inf, False)


def test_squares_that_overflow_do_not_count_as_bad_values() -> None:
    assert pack.scale_(torch.tensor([1e200], dtype=torch.float64)) == Stats(math.inf, True)
    assert pack_foreach.scale_(torch.tensor([1e200], dtype=torch.float64)) == Stats(math.inf, True)


def test_stats_not_asked_for_are_marked(ops: Any) -> None:
    buffer, output = torch.full((2,), math.nan), torch.empty(2)
    for scale in (1.0, 2.0):
        for stats in (
            ops.scale_(buffer, scale, stats=False),
            ops.unpack_([output], flat_layout(2), buffer, scale, stats=False),
        ):
            assert math.isnan(stats.sq_norm)
            assert stats.finite


# Memory


def test_a_scale_of_one_writes_nothing() -> None:
    buffer = torch.ones(5)
    version = buffer._version
    assert pack.scale_(buffer) == Stats(5.0, True)
    assert buffer._version == version


def test_written_tensors_get_new_versions_without_autograd_history(ops: Any) -> None:
    layout = flat_layout(2, 3)
    sources = [torch.ones(2, requires_grad=True), (torch.ones(3, requires_grad=True) * 2)]
    buffer = torch.empty(5)
    outputs = [torch.empty(2, requires_grad=True), torch.empty(6)[::2]]
    versions = [tensor._version for tensor in (buffer, *outputs)]
    ops.pack_(buffer, layout, sources)
    ops.pack_add_(buffer, layout, sources)
    ops.scale_(buffer, 2.0)
    ops.unpack_(outputs, layout, buffer)
    assert buffer.grad_fn is None
    assert all(output.grad_fn is None for output in outputs)
    written = [tensor._version for tensor in (buffer, *outputs)]
    assert written == [version + by for version, by in zip(versions, (3, 1, 1), strict=True)]


def test_a_source_may_be_its_own_slice(ops: Any) -> None:
    layout = flat_layout(3, 4)
    buffer = torch.arange(7.0)
    peaks = [ops.pack_(buffer, layout, views(buffer, layout), scale) for scale in (0.5, 1.0)]
    assert_same_bits(buffer, torch.arange(7.0) / 2)
    peaks.append(ops.pack_add_(buffer, layout, pack.slices(buffer, layout), 1.0))
    assert_same_bits(buffer, torch.arange(7.0))
    if ops is pack:
        assert peaks == [3.0] * 3


@pytest.mark.parametrize("form", ["dense", "expanded"])
def test_sources_survive(ops: Any, form: str) -> None:
    source = shaped(form, (3, 4), torch.float32, seed=0, wild=False)
    before = source.detach().clone()
    layout = Layout((0,), ((3, 4),), ((1, 3),), 12)
    ops.pack_(torch.empty(12), layout, [source], 2.0)
    assert torch.equal(source, before)


# Threads


@pytest.fixture
def torch_threads() -> Any:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_bits_do_not_depend_on_the_number_of_threads(
    torch_threads: Callable[[int], None],
) -> None:
    numels = (1, 300_001, 17, 0, 65_536, 5)
    layout = flat_layout(*numels)
    sources = [values((n,), torch.float32, seed=n, wild=False) for n in numels]
    results = []
    for threads in (1, 2, 3):
        torch_threads(threads)
        buffer = torch.empty(layout.numel)
        outputs = [torch.empty(n, dtype=torch.bfloat16) for n in numels]
        squares = torch.empty(len(numels), dtype=torch.float64)
        peak = pack.pack_(buffer, layout, sources, 1 / 3, squares=squares)
        stats = pack.scale_(buffer, 0.7), squares.tolist()
        results.append((peak, buffer, stats, pack.unpack_(outputs, layout, buffer, 3.0), outputs))
    for peak, buffer, stats, unpacked, outputs in results[1:]:
        assert (peak, stats, unpacked) == (results[0][0], results[0][2], results[0][3])
        assert_same_bits(buffer, results[0][1])
        for output, first in zip(outputs, results[0][4], strict=True):
            assert_same_bits(output, first)


def test_a_bad_value_is_found_by_any_thread(torch_threads: Callable[[int], None]) -> None:
    torch_threads(2)
    numel = 1 << 19
    for position in (0, numel // 2, numel - 1):
        source = torch.ones(numel)
        source[position] = math.nan
        buffer = torch.empty(numel)
        assert pack.pack_(buffer, flat_layout(numel), [source]) == math.inf
        assert not pack.scale_(buffer, 2.0).finite


def test_other_python_threads_run_during_a_copy() -> None:
    numel = 1 << 23
    layout, buffer, source = flat_layout(numel), torch.empty(numel), torch.ones(numel)
    ticks, done = [0], threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks[0] += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        # No thread is made to give way: the other one runs only if the copy lets it.
        sys.setswitchinterval(1000)
        for copy in (
            lambda: pack.pack_(buffer, layout, [source]),
            lambda: pack.pack_add_(buffer, layout, [source]),
            lambda: pack.scale_(buffer, 0.5),
            lambda: pack.unpack_([source], layout, buffer),
        ):
            before = ticks[0]
            attempts = 0
            while ticks[0] == before and attempts < 100:
                copy()
                attempts += 1
            assert ticks[0] > before
    finally:
        done.set()
        sys.setswitchinterval(interval)
        ticker.join()
