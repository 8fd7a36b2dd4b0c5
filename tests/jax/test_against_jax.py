"""fddp's operators and their derivatives beside JAX's, on the same numbers, in float64."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp

import fddp
from tests.support import jax_reference
from tests.support.jax_reference import INVARIANT, ROOT, WIDTH, inputs
from tests.support.programs import run_python
from tests.support.ranks import RankPool

WORLD_SIZE = 3

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "psum": fddp.psum,
    "pmean": fddp.pmean,
    "all_gather": fddp.all_gather,
    "all_gather tiled": lambda x: fddp.all_gather(x, tiled=True),
    "reduce_scatter": lambda x: fddp.reduce_scatter(x.reshape(WORLD_SIZE, WIDTH)),
    "reduce_scatter tiled": lambda x: fddp.reduce_scatter(x, tiled=True),
    "all_to_all": lambda x: fddp.all_to_all(x.reshape(WORLD_SIZE, WIDTH)),
    "all_to_all tiled": lambda x: fddp.all_to_all(x, tiled=True),
    "broadcast_from": lambda x: fddp.broadcast_from(x, ROOT),
}
MODES = ("vmap", "shard_map")
# What the gradient of a shared result is, in units of that of this rank's own part.
SHARES = {
    ("psum", False): WORLD_SIZE,
    ("pmean", False): 1,
    # Where JAX knows that the result is one, its gradient is that of the one.
    ("psum", True): 1,
    ("pmean", True): 1 / WORLD_SIZE,
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("jax") / "reference"
    environment = {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={WORLD_SIZE}",
        "JAX_ENABLE_X64": "1",
        "JAX_PLATFORMS": "cpu",
    }
    run_python(jax_reference.__file__, str(WORLD_SIZE), str(path), env=environment)
    found: dict[str, Any] = pickle.loads(Path(path).read_bytes())
    return found


@pytest.fixture(scope="module")
def ours(ranks: RankPool) -> list[dict[str, Any]]:
    return ranks.run(WORLD_SIZE, on_rank)


def on_rank(rank: int, world_size: int) -> dict[str, Any]:
    """All results of this rank, as arrays."""
    x, t, weights = (torch.from_numpy(inputs(world_size)[k][rank]) for k in ("x", "t", "weights"))
    found: dict[str, Any] = {
        name: derivatives(operator, x, t, weights) for name, operator in OPERATORS.items()
    }
    for name in INVARIANT:
        operator = OPERATORS[name]
        shared = grad(lambda y, f=operator: f((y**2).sum()))
        found[f"gradient of a shared {name}"] = shared(x).numpy()
    found["pmax"] = fddp.pmax(x).numpy()
    return found


def derivatives(
    operator: Callable[[Tensor], Tensor], x: Tensor, t: Tensor, weights: Tensor
) -> dict[str, np.ndarray]:
    """The same as in `jax_reference`, by torch's transforms."""

    def inner(y: Tensor) -> Tensor:
        return torch.sin(operator(y**2))

    def scalar(y: Tensor) -> Tensor:
        result = inner(y)
        times = -(-result.numel() // weights.numel())
        return (result.flatten() * weights.repeat(times)[: result.numel()]).sum()

    gradient = grad(scalar)
    results = {
        "value": operator(x),
        "jvp": jvp(inner, (x,), (t,))[1],
        "vjp": gradient(x),
        "forward over reverse": jvp(gradient, (x,), (t,))[1],
        "reverse over reverse": grad(lambda y: (gradient(y) * t).sum())(x),
        "reverse over forward": grad(lambda y: jvp(scalar, (y,), (t,))[1])(x),
    }
    return {key: value.detach().numpy() for key, value in results.items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPERATORS)
def test_values_and_derivatives(
    name: str, mode: str, ours: list[dict[str, Any]], theirs: dict[str, Any]
) -> None:
    for rank, found in enumerate(ours):
        assert found[name].keys() == theirs[mode][name].keys()
        for key, value in found[name].items():
            wanted = theirs[mode][name][key][rank]
            assert value.dtype == wanted.dtype == np.float64
            np.testing.assert_allclose(value, wanted, rtol=1e-12, atol=1e-12, err_msg=key)


@pytest.mark.parametrize("mode", MODES)
def test_the_largest(mode: str, ours: list[dict[str, Any]], theirs: dict[str, Any]) -> None:
    for rank, found in enumerate(ours):
        np.testing.assert_array_equal(found["pmax"], theirs[mode]["pmax"][rank])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", INVARIANT)
def test_the_gradient_of_a_shared_result(
    name: str, mode: str, ours: list[dict[str, Any]], theirs: dict[str, Any]
) -> None:
    """Here conventions differ: fddp has that of `vmap`, `pmap`, and `shard_map` without vma."""
    key = f"gradient of a shared {name}"
    parts = 2 * inputs(WORLD_SIZE)["x"]
    wanted = SHARES[name, mode == "shard_map"] * parts
    np.testing.assert_allclose(theirs[mode][key], wanted, rtol=1e-12)
    found = np.stack([rank[key] for rank in ours])
    np.testing.assert_allclose(found, SHARES[name, False] * parts, rtol=1e-12)


@pytest.mark.parametrize("program", ["jit", "shard_map", "pmap"])
def test_reductions_on_several_devices_of_one_process(program: str, theirs: dict[str, Any]) -> None:
    """Ranks are processes: devices of one of them would all speak for the same rank."""
    text = theirs["refusals"][program]
    assert "a reduction over fddp's ranks (give each process one device)" in text
