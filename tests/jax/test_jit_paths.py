"""Compiled programs call the extension; where it was built without XLA's header, Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import fddp
from fddp.jax import lowering, named_errors, pmean, psum
from fddp.native import extension
from fddp.transport import LoopbackGroup

TARGETS = {"extension": "fddp_reduce", "callback": "xla_ffi_python_cpu_callback"}


@pytest.fixture(params=TARGETS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "callback":
        monkeypatch.setattr(lowering, "uses_extension", lambda: False)
    jax.clear_caches()
    yield request.param
    jax.clear_caches()


def test_the_extension_was_built_with_xla_s_header() -> None:
    assert lowering.uses_extension(), "install jaxlib before fddp is built, as the Makefile does"


def test_an_extension_without_xla_s_header_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    built = SimpleNamespace(xla_handler=lambda callback: None)
    monkeypatch.setattr(extension, "load", lambda: built)
    with pytest.warns(UserWarning, match="call Python, .* slower: install jaxlib, then build fddp"):
        assert not lowering.uses_extension.__wrapped__()


def test_custom_call_targets(path: str) -> None:
    def text(group: LoopbackGroup) -> str:
        return str(jax.jit(lambda x: psum(x, group)).lower(jnp.ones(2)).as_text())

    (found,) = fddp.loopback(1, text)
    assert set(re.findall(r"custom_call @(\w+)", found)) == {TARGETS[path]}
    assert "!stablehlo.token" in found


def test_both_paths_give_the_same_result(path: str) -> None:
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


def test_a_loop_that_carries_only_reduced_values(path: str) -> None:
    def doubled(group: LoopbackGroup) -> Any:
        return jax.jit(lambda: jax.lax.while_loop(lambda x: x < 10, lambda x: psum(x, group), 1.0))

    def text(group: LoopbackGroup) -> str:
        return str(doubled(group).lower().compile().as_text())

    # The condition, where XLA thinks that nothing changes; it would never end.
    assert "constant(true)" not in fddp.loopback(1, text)[0]
    assert fddp.loopback(2, lambda group: float(doubled(group)())) == [16.0, 16.0]


def test_both_name_errors(path: str) -> None:
    def differ(group: LoopbackGroup) -> str:
        with pytest.raises(fddp.DesyncError) as caught, named_errors():
            jax.jit(lambda x: psum({"w": x}, group))(jnp.ones(1 + group.rank))
        assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
        return str(caught.value)

    for text in fddp.loopback(2, differ):
        assert re.search(rf"psum of 1 leaf \('w'\), called at {re.escape(__file__)}:\d+", text)


def test_borrowed_memory_is_returned_after_the_call() -> None:
    """Memory is XLA's again once the handler has returned; who kept the loan is refused."""
    kept = []
    unpatched = lowering.calls._reduce

    def keeping(call: Any, loan: Any) -> None:
        kept.append(loan)
        unpatched(call, loan)

    def program(group: LoopbackGroup) -> None:
        with named_errors():
            jax.jit(lambda x: psum(x, group))(jnp.ones(4))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering.calls, "_reduce", keeping)
        fddp.loopback(1, program)
    assert isinstance(kept[0], extension.load().XlaBorrowedBuffers)
    with pytest.raises(IndexError):
        kept[0].pack(torch.empty(4), [0])
