"""`fddp.check_replicas` over leaves and trees of every kind: JAX arrays, containers of others."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optree
import pytest
import torch

import fddp
from tests.support.models import rand
from tests.support.on_ranks import on_processes, on_threads

FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
JAX_DTYPES = ["float32", "bfloat16", "float16", "int32", "uint8", "bool", "complex64"]


class Box:
    """A node that optree alone knows."""

    def __init__(self, content: Any) -> None:
        self.content = content


@pytest.fixture
def _box() -> Iterator[None]:
    everywhere = optree.registry.__GLOBAL_NAMESPACE
    optree.register_pytree_node(
        Box,
        lambda box: ((box.content,), None, ("content",)),
        lambda _, children: Box(*children),
        namespace=everywhere,
    )
    yield
    optree.unregister_pytree_node(Box, namespace=everywhere)


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    """A node that JAX knows."""

    weight: Any
    bias: Any


class Moments(NamedTuple):
    first: Any
    second: Any


def checked(group: Any, tree: Any) -> fddp.DesyncError | None:
    try:
        fddp.check_replicas(tree, group)
    except fddp.DesyncError as error:
        return error
    return None


def drifted(make: Any, change: Any) -> list[fddp.DesyncError]:
    """Return each rank's error after rank 1 of three has changed its tree; all agree before."""

    def run(group: Any) -> Any:
        tree = make()
        assert checked(group, tree) is None
        return checked(group, change(tree) if group.rank == 1 else tree)

    errors = fddp.loopback(3, run)
    assert len({str(error) for error in errors}) == 1, "the same on every rank"
    assert {error.ranks for error in errors} == {(1,)}
    return errors


# JAX


def arrays() -> dict[str, Any]:
    leaves: dict[str, Any] = {name: jnp.ones((2, 3)).astype(name) for name in JAX_DTYPES}
    return {**leaves, "0-dim": jnp.array(2.0), "empty": jnp.ones((0, 3)), "none": None}


@pytest.mark.parametrize("name", JAX_DTYPES)
def test_jax_arrays_of_every_dtype(name: str) -> None:
    def change(tree: dict[str, Any]) -> dict[str, Any]:
        flipped = jnp.logical_not(tree[name]) if name == "bool" else tree[name] * 2
        return {**tree, name: tree[name].at[1, 2].set(flipped[1, 2])}

    outcome = {"bool": "True on rank 0 and False", "complex64": "(1+0j) on rank 0 and (2+0j)"}
    integers = ("int32", "uint8")
    default = "1 on rank 0 and 2 on" if name in integers else "1.0 on rank 0 and 2.0 on"
    for error in drifted(arrays, change):
        assert error.path == name
        assert f"leaf {name!r} of shape (2, 3), {name}: " in str(error)
        assert f"at index (1, 2): {outcome.get(name, default)}" in str(error)


@pytest.mark.parametrize("name", FLOAT8)
def test_jax_arrays_of_float8_are_refused_by_name(name: str) -> None:
    """torch cannot import them from JAX; other ranks get an error."""

    def run(group: Any) -> tuple[type[Exception], str]:
        own = jnp.ones(2).astype(name) if group.rank == 0 else jnp.ones(2)
        with pytest.raises(fddp.FddpError, match=f"leaf 'w' .* of dtype {name}") as caught:
            fddp.check_replicas({"w": own}, group)
        return type(caught.value), str(caught.value)

    (mine, text), (theirs, outcome) = fddp.loopback(2, run)
    assert (mine, theirs) == (fddp.TreeMismatchError, fddp.PeerError)
    assert "cast it" in text
    assert "rank 0" in outcome


@on_threads(2)
def test_a_jax_array_that_is_laid_out_otherwise(group: Any) -> None:
    """A replica may hold a slice or a transpose of something else, as long as its values agree."""
    own = jnp.array(np.arange(12.0).reshape(4, 3).T[:, ::2])
    other = jnp.arange(12.0).reshape(4, 3).T[:, ::2]
    assert checked(group, {"w": other if group.rank else own}) is None


