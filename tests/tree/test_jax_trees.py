"""Containers that JAX knows, as trees: modules of Equinox and Flax, and users' own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optree
import pytest
from flax import nnx
from flax.core import FrozenDict
from hypothesis import given
from hypothesis import strategies as st

import fddp
from fddp.tree.pytree import flatten, insertion_order, tree_map
from tests.support.programs import run_python
from tests.support.ranks import RankPool


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    """A node with names for its children."""

    weight: Any
    bias: Any


@jax.tree_util.register_pytree_node_class
class Pair:
    """A node without names for its children, and something that is no child."""

    def __init__(self, first: Any, second: Any, note: str = "") -> None:
        self.parts, self.note = (first, second), note

    def tree_flatten(self) -> tuple[tuple[Any, Any], str]:
        return self.parts, self.note

    @classmethod
    def tree_unflatten(cls, note: str, parts: tuple[Any, Any]) -> Pair:
        return cls(*parts, note)


class Net(eqx.Module):
    linear: eqx.nn.Linear
    name: str = eqx.field(static=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


def net(seed: int = 0) -> Net:
    return Net(eqx.nn.Linear(3, 2, key=jax.random.key(seed)), "net")


TREES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "Equinox": (net(), ("linear.bias", "linear.weight")),
    "FrozenDict": (
        FrozenDict({"b": {"x": jnp.ones(1)}, "a": FrozenDict({"y": None, "x": jnp.ones(2)})}),
        ("a.x", "a.y", "b.x"),
    ),
    "linen": (
        nn.Dense(2).init(jax.random.key(0), jnp.ones((1, 3))),
        ("params.bias", "params.kernel"),
    ),
    "nnx": (
        nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param),
        ("bias.value", "kernel.value"),
    ),
    "dataclass": ([Layer(jnp.ones(2), None)], ("0.bias", "0.weight")),
    "nameless": ({"p": Pair(jnp.ones(1), {"x": jnp.ones(2)}, "n")}, ("p.0", "p.1.x")),
}


def as_jax_has_them(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)


@pytest.mark.parametrize("name", TREES)
def test_nodes_of_jax_are_flattened(name: str) -> None:
    tree, paths = TREES[name]
    leaves, treedef = flatten(tree)
    assert treedef.paths == paths
    assert sorted(map(id, leaves)) == sorted(map(id, as_jax_has_them(tree)))
    rebuilt = treedef.unflatten(leaves)
    assert jax.tree.structure(rebuilt) == jax.tree.structure(tree)
    assert list(map(id, as_jax_has_them(rebuilt))) == list(map(id, as_jax_has_them(tree)))
    assert sorted(insertion_order(tree, treedef)) == list(range(len(leaves)))
    assert flatten(tree)[1] == treedef


@pytest.mark.parametrize("name", TREES)
def test_optree_registry_is_unchanged_for_others(name: str) -> None:
    tree, _ = TREES[name]
    before = optree.tree_leaves(tree)
    flatten(tree)
    assert list(map(id, optree.tree_leaves(tree))) == list(map(id, before))


@pytest.mark.parametrize("name", TREES)
def test_tree_map_keeps_containers(name: str) -> None:
    tree, _ = TREES[name]
    doubled = tree_map(lambda leaf: 2 * leaf, tree)
    assert jax.tree.structure(doubled) == jax.tree.structure(tree)
    for leaf, twice in zip(jax.tree.leaves(tree), jax.tree.leaves(doubled), strict=True):
        np.testing.assert_array_equal(twice, 2 * leaf)


@given(
    st.recursive(
        st.integers() | st.none(),
        lambda inner: (
            st.builds(Layer, inner, inner)
            | st.builds(Pair, inner, inner, st.sampled_from(["", "note"]))
            | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
            | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3).map(FrozenDict)
            | st.tuples(inner, inner)
            | st.lists(inner, max_size=2)
        ),
        max_leaves=8,
    )
)
def test_trees_come_back_whole(tree: Any) -> None:
    leaves, treedef = flatten(tree)
    assert sorted(map(str, leaves)) == sorted(map(str, as_jax_has_them(tree)))
    assert len(set(treedef.paths)) == len(leaves)
    rebuilt = treedef.unflatten(leaves)
    assert jax.tree.structure(rebuilt) == jax.tree.structure(tree)
    assert as_jax_has_them(rebuilt) == as_jax_has_them(tree)


def test_static_fields_are_kept_and_compared() -> None:
    module = net()
    assert flatten(module)[1].unflatten([0, 1]).name == "net"
    other = Net(module.linear, "other")
    assert flatten(module)[1] != flatten(other)[1]
    assert flatten(module)[1].paths == flatten(other)[1].paths


def test_plans_of_shapes_alone() -> None:
    shapes = jax.eval_shape(net)
    plan = fddp.plan_buckets(shapes)
    assert plan.paths == ("linear.bias", "linear.weight")
    assert [leaf.shape for leaf in plan.leaves] == [(2,), (2, 3)]


def train_module(rank: int, world_size: int, kind: str) -> tuple[tuple[str, ...], list[Any], str]:
    """One step on a module; the plan's paths, the new parameters, and what kind they are."""
    x = jnp.arange(3.0) + rank
    if kind == "Equinox":
        model: Any = net()
        grads: Any = eqx.filter_jit(eqx.filter_grad(lambda m: m(x).sum()))(model)
    else:
        graph, model = nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
        grads = jax.jit(jax.grad(lambda state: nnx.merge(graph, state)(x).sum()))(model)
    with fddp.GradSync(model) as sync:
        mean = sync(grads)
        assert jax.tree.structure(mean) == jax.tree.structure(grads)
        stepped = fddp.tree_map(lambda p, g: p - g, model, mean)
        paths = sync.plan.paths
    leaves = [np.asarray(leaf) for leaf in flatten(tree_map(lambda p, s: p - s, model, stepped))[0]]
    return paths, leaves, type(stepped).__name__


