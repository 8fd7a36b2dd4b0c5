"""Results of JAX's own collectives, in every way to run them; a program of its own.

`python jax_reference.py RANKS FILE`, with as many devices as ranks, writes a pickled dictionary.
JAX makes its devices when it starts, so this can't run in a process that has used JAX.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

ROOT = 1
WIDTH = 2
AXIS = "ranks"
#: reductions that meet in one result on all ranks, from which JAX's two modes differ
INVARIANT = ("psum", "pmean")


def inputs(world_size: int) -> dict[str, np.ndarray]:
    """For each rank where to differentiate, a tangent, and weights that make results scalars."""
    rng = np.random.default_rng(7)
    shape = (world_size, world_size * WIDTH)
    return {name: rng.normal(size=shape) for name in ("x", "t", "weights")}


def operators(world_size: int) -> dict[str, Callable[[Any], Any]]:
    """Those that JAX has, by the names that `test_against_jax` gives them."""
    from jax import lax

    cut = (world_size, WIDTH)
    return {
        "psum": lambda x: lax.psum(x, AXIS),
        "pmean": lambda x: lax.pmean(x, AXIS),
        "all_gather": lambda x: lax.all_gather(x, AXIS),
        "all_gather tiled": lambda x: lax.all_gather(x, AXIS, tiled=True),
        "reduce_scatter": lambda x: lax.psum_scatter(x.reshape(cut), AXIS),
        "reduce_scatter tiled": lambda x: lax.psum_scatter(x, AXIS, tiled=True),
        "all_to_all": lambda x: lax.all_to_all(x.reshape(cut), AXIS, 0, 0),
        "all_to_all tiled": lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True),
        # lax.pbroadcast has no derivative, and runs on GPUs alone.
        "broadcast_from": lambda x: lax.all_gather(x, AXIS)[ROOT],
    }


def modes(world_size: int) -> dict[str, Callable[..., Any]]:
    """Ways to run a function of one rank over arrays of all of them."""
    import jax
    from jax.sharding import Mesh, PartitionSpec

    spec = PartitionSpec(AXIS)
    mesh = Mesh(np.array(jax.devices()[:world_size]), (AXIS,))

    def sharded(f: Callable[..., Any]) -> Callable[..., Any]:
        def on_shards(*shards: Any) -> Any:
            return jax.tree.map(lambda y: y[None], f(*(shard[0] for shard in shards)))

        return jax.jit(jax.shard_map(on_shards, mesh=mesh, in_specs=spec, out_specs=spec))

    # pmap has the convention of vmap; shard_map has it with check_vma=False.
    return {"vmap": lambda f: jax.jit(jax.vmap(f, axis_name=AXIS)), "shard_map": sharded}


def derivatives(operator: Callable[[Any], Any], x: Any, t: Any, weights: Any) -> dict[str, Any]:
    """Of a function that is linear in no part; the weights differ from rank to rank."""
    import jax
    import jax.numpy as jnp

    def inner(y: Any) -> Any:
        return jnp.sin(operator(y**2))

    def scalar(y: Any) -> Any:
        result = inner(y)
        return (result * jnp.resize(weights, result.shape)).sum()

    gradient = jax.grad(scalar)
    return {
        "value": operator(x),
        "jvp": jax.jvp(inner, (x,), (t,))[1],
        "vjp": gradient(x),
        "forward over reverse": jax.jvp(gradient, (x,), (t,))[1],
        "reverse over reverse": jax.grad(lambda y: (gradient(y) * t).sum())(x),
        "reverse over forward": jax.grad(lambda y: jax.jvp(scalar, (y,), (t,))[1])(x),
    }


def everything(world_size: int, x: Any, t: Any, weights: Any) -> dict[str, Any]:
    """All that the tests compare, as one function of a rank, so that it is compiled once."""
    import jax
    from jax import lax

    known = operators(world_size)
    found: dict[str, Any] = {
        name: derivatives(operator, x, t, weights) for name, operator in known.items()
    }
    # Of a result that all ranks share, as of a loss that was reduced.
    for name in INVARIANT:
        found[f"gradient of a shared {name}"] = jax.grad(
            lambda y, operator=known[name]: operator((y**2).sum())
        )(x)
    return {**found, "pmax": lax.pmax(x, AXIS)}


def refusals(world_size: int) -> dict[str, str]:
    """Errors of fddp's reductions in programs that run on several devices of one process."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import fddp
    from fddp.jax import psum

    mesh = Mesh(np.array(jax.devices()[:world_size]), (AXIS,))
    spec = PartitionSpec(AXIS)
    x = jax.device_put(np.arange(float(world_size)), NamedSharding(mesh, spec))

    def errors(group: Any) -> dict[str, str]:
        programs = {
            "jit": jax.jit(lambda y: psum(y, group)),
            "shard_map": jax.jit(
                jax.shard_map(lambda y: psum(y, group), mesh=mesh, in_specs=spec, out_specs=spec)
            ),
            "pmap": jax.pmap(lambda y: psum(y, group)),
        }
        texts = {}
        for name, program in programs.items():
            try:
                program(x)
            except Exception as error:
                texts[name] = f"{type(error).__name__}: {error}"
        return texts

    (texts,) = fddp.loopback(1, errors)
    return texts


def main(world_size: int, path: str) -> None:
    import jax

    given = inputs(world_size)
    arrays = [given[name] for name in ("x", "t", "weights")]
    found: dict[str, Any] = {
        mode: jax.tree.map(np.asarray, over_ranks(partial(everything, world_size))(*arrays))
        for mode, over_ranks in modes(world_size).items()
    }
    found["refusals"] = refusals(world_size)
    with open(path, "wb") as file:
        pickle.dump(found, file)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
