"""Unusual tensors, bad arguments and layouts of pack and unpack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fddp.core.plan.plan import LeafSpec, plan_leaves
from fddp.native import pack
from fddp.native.layout import Layout
from tests.support.pack_cases import assert_same_bits, flat_layout, pack_foreach

# Unusual tensors


def test_zero_tensors_are_read_as_zeros(ops: Any) -> None:
    buffer = torch.ones(3)
    ops.pack_(buffer, flat_layout(3), [torch._efficientzerotensor(3)])
    assert_same_bits(buffer, torch.zeros(3))


def test_outputs_may_conjugate_and_negate(ops: Any) -> None:
    buffer = torch.tensor([1.0 + 2.0j, 3.0 - 4.0j])
    memory = torch.zeros(2, dtype=torch.complex64)
    ops.unpack_([memory.conj()], flat_layout(2), buffer)
    assert torch.equal(memory.conj(), buffer)
    memory = torch.zeros(2, dtype=torch.complex64)
    ops.unpack_([memory.conj().imag], flat_layout(2), torch.tensor([1.0, 3.0]))
    assert torch.equal(memory.imag, torch.tensor([-1.0, -3.0]))


def test_sparse_sources_need_no_factor(ops: Any) -> None:
    buffer, source = torch.ones(3), torch.tensor([0.0, 2.0, 0.0])
    ops.pack_(buffer, flat_layout(3), [source.to_sparse()])
    assert_same_bits(buffer, source)


def test_modes_do_not_reach_plain_tensors(ops: Any) -> None:
    layout = Layout((0,), ((2, 3),), ((3, 1),), 6)
    source, buffer, outer = torch.arange(6.0).view(3, 2).T, torch.empty(6), torch.ones(2)
    packed, output = source.reshape(-1) * 0.5, torch.empty(2, 3)
    with FakeTensorMode():
        ops.pack_(buffer, layout, [source], 0.5)
    assert_same_bits(buffer, packed)
    with FakeTensorMode():
        ops.pack_add_(buffer, layout, [source], 0.5)
    assert_same_bits(buffer, packed * 2)
    with FakeTensorMode():
        ops.unpack_([output], layout, buffer, 0.5, stats=False)
    assert_same_bits(output, packed.view(2, 3))
    buffer.zero_()
    torch.vmap(lambda x: ops.pack_(buffer, layout, [source], 0.5) * x)(outer)
    assert_same_bits(buffer, packed)


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
    check_refused(pack, layout, leaves, kind, message)
    assert_same_bits(BUFFER, before)
    if bad in ("count", "shape", "dims", "integers", "complex"):
        short = message.split(" has dtype")[0].split(r" \[1, 2\]")[0]
        check_refused(pack_foreach, layout, leaves, kind, short)


def check_refused(ops: Any, layout: Layout, leaves: Any, kind: Any, message: str) -> None:
    for write in (ops.pack_, ops.pack_add_):
        with pytest.raises(kind, match=message.format(role="source")):
            write(BUFFER, layout, leaves)
    with pytest.raises(kind, match=message.format(role="output")):
        ops.unpack_(leaves, layout, BUFFER)


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
