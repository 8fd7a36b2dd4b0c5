"""Every tensor in an output is found, whatever the output is, and nothing else happens to it."""

from __future__ import annotations

import functools
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree

from fddp.ddp.outputs import find_tensors
from tests.support.ranks import RankPool


class Pair(NamedTuple):
    first: Any
    second: Any


Untyped = namedtuple("Untyped", ["only"])


@dataclass
class Data:
    value: Any
    note: str = ""


@dataclass(frozen=True, slots=True)
class Slotted:
    value: Any


class Base:
    __slots__ = ("__hidden", "never_set")

    def __init__(self, value: Any) -> None:
        self.__hidden = value


class Derived(Base):
    """Has slots, one of them private, and a `__dict__`."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.own = None


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


class Output(OrderedDict[str, Any]):
    """A dict that hides what it holds from all but attribute access, as models' outputs do."""

    def values(self) -> Any:
        return ()

    def __iter__(self) -> Iterator[str]:
        return iter(())


class TorchNode(Plain):
    pass


class OptreeNode(Plain):
    pass


_pytree.register_pytree_node(
    TorchNode, lambda node: ([node.value], None), lambda children, _: TorchNode(*children)
)
optree.register_pytree_node(
    OptreeNode,
    lambda node: ((node.value,), None),
    lambda _, children: OptreeNode(*children),
    namespace="test_ddp_outputs",
)

WRAPPERS: dict[str, Any] = {
    "list": lambda x: [x],
    "tuple": lambda x: (x,),
    "set": lambda x: {x} if isinstance(x, Tensor) else [x],
    "frozenset": lambda x: frozenset([x]) if isinstance(x, Tensor) else [x],
    "deque": lambda x: deque([x]),
    "dict": lambda x: {"key": x},
    "OrderedDict": lambda x: OrderedDict(key=x),
    "UserDict": lambda x: UserDict(key=x),
    "mappingproxy": lambda x: MappingProxyType({"key": x}),
    "a dict that hides": lambda x: Output(key=x),
    "NamedTuple": lambda x: Pair(None, x),
    "namedtuple": Untyped,
    "dataclass": Data,
    "slotted dataclass": Slotted,
    "slots": Derived,
    "plain object": Plain,
    "namespace": lambda x: SimpleNamespace(value=x),
    "torch's pytree": TorchNode,
    "optree's": OptreeNode,
    "partial": lambda x: functools.partial(print, x),
}


@given(st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=5))
def test_a_tensor_is_found_in_any_nesting(kinds: list[str]) -> None:
    tensor = torch.zeros(1)
    output: Any = tensor
    for kind in kinds:
        output = WRAPPERS[kind](output)
    (found,) = find_tensors(output)
    assert found is tensor


def test_order_and_sharing() -> None:
    x, y, z = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    found = find_tensors({"a": [x, (y,)], "b": Data(x), "c": z, "d": y})
    assert [id(tensor) for tensor in found] == [id(x), id(y), id(z)]


def test_cycles_end() -> None:
    x = torch.zeros(1)
    ring: list[Any] = [x]
    ring.append(ring)
    parent, child = Plain(ring), Plain(None)
    parent.child, child.parent = child, parent  # type: ignore[attr-defined]
    assert find_tensors(parent) == [x]


@pytest.mark.slow
def test_depth_has_no_limit() -> None:
    x = torch.zeros(1)
    output: Any = x
    for _ in range(100_000):
        output = [output]
    assert find_tensors(output) == [x]


class Secretive:
    """Fails when it is asked for anything."""

    @property
    def value(self) -> Tensor:
        raise AssertionError("a property was read")

    def __len__(self) -> int:
        raise AssertionError("len was called")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    def __hash__(self) -> int:
        raise AssertionError("hashed")

    def __iter__(self) -> Iterator[Tensor]:
        raise AssertionError("iterated")


def generator() -> Iterator[Tensor]:
    yield torch.zeros(1)
    raise AssertionError("used up")


def test_output_code_is_not_run() -> None:
    numbers = generator()
    assert find_tensors([Secretive(), numbers]) == []
    assert isinstance(next(numbers), Tensor)


@pytest.mark.parametrize("opaque", [nn.Linear(1, 1), Plain, torch, find_tensors, "text", 1, None])
def test_modules_classes_and_functions_are_not_entered(opaque: object) -> None:
    assert find_tensors([opaque, Data(opaque)]) == []


def test_tensors_are_not_entered() -> None:
    x, inner = torch.zeros(1), torch.ones(1)
    x.attached = inner  # type: ignore[attr-defined]
    assert find_tensors(x) == [x]
    parameter = nn.Parameter(torch.zeros(1))
    assert find_tensors([parameter])[0] is parameter


def test_remote_references(ranks: RankPool) -> None:
    ranks.run(1, judge_remote)


def judge_remote(rank: int, world_size: int) -> None:
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method="tcp://127.0.0.1:0")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        x = torch.zeros(1)
        assert find_tensors([rpc.RRef({"value": x})])[0] is x
    finally:
        rpc.shutdown()
