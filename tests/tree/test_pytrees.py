"""Trees: canonical order, paths, containers, tree_map, descriptions of arrays."""

from __future__ import annotations

import dataclasses
import pickle
from collections import OrderedDict, defaultdict, deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fddp.core.plan.leaf import LeafSpec, dense_strides
from fddp.errors import TreeMismatchError
from fddp.tree.describe import leaf_specs
from fddp.tree.pytree import (
    check_paths,
    flatten,
    insertion_order,
    map_leaves,
    tree_map,
)
from tests.support.random_trees import Point, trees
from tests.support.unsupported_tensors import WRAPPERS


class Node:
    """A container registered with optree."""

    def __init__(self, weight: Any, bias: Any) -> None:
        self.weight = weight
        self.bias = bias


@pytest.fixture
def node() -> Any:
    optree.register_pytree_node(
        Node,
        lambda node: ((node.weight, node.bias), None, ("weight", "bias")),
        lambda _, children: Node(*children),
        namespace=optree.registry.__GLOBAL_NAMESPACE,
    )
    yield Node
    optree.unregister_pytree_node(Node, namespace=optree.registry.__GLOBAL_NAMESPACE)


def refilled(tree: Any) -> Any:
    """The same tree, its dicts filled in the reverse order."""
    if isinstance(tree, dict):
        return type(tree)((key, refilled(value)) for key, value in reversed(tree.items()))
    if isinstance(tree, Point):
        return Point(*(refilled(value) for value in tree))
    if isinstance(tree, (list, tuple, deque)):
        return type(tree)(refilled(value) for value in tree)
    return tree


@given(trees)
def test_order_does_not_depend_on_how_dicts_were_filled(tree: Any) -> None:
    leaves, treedef = flatten(tree)
    other_leaves, other_treedef = flatten(refilled(tree))
    assert leaves == other_leaves
    assert treedef.paths == other_treedef.paths
    assert len(set(treedef.paths)) == len(leaves)


@given(trees)
def test_unflatten_gives_the_same_containers_back(tree: Any) -> None:
    leaves, treedef = flatten(tree)
    again = treedef.unflatten(leaves)
    assert repr(again) == repr(tree)  # dicts keep the order in which they were filled
    assert flatten(again)[1] == treedef
    copy = pickle.loads(pickle.dumps(treedef))
    assert copy == treedef
    assert copy.paths == treedef.paths


@given(trees)
def test_registration_order_is_that_of_the_containers(tree: Any) -> None:
    def as_filled(node: Any) -> list[Any]:
        if isinstance(node, dict):
            return [leaf for value in node.values() for leaf in as_filled(value)]
        if isinstance(node, (list, tuple, deque)):
            return [leaf for value in node for leaf in as_filled(value)]
        return [node]

    leaves, treedef = flatten(tree)
    assert [leaves[leaf] for leaf in insertion_order(tree, treedef)] == as_filled(tree)


def test_canonical_order_is_by_entry() -> None:
    tree = OrderedDict({"b": 0, 10: 1, "B": 2, 2: 3, (1, 2): 4, "a": OrderedDict(z=5, y=6)})
    leaves, treedef = flatten(tree)
    assert treedef.paths == ("2", "10", "B", "a.y", "a.z", "b", "(1, 2)")
    assert leaves == [3, 1, 2, 6, 5, 0, 4]


def test_a_flat_dict_has_the_paths_of_a_nested_one() -> None:
    nested = {"layers": [{"weight": 1, "bias": 2}, {"weight": 3, "bias": 4}]}
    flat = {"layers.1.weight": 3, "layers.0.weight": 1, "layers.1.bias": 4, "layers.0.bias": 2}
    assert flatten(nested)[1].paths == flatten(flat)[1].paths
    assert flatten(nested)[0] == flatten(flat)[0]


