"""Functions of one rank that reduce over ranks, written once for fddp and for JAX's own axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

Array = Any
#: a reduction over ranks, of a tree
Reduce = Callable[[Any], Any]
#: what a test differentiates, from the reduction that it uses and one array
Body = Callable[[Reduce, Array], Array]


def plain(reduce: Reduce, x: Array) -> Array:
    return jnp.sin(reduce(x**2)) * x


def tree(reduce: Reduce, x: Array) -> Array:
    both = reduce({"b": x**3, "a": [x.sum(), 2.0 * x[:1]], "whole": jnp.array(2)})
    return both["b"] * both["a"][0] + both["a"][1] * both["whole"]


def twice(reduce: Reduce, x: Array) -> Array:
    return reduce(jnp.cos(reduce(x * x)) * x)


def scanned(reduce: Reduce, x: Array) -> Array:
    def step(carry: Array, factor: Array) -> tuple[Array, Array]:
        carry = jnp.sin(reduce(carry * factor))
        return carry, reduce(carry[0] ** 2)

    last, squares = jax.lax.scan(step, x, jnp.array([0.5, 1.5, 0.25]))
    return last + squares.sum()


def branched(reduce: Reduce, x: Array) -> Array:
    return jax.lax.cond(True, lambda y: reduce(y) ** 2, lambda y: y, jnp.sin(x))


def checkpointed(reduce: Reduce, x: Array) -> Array:
    return jax.checkpoint(lambda y: jnp.sin(reduce(jnp.sin(y))))(x)


def jitted_within(reduce: Reduce, x: Array) -> Array:
    inner = jax.jit(lambda y: reduce(y) * y)
    return inner(x) + inner(2.0 * x)


def mapped(reduce: Reduce, x: Array) -> Array:
    return jax.vmap(lambda row, scale: reduce(row * scale) * row, in_axes=(None, 0))(
        x, jnp.array([1.0, -2.0])
    ).sum(0)


BODIES: Mapping[str, Body] = MappingProxyType(
    {
        body.__name__: body
        for body in (plain, tree, twice, scanned, branched, checkpointed, jitted_within, mapped)
    }
)


def transforms(f: Callable[[Array], Array], x: Array, t: Array) -> dict[str, Any]:
    """Values and derivatives of `f`, of first and second order, both modes.

    Args:
        f: from arrays to arrays of the same shape.
        x: where.
        t: a tangent, a cotangent.
    """

    def scalar(y: Array) -> Array:
        return (f(y) * t).sum()

    def pullback(y: Array) -> Array:
        return jax.vjp(f, y)[1](t)[0]

    return {
        "value": f(x),
        "jvp": jax.jvp(f, (x,), (t,))[1],
        "vjp": pullback(x),
        "linearize": jax.linearize(f, x)[1](t),
        "jacfwd": jax.jacfwd(f)(x),
        "jacrev": jax.jacrev(f)(x),
        "hessian": jax.hessian(scalar)(x),
        "forward over reverse": jax.jvp(jax.grad(scalar), (x,), (t,))[1],
        "reverse over reverse": jax.vjp(pullback, x)[1](t)[0],
        "reverse over forward": jax.grad(lambda y: (jax.jvp(f, (y,), (t,))[1] * t).sum())(x),
    }
