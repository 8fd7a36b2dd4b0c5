"""Calls of a compiled program into Python: their values, order and errors."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fddp
from fddp.jax import named_errors, pmean, psum
from fddp.transport import LoopbackGroup


def test_calls_are_ordered_by_tokens() -> None:
    def text(group: LoopbackGroup) -> str:
        return str(jax.jit(lambda x: psum(x, group)).lower(jnp.ones(2)).as_text())

    (found,) = fddp.loopback(1, text)
    assert set(re.findall(r"custom_call @(\w+)", found)) == {"xla_ffi_python_cpu_callback"}
    assert "!stablehlo.token" in found


def test_values_of_every_kind() -> None:
    def reduced(group: LoopbackGroup) -> list[Any]:
        tree = {
            "bits": jnp.arange(12.0).reshape(3, 4) * (group.rank + 1),
            "half": jnp.full((2, 0), 1.0, jnp.bfloat16),
            "one": jnp.full((), 1.5 + group.rank, jnp.bfloat16),
            "whole": jnp.array([[7]], jnp.int8) * group.rank,
            "z": jnp.array([1 + 2j]) * (1 + group.rank),
            "turned": jnp.arange(6.0).reshape(2, 3).T,
        }
        with named_errors():
            sums = jax.jit(lambda t: psum(t, group))(tree)
            mean = jax.jit(jax.grad(lambda x: pmean(x**2, group).sum()))(tree["turned"])
        return [*map(np.asarray, jax.tree.leaves(sums)), np.asarray(mean)]

    turned = np.arange(6.0).reshape(2, 3).T
    for bits, half, one, turns, whole, z, mean in fddp.loopback(2, reduced):
        np.testing.assert_array_equal(bits, np.arange(12.0).reshape(3, 4) * 3)
        assert half.shape == (2, 0)
        assert (one.shape, float(one), one.dtype.name) == ((), 4.0, "bfloat16")
        np.testing.assert_array_equal(turns, 2 * turned)
        assert whole.tolist() == [[7]]
        assert z.tolist() == [3 + 6j]
        np.testing.assert_array_equal(mean, 2 * turned)


def test_a_loop_that_carries_only_reduced_values() -> None:
    def doubled(group: LoopbackGroup) -> Any:
        return jax.jit(lambda: jax.lax.while_loop(lambda x: x < 10, lambda x: psum(x, group), 1.0))

    def text(group: LoopbackGroup) -> str:
        return str(doubled(group).lower().compile().as_text())

    # The condition, where XLA thinks that nothing changes; it would never end.
    assert "constant(true)" not in fddp.loopback(1, text)[0]
    assert fddp.loopback(2, lambda group: float(doubled(group)())) == [16.0, 16.0]


def test_errors_are_named() -> None:
    def differ(group: LoopbackGroup) -> str:
        with pytest.raises(fddp.DesyncError) as caught, named_errors():
            jax.jit(lambda x: psum({"w": x}, group))(jnp.ones(1 + group.rank))
        assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
        return str(caught.value)

    for text in fddp.loopback(2, differ):
        assert re.search(rf"psum of 1 leaf \('w'\), called at {re.escape(__file__)}:\d+", text)