def test_clashing_paths_are_distinguished() -> None:
    paths = flatten({"a.b": 1, "a": {"b": 2}, "c": 3})[1].paths
    assert paths == ("['a']['b']", "['a.b']", "c")
    assert flatten({1: 0, "1": 0})[1].paths == ("[1]", "['1']")
    tree = {"a.b": 1, "a": {"b": 2}, "['a.b']": 3}
    assert flatten(tree)[1].paths == ("""["['a.b']"]""", "['a']['b']", "['a.b']")


class Alike:
    """A key that differs from others of its text."""

    def __repr__(self) -> str:
        return "Alike()"


def test_keys_without_a_text_of_their_own() -> None:
    with pytest.raises(TypeError, match="the tree has the key <object object at 0x"):
        flatten({object(): 1})
    with pytest.raises(ValueError, match=r"2 leaves have the path '\[Alike\(\)\]'; rename keys"):
        flatten({Alike(): 1, Alike(): 2})


def test_every_kind_of_container(node: Any) -> None:
    counts: defaultdict[str, Any] = defaultdict(int, {"q": 8, "p": 9})
    tree = {
        "dict": {"b": 0, "a": 1},
        "ordered": OrderedDict(b=2, a=3),
        "list": [4],
        "tuple": (5,),
        "point": Point(6, 7),
        "default": counts,
        "deque": deque([10], maxlen=3),
        "node": node(11, None),
        "empty": {},
    }
    leaves, treedef = flatten(tree)
    by_path = dict(zip(treedef.paths, leaves, strict=True))
    assert by_path == {
        "dict.b": 0,
        "dict.a": 1,
        "ordered.b": 2,
        "ordered.a": 3,
        "list.0": 4,
        "tuple.0": 5,
        "point.y": 6,
        "point.x": 7,
        "default.q": 8,
        "default.p": 9,
        "deque.0": 10,
        "node.weight": 11,
        "node.bias": None,
    }
    again = treedef.unflatten(leaves)
    assert again.pop("node").weight == 11
    del tree["node"]
    assert again == tree
    assert {name: type(value) for name, value in again.items()} == {
        name: type(value) for name, value in tree.items()
    }
    assert again["deque"].maxlen == 3
    assert again["default"].default_factory is int


def test_optree_dataclasses_are_trees() -> None:
    @optree.dataclasses.dataclass(namespace=optree.registry.__GLOBAL_NAMESPACE)
    class Layer:
        weight: Any
        bias: Any
        name: str = optree.dataclasses.field(default="linear", pytree_node=False)

    try:
        leaves, treedef = flatten({"layer": Layer(1, 2)})
        assert treedef.paths == ("layer.bias", "layer.weight")
        assert leaves == [2, 1]
        assert treedef.unflatten([20, 10])["layer"] == Layer(10, 20)
    finally:
        optree.unregister_pytree_node(Layer, namespace=optree.registry.__GLOBAL_NAMESPACE)


def test_leaves_and_trees_without_containers() -> None:
    assert flatten(3)[1].paths == ("",)
    assert flatten(None)[0] == [None]
    assert flatten([])[1].paths == ()
    assert flatten(3)[1].unflatten([4]) == 4
    for leaves in ([1], [1, 2, 3]):
        with pytest.raises(ValueError, match=f"got {len(leaves)} leaves for a tree of 2"):
            flatten(OrderedDict(b=1, a=2))[1].unflatten(leaves)


def test_equality_of_treedefs() -> None:
    first, refilled_one = flatten({"b": 1, "a": 2})[1], flatten({"a": 2, "b": 1})[1]
    assert first == refilled_one
    assert hash(first) == hash(refilled_one)
    assert first != flatten(OrderedDict(b=1, a=2))[1]
    assert list(first.unflatten([2, 1])) == ["b", "a"]
    assert list(refilled_one.unflatten([2, 1])) == ["a", "b"]


