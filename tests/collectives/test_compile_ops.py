"""The operators that graphs are made of: what they compute, shapes and derivatives."""

from __future__ import annotations

from typing import Any, get_args

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import fddp
from fddp.collectives import torch_library
from fddp.collectives.call_cache import CallSpec, program_of
from fddp.collectives.calls import Call
from fddp.collectives.operator_program import TAKES_ROWS, Operator
from tests.support.on_ranks import on_processes, on_threads

OPS = torch.ops.fddp


def make_call(communicator: fddp.Communicator, operator: Operator, leaves: list[Tensor]) -> Call:
    """A call of leaves "0", "1" and so on."""
    root = 1 if operator == "broadcast_from" else -1
    asked = CallSpec(operator, communicator.place(()), root)
    paths = [str(k) for k in range(len(leaves))]
    program = program_of(communicator.cap_bytes, asked, paths, range(len(leaves)), leaves)
    return Call(communicator, program, None, ("backward",))


@on_processes(2)
def test_collectives_keep_torchs_rules(rank: int, world_size: int) -> None:
    assert len(get_args(Operator)) == 8
    with fddp.Communicator() as ranks:
        for operator in get_args(Operator):
            leaves = [torch.randn(2, 3) + rank, torch.randn(2, 1, dtype=torch.float64)]
            text = torch_library.call_to_json(make_call(ranks, operator, leaves))
            op = getattr(OPS, operator).default
            opcheck(op, (leaves, None, ranks.number, text))
            opcheck(op, ([None, leaves[1]], torch.empty(0), ranks.number, text))


@given(
    st.sampled_from(get_args(Operator)),
    st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=4),
    st.sampled_from([(), ("backward",), ("jvp", "backward")]),
)
def test_a_call_is_its_text(operator: Any, shapes: list[list[int]], roles: tuple[str, ...]) -> None:
    def there_and_back(group: Any) -> None:
        with fddp.Communicator(group) as ranks:
            leading = [1] if operator in TAKES_ROWS else []
            leaves = [torch.zeros([*leading, *shape]) for shape in shapes]
            call = make_call(ranks, operator, leaves)
            call = Call(ranks, call.program, "train.py:3", roles)  # type: ignore[arg-type]
            text = torch_library.call_to_json(call)
            again = torch_library.call_of(operator, ranks, text)
            assert again.program.details == call.program.details
            assert (again.roles, again.text) == (call.roles, call.text)
            assert torch_library.call_to_json(again) == text

    fddp.loopback(1, there_and_back)


@on_threads(1)
def test_operators_at_one_place_of_a_program(group: Any) -> None:
    """Their calls differ in the operator alone."""
    with fddp.Communicator(group) as ranks:
        calls = [make_call(ranks, operator, [torch.ones(2)]) for operator in ("psum", "pmean")]
        first, second = map(torch_library.call_to_json, calls)
        assert first == second
        rebuilt = [torch_library.call_of(operator, ranks, first) for operator in ("psum", "pmean")]
        assert [call.program.operator for call in rebuilt] == ["psum", "pmean"]


@on_threads(1)
def test_a_call_in_a_graph_depends_on_the_one_before(group: Any) -> None:
    """So that two that are alike are neither merged nor reordered, whatever the compiler."""
    with fddp.Communicator(group) as ranks:
        graph = make_fx(lambda x: [fddp.psum(x, ranks), fddp.psum(x, ranks)])(torch.ones(2)).graph
    first, second = (node for node in graph.nodes if node.target is OPS.psum.default)
    assert first.args[1] is None
    assert second.args[1].args == (first, 1)  # its last result