@pytest.mark.parametrize(("kind", "node"), [("Equinox", "Net"), ("nnx", "State")])
def test_modules_in_a_step(ranks: RankPool, kind: str, node: str) -> None:
    for paths, (bias, kernel), name in ranks.run(2, train_module, kind):
        assert paths == TREES[kind][1]
        assert name == node
        np.testing.assert_allclose(bias, np.ones(2), rtol=1e-6)
        mean = np.arange(3.0) + 0.5
        wanted = np.stack([mean, mean]) if kind == "Equinox" else np.stack([mean, mean], axis=1)
        np.testing.assert_allclose(kernel, wanted, rtol=1e-5)


def test_an_unregistered_container() -> None:
    class Box:
        def __init__(self) -> None:
            self.inside = jnp.ones(2)

    def build(group: Any) -> str:
        bad = {"w": jnp.ones(2), "box": Box() if group.rank else jnp.ones(2)}
        with pytest.raises((TypeError, fddp.PlanMismatchError)) as raised:
            fddp.GradSync(bad, group=group)
        return str(raised.value)

    for text in fddp.loopback(2, build):
        assert "leaf 'box' is a tests.tree.test_jax_trees.test_an_unregistered_container." in text
        assert "jax.tree_util.register_pytree_node" in text


def test_fields_of_other_types_are_named() -> None:
    with pytest.raises(TypeError, match=r"leaf 'activation' is a .* which has no shape and dtype"):
        fddp.plan_buckets(eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0)))


def test_a_node_that_is_registered_late() -> None:
    class Late:
        def __init__(self, inside: Any) -> None:
            self.inside = inside

    late = Late(1.0)
    assert flatten([late])[0] == [late]
    jax.tree_util.register_pytree_node(Late, lambda n: ((n.inside,), None), lambda _, c: Late(*c))
    leaves, treedef = flatten([late])
    assert (leaves, treedef.paths) == ([1.0], ("0.0",))


def test_jax_is_imported_only_by_users() -> None:
    script = """
import sys
import torch, fddp
def train(group):
    with fddp.GradSync({"w": torch.ones(2)}, group=group) as sync:
        sync({"w": torch.ones(2)})
        fddp.broadcast({"w": torch.ones(2)}, group=group)
fddp.loopback(2, train)
loaded = [name for name in ("jax", "jaxlib", "optax", "flax", "equinox") if name in sys.modules]
assert not loaded, loaded
"""
    run_python("-c", script)