def test_tree_map_matches_by_path() -> None:
    params = {"b": 1, "a": [2, 3]}
    grads = OrderedDict(a=[20, None], b=10)
    assert tree_map(lambda p, g: p + g, params, grads) == {"b": 11, "a": [22, 3]}
    assert tree_map(lambda p: p + 1, [1, None]) == [2, None]
    assert tree_map(
        lambda p, g, h: (p, g, h), {"a": None, "b": 1}, {"a": 5, "b": 6}, {"b": 7, "a": 8}
    ) == {
        "a": None,
        "b": (1, 6, 7),
    }
    layers = {"layers": list(range(12))}
    flat = {f"layers.{index}": 10 * index for index in range(12)}
    assert tree_map(lambda p, g: p + g, layers, flat) == {"layers": [11 * i for i in range(12)]}


def test_map_leaves_takes_any_keys() -> None:
    key = object()
    assert map_leaves(lambda leaf: leaf + 1, {key: [1, None], 2: (3,)}) == {key: [2, None], 2: (4,)}


def test_mismatched_trees() -> None:
    treedef = flatten({"a": 1, "b": 2, "c": 3})[1]
    with pytest.raises(TreeMismatchError) as caught:
        tree_map(lambda p, g: p, {"a": 1, "b": 2, "c": 3}, {"a": 1, "d": 2})
    assert str(caught.value) == (
        "tree 2 of tree_map does not have the expected leaves: it has 2, expected 3; "
        "missing: 'b', 'c'; unexpected: 'd'. Both trees must have the same paths, "
        "with None at a leaf that has no value"
    )
    check_paths(treedef, ("a", "b", "c"), "gradients")
    many = tuple(f"p{index}" for index in range(7))
    with pytest.raises(TreeMismatchError, match="'p0', 'p1', 'p2', 'p3', 'p4' and 2 more"):
        check_paths(treedef, many, "gradients")
    layers = {"layers": list(range(11))}
    flat = flatten({f"layers.{index}": index for index in range(11)})[1]
    with pytest.raises(TreeMismatchError, match=r"'layers.10' comes where 'layers.2' is expected"):
        check_paths(flat, flatten(layers)[1].paths, "gradients")


@given(st.permutations(range(4)), st.lists(st.integers(1, 4), min_size=4, max_size=4))
def test_dense_strides_are_those_of_torch(order: list[int], shape: list[int]) -> None:
    tensor = torch.empty([shape[dim] for dim in order]).permute(
        [order.index(dim) for dim in range(4)]
    )
    strides = dense_strides(tuple(tensor.shape), tensor.stride())
    if tensor.is_contiguous():
        assert strides is None
    else:
        assert strides is not None
        laid_out = torch.empty_strided(tensor.shape, strides)
        wide = [dim for dim in range(4) if tensor.shape[dim] > 1]
        assert [laid_out.stride(dim) for dim in wide] == [tensor.stride(dim) for dim in wide]
        assert dense_strides(tuple(tensor.shape), strides) == strides


def leaf_spec(path: str, leaf: Any, *, sparse: bool = False) -> LeafSpec:
    (spec,) = leaf_specs([path], [leaf], [path] if sparse else [])
    return spec


def test_tensors_of_transforms_are_described_as_they_appear() -> None:
    specs: list[LeafSpec] = []

    def record(x: torch.Tensor) -> torch.Tensor:
        specs.append(leaf_spec("x", x))
        return x.sum()

    torch.func.vmap(record)(torch.ones(2, 3))
    torch.func.grad(record)(torch.ones(2, 3))
    assert [spec.shape for spec in specs] == [(3,), (2, 3)]
    with FakeTensorMode():
        assert leaf_spec("x", torch.ones(2, 3)).shape == (2, 3)