def test_containers_of_jax() -> None:
    def make() -> Any:
        return {"layer": Layer(jnp.ones(3), None), "net": eqx.nn.Linear(2, 2, key=KEY)}

    def change(tree: Any) -> Any:
        net = eqx.tree_at(lambda net: net.bias, tree["net"], jnp.zeros(2) - 1.0)
        return {**tree, "net": net}

    KEY = jax.random.key(0)  # noqa: N806 - one for all ranks
    assert {error.path for error in drifted(make, change)} == {"net.bias"}


@on_processes(2)
def test_one_rank_in_torch_and_one_in_jax(rank: int, world_size: int) -> None:
    values = np.arange(4, dtype=np.float32)
    make = torch.tensor if rank == 0 else jnp.array
    assert checked(None, {"w": make(values)}) is None
    values[2] += 5.0 * rank
    error = checked(None, {"w": make(values)})
    assert "at index 2: 2.0 on rank 0 and 7.0 on rank 1" in str(error)


@on_threads(1)
def test_a_traced_jax_array_has_no_values(group: Any) -> None:
    with pytest.raises(fddp.TransformError, match="leaf 'w' of the tree is traced by JAX"):
        jax.jit(lambda x: fddp.check_replicas({"w": x}, group))(jnp.ones(2))
    fddp.check_replicas({"w": jnp.ones(2)}, group)


# Torch


def tensors() -> dict[str, Any]:
    leaves = {name: rand(2, 3, seed=1).to(getattr(torch, name)) for name in FLOAT8}
    return {**leaves, "0-dim": torch.tensor(True), "bare 0": torch.empty(0), "none": None}


@pytest.mark.parametrize("name", FLOAT8)
def test_float8(name: str) -> None:
    def change(tree: dict[str, Any]) -> dict[str, Any]:
        bits = tree[name].view(torch.uint8).clone()
        bits[0, 1] ^= 1
        return {**tree, name: bits.view(getattr(torch, name))}

    for error in drifted(tensors, change):
        assert f"leaf {name!r} of shape (2, 3), {name}: " in str(error)
        assert "at index (0, 1): " in str(error)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
@on_threads(2)
def test_empty_leaves_of_other_shapes_are_another_structure(
    group: Any, shape: tuple[int, ...]
) -> None:
    error = checked(group, {"w": torch.empty(shape if group.rank else (0, 4))})
    assert "(0, 4)" in str(error)
    assert str(shape) in str(error)


# Containers


def contained() -> Any:
    moments = Moments(torch.ones(2), None)
    return OrderedDict(state=[moments, (None, torch.zeros(()))], box=Box({"w": torch.ones(3)}))


def in_the_box(tree: Any) -> Any:
    tree["box"].content["w"][2] = 5.0
    return tree


def under_a_named_tuple(tree: Any) -> Any:
    tree["state"][0].first[1] = 5.0
    return tree


def beside_none(tree: Any) -> Any:
    tree["state"][1][1].fill_(5.0)
    return tree


@pytest.mark.usefixtures("_box")
@pytest.mark.parametrize(
    ("change", "path"),
    [
        (in_the_box, "box.content.w"),
        (under_a_named_tuple, "state.0.first"),
        (beside_none, "state.1.1"),
    ],
)
def test_nodes_of_optree_with_leaves_that_are_none(change: Any, path: str) -> None:
    for error in drifted(contained, change):
        assert error.path == path
        assert "1.0 on rank 0 and 5.0" in str(error) or "0.0 on rank 0 and 5.0" in str(error)


# Where it was called


def helper(group: Any, tree: Any) -> None:
    fddp.check_replicas(tree, group)


@on_threads(2)
def test_the_error_names_the_caller_of_the_helper(group: Any) -> None:
    here, first = re.escape(__file__), helper.__code__.co_firstlineno + 1
    at = rf"^check_replicas of 1 leaf, called at {here}:{first} in helper, from {here}:\d+ in test_"
    with pytest.raises(fddp.DesyncError, match=at):
        helper(group, torch.tensor(group.rank))
