"""Compiled and multi-tensor pack and unpack against the plain reference, to the bit."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fddp.core.plan.plan import LeafSpec, plan_leaves
from fddp.native import pack, pack_foreach
from fddp.native.layout import Layout, Stats, contiguous_strides, views
from tests.reference import pack as pack_reference

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
SCALES = (0.0, 1.0, 0.5, 1 / 3, -2.0, 1e-3, 3e38, math.inf, math.nan)
IMPLEMENTATIONS = {"compiled": pack, "multi-tensor": pack_foreach}
FORMS = ("dense", "other order", "sliced", "expanded", "negated", "conjugate", "sparse", "missing")


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request: pytest.FixtureRequest) -> Any:
    return IMPLEMENTATIONS[request.param]


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


# Cases


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


# Agreement


@given(cases(FORMS))
def test_pack_agrees(case: Case) -> None:
    before = case.buffer.clone()
    expected = case.buffer.clone()
    peak = pack_reference.pack_(expected, case.layout, case.leaves, case.scale)
    assert pack.pack_(case.buffer, case.layout, case.leaves, case.scale) == peak
    assert_same_bits(case.buffer, expected)
    assert math.isnan(pack_foreach.pack_(before, case.layout, case.leaves, case.scale))
    assert_same_bits(before, expected)


@given(cases(FORMS))
def test_pack_add_agrees(case: Case) -> None:
    before = case.buffer.clone()
    expected = case.buffer.clone()
    peak = pack_reference.pack_add_(expected, case.layout, case.leaves, case.scale)
    assert pack.pack_add_(case.buffer, case.layout, case.leaves, case.scale) == peak
    assert_same_bits(case.buffer, expected)
    assert math.isnan(pack_foreach.pack_add_(before, case.layout, case.leaves, case.scale))
    assert_same_bits(before, expected)


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


def test_written_tensors_get_new_versions_without_autograd_history() -> None:
    layout = flat_layout(2, 3)
    sources = [torch.ones(2, requires_grad=True), (torch.ones(3, requires_grad=True) * 2)]
    buffer = torch.empty(5)
    outputs = [torch.empty(2, requires_grad=True), torch.empty(6)[::2]]
    versions = [tensor._version for tensor in (buffer, *outputs)]
    pack.pack_(buffer, layout, sources)
    pack.pack_add_(buffer, layout, sources)
    pack.scale_(buffer, 2.0)
    pack.unpack_(outputs, layout, buffer)
    assert buffer.grad_fn is None
    assert all(output.grad_fn is None for output in outputs)
    assert buffer._version == versions[0] + 3
    assert [
        output._version > version for output, version in zip(outputs, versions[1:], strict=True)
    ] == [True] * 2


def test_a_source_may_be_its_own_slice() -> None:
    layout = flat_layout(3, 4)
    buffer = torch.arange(7.0)
    assert pack.pack_(buffer, layout, views(buffer, layout), 0.5) == 3.0
    assert_same_bits(buffer, torch.arange(7.0) / 2)
    assert pack.pack_add_(buffer, layout, pack.slices(buffer, layout), 1.0) == 3.0
    assert_same_bits(buffer, torch.arange(7.0))


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
        peak = pack.pack_(buffer, layout, sources, 1 / 3)
        stats = pack.scale_(buffer, 0.7)
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


# Tensors that are not what they seem


def test_zero_tensors_are_read_as_zeros() -> None:
    buffer = torch.ones(3)
    pack.pack_(buffer, flat_layout(3), [torch._efficientzerotensor(3)])
    assert_same_bits(buffer, torch.zeros(3))


def test_modes_do_not_reach_plain_tensors() -> None:
    layout = Layout((0,), ((2, 3),), ((3, 1),), 6)
    source, buffer, outer = torch.arange(6.0).view(3, 2).T, torch.empty(6), torch.ones(2)
    with FakeTensorMode():
        pack.pack_(buffer, layout, [source])
    assert_same_bits(buffer, source.reshape(-1))
    buffer.zero_()
    torch.vmap(lambda x: pack.pack_(buffer, layout, [source]) * x)(outer)
    assert_same_bits(buffer, source.reshape(-1))


def test_inference_tensors_are_packed() -> None:
    with torch.inference_mode():
        buffer = torch.empty(2)
        pack.pack_(buffer, flat_layout(2), [torch.ones(2)])
        assert pack.unpack_([torch.empty(2)], flat_layout(2), buffer).sq_norm == 2.0


def test_wrapped_tensors_are_refused() -> None:
    with FakeTensorMode():
        fake = torch.ones(2)
    with pytest.raises(TypeError, match="source 0 is a tensor subclass or belongs to a"):
        pack.pack_(torch.empty(2), flat_layout(2), [fake])
    with pytest.raises(TypeError, match="source 0 is a tensor subclass or belongs to a"):
        torch.vmap(lambda x: pack.pack_(torch.empty(2), flat_layout(2), [x]))(torch.ones(3, 2))
    with pytest.raises(TypeError, match="the buffer is a tensor subclass or belongs to"):
        pack.scale_(fake)


# Bad input

ONE, TWO = flat_layout(2), flat_layout(2, 3)
BUFFER = torch.zeros(5)
BAD_LEAVES = {
    "count": (TWO, [None], ValueError, r"got 1 {role}s for 2 leaves"),
    "shape": (
        TWO,
        [None, torch.zeros(4)],
        ValueError,
        r"{role} 1 has shape \[4\], the layout says \[3\]",
    ),
    "dims": (ONE, [torch.zeros(1, 2)], ValueError, r"{role} 0 has shape \[1, 2\], .* \[2\]"),
    "integers": (ONE, [torch.zeros(2, dtype=torch.int64)], TypeError, r"{role} 0 has dtype .*Long"),
    "complex": (
        ONE,
        [torch.zeros(2, dtype=torch.complex64)],
        TypeError,
        r"{role} 0 has dtype ComplexFloat, the buffer Float",
    ),
    "device": (ONE, [torch.zeros(2, device="meta")], ValueError, r"{role} 0 is on meta, .* on cpu"),
    "no tensor": (ONE, [1.0], TypeError, r"leaf 0 is of type float, expected a tensor or None"),
    "no sequence": (ONE, 1.0, TypeError, r"expected a sequence of tensors and None"),
    "overlap": (ONE, [BUFFER[1:3]], ValueError, r"{role} 0 overlaps the buffer"),
}
BAD_BUFFERS = {
    "short": (torch.zeros(4), ValueError, r"the buffer has 4 elements, the layout needs 5"),
    "strided": (
        torch.zeros(10)[::2],
        ValueError,
        r"one-dimensional and contiguous, got shape \[5\]",
    ),
    "shaped": (
        torch.zeros(1, 5),
        ValueError,
        r"one-dimensional and contiguous, got shape \[1, 5\]",
    ),
    "integers": (torch.zeros(5, dtype=torch.int32), TypeError, r"the buffer has dtype Int"),
    "conjugate": (
        torch.zeros(5, dtype=torch.complex64).conj(),
        TypeError,
        r"without conjugate or negative bit",
    ),
    "sparse": (torch.zeros(5).to_sparse(), TypeError, r"must be a strided tensor"),
}


@pytest.mark.parametrize("bad", BAD_LEAVES)
def test_bad_leaves(bad: str) -> None:
    layout, leaves, kind, message = BAD_LEAVES[bad]
    before = BUFFER.clone()
    for write in (pack.pack_, pack.pack_add_):
        with pytest.raises(kind, match=message.format(role="source")):
            write(BUFFER, layout, leaves)
    with pytest.raises(kind, match=message.format(role="output")):
        pack.unpack_(leaves, layout, BUFFER)
    assert_same_bits(BUFFER, before)


@pytest.mark.parametrize("bad", ["count", "shape", "dims", "integers", "complex"])
def test_bad_leaves_of_multi_tensor_operations(bad: str) -> None:
    layout, leaves, kind, message = BAD_LEAVES[bad]
    message = message.split(" has dtype")[0].split(r" \[1, 2\]")[0]
    for write in (pack_foreach.pack_, pack_foreach.pack_add_):
        with pytest.raises(kind, match=message.format(role="source")):
            write(BUFFER, layout, leaves)
    with pytest.raises(kind, match=message.format(role="output")):
        pack_foreach.unpack_(leaves, layout, BUFFER)


@pytest.mark.parametrize("bad", BAD_BUFFERS)
def test_bad_buffers(bad: str) -> None:
    buffer, kind, message = BAD_BUFFERS[bad]
    calls: list[Callable[[], object]] = [
        lambda: pack.pack_(buffer, TWO, [None, None]),
        lambda: pack.pack_add_(buffer, TWO, [None, None]),
        lambda: pack.unpack_([None, None], TWO, buffer),
        lambda: pack.slices(buffer, TWO),
    ]
    if bad != "short":
        calls.append(lambda: pack.scale_(buffer, 2.0))
    for call in calls:
        with pytest.raises(kind, match=message):
            call()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (torch.zeros(1).expand(2), r"output 0 of shape \[2\] and strides \[0\] has elements that"),
        (torch.zeros(5).as_strided((2,), (0,)), r"share memory"),
        (BUFFER[:2], r"output 0 overlaps the buffer"),
    ],
)
def test_outputs_must_not_overlap(output: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack.unpack_([output], ONE, BUFFER)


def test_sparse_outputs_are_refused() -> None:
    with pytest.raises(TypeError, match="output 0 has layout Sparse, expected a dense tensor"):
        pack.unpack_([torch.zeros(2).to_sparse()], ONE, BUFFER)


def test_nothing_is_written_when_a_later_leaf_is_bad() -> None:
    buffer, first = torch.full((5,), 7.0), torch.full((2,), 7.0)
    with pytest.raises(ValueError, match="source 1"):
        pack.pack_(buffer, TWO, [torch.ones(2), torch.ones(4)])
    with pytest.raises(ValueError, match="output 1"):
        pack.unpack_([first, torch.ones(4)], TWO, BUFFER)
    assert_same_bits(buffer, torch.full((5,), 7.0))
    assert_same_bits(first, torch.full((2,), 7.0))


# Layouts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((0,), ((2,),), (), 2), r"an offset, a shape and strides for each leaf, got 1, 1 and 0"),
        (((0,), ((2,),), ((1, 1),), 2), r"leaf 0 has shape \[2\] but strides \[1, 1\]"),
        (((0,), ((-2,),), ((1,),), 2), r"leaf 0 has a negative size in shape \[-2\]"),
        (((0,), ((2, 2),), ((3, 1),), 6), r"leaf 0 of shape \[2, 2\] is not dense .* \[3, 1\]"),
        (((0,), ((2,),), ((0,),), 2), r"leaf 0 of shape \[2\] is not dense with strides \[0\]"),
        (((-1,), ((2,),), ((1,),), 2), r"leaf 0 starts at element -1, but .* ends at 0"),
        (((0, 1), ((2,), (1,)), ((1,), (1,)), 3), r"leaf 1 starts at element 1, but .* ends at 2"),
        (((1,), ((2,),), ((1,),), 2), r"leaf 0 ends at element 1 \+ 2, past the layout's 2"),
        (((2**62,), ((2,),), ((1,),), 2), r"past the layout's 2"),
        (((0,), ((2**32, 2**32),), ((2**32, 1),), 2), r"has too many elements"),
    ],
)
def test_bad_layouts(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(*arguments)


def test_layout_of_a_plan_keeps_channels_last() -> None:
    leaves = (
        LeafSpec("conv", (2, 3, 4, 5), "float32", strides=(60, 1, 15, 3)),
        LeafSpec("scalar", (), "float32"),
        LeafSpec("empty", (0, 3), "float32"),
    )
    layout = Layout.of(plan_leaves(leaves, order=(2, 1, 0), caps_bytes=(2**20,)), 0)
    assert layout.strides == ((3, 1), (), (60, 1, 15, 3))
    conv = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    buffer = torch.empty(layout.numel)
    pack.pack_(buffer, layout, [None, torch.ones(()), conv])
    assert_same_bits(buffer[1:], conv.permute(0, 2, 3, 1).reshape(-1))