def test_strides_are_recorded_where_a_bucket_can_keep_them() -> None:
    image = torch.zeros(2, 3, 4, 5)
    assert leaf_spec("w", image).strides is None
    channels_last = image.contiguous(memory_format=torch.channels_last)
    assert leaf_spec("w", channels_last).strides == channels_last.stride()
    one = torch.zeros(1, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert leaf_spec("w", one).strides == one.stride()
    assert leaf_spec("w", image[..., 1]).strides is None
    assert leaf_spec("w", torch.zeros(3, 1).expand(3, 4)).strides is None
    assert leaf_spec("w", torch.zeros(0, 3).t()).strides is None


@pytest.mark.parametrize(
    ("array", "shape", "dtype", "device"),
    [
        (torch.zeros(2, dtype=torch.bfloat16), (2,), "bfloat16", "cpu"),
        (torch.zeros((), device="meta"), (), "float32", "meta"),
        (torch.zeros(2, 3, dtype=torch.complex64).conj(), (2, 3), "complex64", "cpu"),
        (np.zeros((2, 3)), (2, 3), "float64", "cpu"),
        (np.asfortranarray(np.zeros((2, 3), np.int8)), (2, 3), "int8", "cpu"),
        (np.float32(3), (), "float32", "cpu"),
        (jnp.zeros((2, 3), jnp.bfloat16), (2, 3), "bfloat16", "cpu"),
        (jax.ShapeDtypeStruct((4,), jnp.float16), (4,), "float16", "meta"),
        (None, (), "none", "none"),
    ],
)
def test_arrays_of_any_library(array: Any, shape: tuple[int, ...], dtype: str, device: str) -> None:
    assert leaf_spec("x", array) == ("x", shape, dtype, None, device, False)


def test_tracers_have_specs() -> None:
    specs = []
    jax.eval_shape(lambda x: specs.append(leaf_spec("x", x)), jnp.zeros(3))
    assert specs == [("x", (3,), "float32", None, "meta", False)]


def test_sparse_leaves() -> None:
    assert leaf_spec("e", torch.zeros(3), sparse=True).sparse
    assert leaf_spec("e", torch.eye(3).to_sparse()).sparse
    with pytest.warns(UserWarning, match="Sparse CSR tensor support"):
        compressed = torch.eye(3).to_sparse_csr()
    with pytest.raises(TypeError, match=r"leaf 'e' has the layout torch\.sparse_csr"):
        leaf_spec("e", compressed)


@pytest.mark.parametrize("leaf", ["text", np.float32, object()])
def test_leaves_that_are_no_arrays(leaf: object) -> None:
    with pytest.raises(TypeError, match=r"leaf 'x.y' is a .* which has no shape and dtype"):
        leaf_spec("x.y", leaf)


@dataclasses.dataclass
class OnDevice:
    """The attributes of a torch tensor that are read."""

    device: torch.device
    shape: tuple[int, ...] = (2,)
    dtype: torch.dtype = torch.float32
    layout: torch.layout = torch.strided

    def is_contiguous(self) -> bool:
        return True


def test_devices_are_numbered_as_they_come_up() -> None:
    def devices(*names: str) -> list[str]:
        leaves = [OnDevice(torch.device(name)) for name in names]
        return [spec.device for spec in leaf_specs([*"abcdef"][: len(leaves)], leaves)]

    assert devices("cuda:3", "cpu", "cuda:3") == ["cuda", "cpu", "cuda"]
    assert devices("cuda:3", "cpu", "cuda:1", "cuda:3") == ["cuda#0", "cpu", "cuda#1", "cuda#0"]
    assert devices("cuda:0", "meta", "cuda:1") == ["cuda#0", "meta", "cuda#1"]


class Batch:
    """A container like a TensorDict: with a shape and methods of tensors, and no layout."""

    shape, dtype = torch.Size([2]), None

    def is_contiguous(self) -> bool:
        return True


def test_containers_that_resemble_arrays() -> None:
    with pytest.raises(TypeError, match=r"leaf 'x' is a .*Batch, which is no array; leaves are"):
        leaf_spec("x", Batch())


def test_leaves_without_a_shape_of_their_own() -> None:
    nested = WRAPPERS["nested tensor"]()
    with pytest.raises(TypeError, match=r"leaf 'x' is a nested tensor, which has no shape; pass"):
        leaf_spec("x", nested)
