"""The operators that graphs are made of: schemas, shapes, derivatives, and what they compute."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

import fddp
from fddp.collectives import torch_library
from fddp.collectives.call_cache import CallSpec, program_of
from fddp.collectives.calls import Call, CallRecord
from fddp.collectives.operator_program import Operator
from fddp.native import torch_ops
from fddp.native.layout import Layout
from tests.reference.pack import pack_ as reference_pack_
from tests.support.ranks import RankPool

OPS = torch.ops.fddp
OFFSETS, NDIMS, SIZES = [0, 6, 8], [2, 0, 2], [3, 2, 3, 4]  # two gaps


def leaves_of(dtype: torch.dtype, requires_grad: bool = False) -> list[Tensor]:
    """Of the shapes above; one is transposed."""
    leaves = [torch.randn(3, 2), torch.randn(()), torch.randn(4, 3).t()]
    return [leaf.to(dtype).requires_grad_(requires_grad) for leaf in leaves]


# opcheck of torch 2.15 reads the gradients of its own copies.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_operators_of_the_extension_keep_torchs_rules(dtype: torch.dtype) -> None:
    to = torch.float32 if dtype is torch.bfloat16 else dtype
    buffer = torch.randn(20).to(dtype).requires_grad_()
    opcheck(OPS.pack.default, (leaves_of(dtype, True), OFFSETS, 20, to, 0.5))
    opcheck(OPS.unpack.default, (buffer, OFFSETS, NDIMS, SIZES, 0.5))
    opcheck(OPS.scale.default, (buffer, 0.5))


def test_operators_of_the_extension_match_the_reference() -> None:
    leaves = leaves_of(torch.bfloat16)
    shapes = torch_ops.shapes_of(NDIMS, SIZES)
    layout = Layout(tuple(OFFSETS), shapes, ((2, 1), (), (4, 1)), 20)
    wanted = torch.zeros(20)
    reference_pack_(wanted, layout, leaves, 0.3)
    packed = OPS.pack(leaves, OFFSETS, 20, torch.float32, 0.3)
    assert torch.equal(packed, wanted)
    for leaf, slot in zip(OPS.unpack(packed, OFFSETS, NDIMS, SIZES), leaves, strict=True):
        torch.testing.assert_close(leaf, slot.float() * 0.3)
    assert torch.equal(OPS.scale(packed, 2.0), packed * 2.0)


def test_operators_of_the_extension_have_derivatives() -> None:
    leaves = leaves_of(torch.float64, True)
    buffer = torch.randn(20, dtype=torch.float64, requires_grad=True)

    def pack(*leaves: Tensor) -> Tensor:
        packed: Tensor = OPS.pack(list(leaves), OFFSETS, 20, torch.float64, 0.5)
        return packed

    def unpack(buffer: Tensor) -> tuple[Tensor, ...]:
        return tuple(OPS.unpack(buffer, OFFSETS, NDIMS, SIZES, 0.5))

    for fn, inputs in ((pack, leaves), (unpack, [buffer]), (lambda b: OPS.scale(b, 2.0), [buffer])):
        assert torch.autograd.gradcheck(fn, inputs)
        assert torch.autograd.gradgradcheck(fn, inputs)


def test_pack_needs_a_leaf() -> None:
    with pytest.raises(ValueError, match=r"fddp::pack needs at least one leaf"):
        OPS.pack([], [], 0, torch.float32)


# Collectives


def make_call(communicator: fddp.Communicator, operator: Operator, leaves: list[Tensor]) -> Call:
    """A call of leaves "0", "1" and so on."""
    root = 1 if operator == "broadcast_from" else -1
    asked = CallSpec(operator, communicator.place(()), root)
    paths = [str(k) for k in range(len(leaves))]
    program = program_of(communicator, asked, paths, range(len(leaves)), leaves)
    return Call(communicator, program, CallRecord(None), ("backward",))


def check_collectives(rank: int, world_size: int) -> int:
    checked = 0
    with fddp.Communicator() as ranks:
        for operator in get_args(Operator):
            leaves = [torch.randn(2, 3) + rank, torch.randn(2, 1, dtype=torch.float64)]
            text = torch_library.call_to_json(make_call(ranks, operator, leaves))
            op = getattr(OPS, operator).default
            opcheck(op, (leaves, None, ranks.number, text))
            opcheck(op, ([None, leaves[1]], torch.empty(0), ranks.number, text))
            checked += 1
    return checked


def test_collectives_keep_torchs_rules(ranks: RankPool) -> None:
    assert ranks.run(2, check_collectives) == [7, 7]


@given(
    st.sampled_from(get_args(Operator)),
    st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=4),
    st.sampled_from([(), ("backward",), ("jvp", "backward")]),
)
def test_a_call_is_its_text(operator: Any, shapes: list[list[int]], roles: tuple[str, ...]) -> None:
    def there_and_back(group: Any) -> None:
        with fddp.Communicator(group) as ranks:
            leading = [1] if operator == "reduce_scatter" else []
            leaves = [torch.zeros([*leading, *shape]) for shape in shapes]
            call = make_call(ranks, operator, leaves)
            call = Call(ranks, call.program, CallRecord("train.py:3"), roles)  # type: ignore[arg-type]
            text = torch_library.call_to_json(call)
            again = torch_library.call_of(operator, ranks, text)
            assert again.program.details == call.program.details
            assert (again.roles, again.text) == (call.roles, call.text)
            assert torch_library.call_to_json(again) == text

    fddp.loopback(1, there_and_back)
