"""Errors in and around compiled programs of JAX are raised on every rank, with a cause."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist

import fddp
from fddp.collectives import compiled_calls
from fddp.jax import internals, named_errors, pmean, psum
from fddp.jax.communicators import jit_communicator_of
from fddp.transport import LoopbackGroup
from tests.support.ranks import RankPool

HERE = re.escape(__file__)


def outcome(world_size: int, program: Callable[[LoopbackGroup], Any]) -> list[str]:
    """Return the kind and text of each rank's error; afterwards a sum must be correct."""

    def on_rank(group: LoopbackGroup) -> str:
        with pytest.raises(fddp.FddpError) as caught, named_errors():
            program(group)
        with named_errors():
            assert float(jax.jit(lambda x: psum(x, group))(1.0)) == world_size
        return f"{type(caught.value).__name__}: {caught.value}"

    return fddp.loopback(world_size, on_rank)


# While tracing


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (jnp.ones(2, jnp.int16), "psum: leaf 'a.0' is of int16, which can't be summed over ranks"),
        (jnp.ones(2, jnp.float8_e5m2), "leaf 'a.0' is of float8_e5m2, which can't be summed"),
        (jax.random.key(0), r"leaf 'a.0' is of key<fry>, which can't be summed"),
        (True, "leaf 'a.0' is of bool, which can't be summed"),
        (len, "leaf 'a.0' is a builtin_function_or_method; it takes arrays, numbers and None"),
        (torch.ones(1), "leaf 'a.0' is a tensor of torch, .* use fddp.psum"),
    ],
)
def test_leaves_that_cannot_be_reduced(value: Any, text: str) -> None:
    def traced(group: LoopbackGroup) -> None:
        with pytest.raises(TypeError, match=text):
            jax.eval_shape(lambda: psum({"a": [value]}, group))

    fddp.loopback(1, traced)


def test_the_mean_of_integers_is_refused() -> None:
    def traced(group: LoopbackGroup) -> None:
        with pytest.raises(
            TypeError, match="pmean: leaf 'n' is of int32, which can't represent a mean"
        ):
            jax.jit(lambda n: pmean({"n": n}, group))(3)

    fddp.loopback(1, traced)


def test_a_group_is_no_argument() -> None:
    with pytest.raises(
        TypeError, match=r"got a .*Tracer; a group can't be an argument of a traced"
    ):
        jax.vmap(lambda x, group: psum(x, group))(jnp.ones(2), jnp.arange(2))
    with pytest.raises(TypeError, match="got a int; a group can't be an argument"):
        psum(jnp.ones(2), 3)  # type: ignore[arg-type]
    with pytest.raises(fddp.FddpError, match="no process group: start the program with torchrun"):
        jax.jit(psum)(jnp.ones(2))


def test_axes_that_are_not_of_the_mesh() -> None:
    mesh = fddp.Topology(host=2, local=1)

    def traced(group: LoopbackGroup) -> None:
        for axis, given, text in [
            ("batch", mesh, r"psum: axis='batch' must name distinct axes .* has \('host', 'local'"),
            (("host", "host"), mesh, "must name distinct axes"),
            (
                "host",
                None,
                "is missing; pass mesh=; axes of jax.vmap, pmap and shard_map are other",
            ),
        ]:
            with pytest.raises(ValueError, match=text):
                jax.make_jaxpr(lambda x, a=axis, m=given: psum(x, group, mesh=m, axis=a))(1.0)

        with pytest.raises(TypeError, match="mesh must be a Topology or a DeviceMesh, got str"):
            psum(1.0, group, mesh="local")  # type: ignore[call-overload]

    fddp.loopback(2, traced)


def test_programs_for_another_platform() -> None:
    def lowered(group: LoopbackGroup) -> None:
        traced = jax.jit(lambda x: pmean(x, group)).trace(jnp.ones(2))
        text = rf"pmean, called at {HERE}:\d+: compiled for cuda, and reductions in compiled"
        with pytest.raises(fddp.TransformError, match=text):
            traced.lower(lowering_platforms=("cuda",))

    fddp.loopback(1, lowered)


# While running


def test_differing_leaves_are_reported() -> None:
    def program(group: LoopbackGroup) -> None:
        jax.jit(lambda x: psum({"w": x}, group))(jnp.ones(2 + group.rank))

    for text in outcome(2, program):
        assert re.match(
            rf"DesyncError: ranks met in different operators: rank 0: psum of 1 leaf \('w'\), "
            rf"called at {HERE}:\d+; rank 1: .*rank 0 has leaf 'w' of shape \(2,\), float32 on cpu "
            rf"where rank 1 has leaf 'w' of shape \(3,\)",
            text,
        ), text


def test_ranks_in_other_derivatives_are_reported() -> None:
    def program(group: LoopbackGroup) -> None:
        def loss(x: Any) -> Any:
            return psum(x**2, group)

        if group.rank:
            jax.jit(lambda x: loss(x) + loss(x))(1.0)
        else:
            jax.jit(jax.grad(loss))(1.0)

    for text in outcome(2, program):
        assert re.match(
            rf"DesyncError: .*rank 0: backward of psum of 1 leaf \(''\), called at {HERE}:(\d+); "
            rf"rank 1: psum of 1 leaf \(''\), called at {HERE}:\1",
            text,
        ), text


def test_a_branch_that_only_some_ranks_take_times_out() -> None:
    over = threading.Event()

    def program(group: LoopbackGroup) -> str:
        with fddp.Communicator(group) as ranks:
            ranks.transport.timeout_s = 0.2  # but not of opening
            taken = jax.jit(lambda x: jax.lax.cond(x > 0, lambda y: psum(y, ranks), lambda y: y, x))
            if group.rank == 0:
                taken(0.0).block_until_ready()
                over.wait(20)
                return "not taken"
            try:
                with pytest.raises(fddp.SyncTimeoutError) as caught, named_errors():
                    taken(1.0)
            finally:
                over.set()
            return str(caught.value)

    quiet, text = fddp.loopback(2, program)
    assert quiet == "not taken"
    assert re.match(rf"psum of 1 leaf \(''\), called at {HERE}:\d+ on rank 1", text), text
    assert "no response from rank 0" in text
    assert 'jax.config.update("jax_cpu_enable_async_dispatch", False)' in text


def test_programs_of_two_threads_over_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX orders what one thread starts; ranks would take sums from each other's calls."""
    reducing, over = threading.Event(), threading.Event()
    unpatched = compiled_calls.run_eagerly

    def slow(call: Any, leaves: Any) -> Any:
        reducing.set()
        over.wait(0.3)
        return unpatched(call, leaves)

    def program(group: LoopbackGroup) -> float:
        def first() -> float:
            return float(jax.jit(lambda x: psum(x, group))(1.0))

        jit_communicator_of(group, None).open()
        with ThreadPoolExecutor(1) as pool:
            total = pool.submit(first)
            reducing.wait(20)
            text = rf"psum of 1 leaf \(''\), called at {HERE}:\d+: something else communicates over"
            with pytest.raises(fddp.DesyncError, match=text), named_errors():
                jax.jit(lambda x: psum(2 * x, group))(1.0)
            return total.result()

    monkeypatch.setattr(compiled_calls, "run_eagerly", slow)
    assert fddp.loopback(1, program) == [1.0]


def test_without_named_errors_jax_raises_the_text() -> None:
    def program(group: LoopbackGroup) -> str:
        with pytest.raises(jax.errors.JaxRuntimeError, match="DesyncError: ranks met") as caught:
            jax.block_until_ready(jax.jit(lambda x: psum(x, group))(jnp.ones(2 + group.rank)))
        number = re.search(r"\[fddp error (\d+)\]", str(caught.value))
        assert number is not None
        # Otherwise JAX would fail every later program of this thread with the same error.
        internals.forget_tokens()
        with named_errors():
            return str(float(jax.jit(lambda x: psum(x, group))(1.0)))

    assert fddp.loopback(2, program) == ["2.0", "2.0"]


def test_programs_after_one_that_fails_while_others_are_started() -> None:
    """Its input is still computed when it is dispatched, so that its error comes later."""

    def program(group: LoopbackGroup) -> float:
        slow, a = jax.jit(lambda a: (a @ a @ a @ a)[0, 0]), jnp.ones((1000, 1000))
        with fddp.Communicator(group) as ranks:
            closed = jax.jit(lambda x: psum(x, ranks))
            closed(slow(a)).block_until_ready()  # both are compiled
        with pytest.raises(fddp.ClosedError), named_errors():
            closed(slow(a))
        with named_errors():
            return float(jax.jit(lambda x: psum(x, group))(2.0))

    assert fddp.loopback(1, program) == [2.0]


def test_the_newest_errors_are_kept() -> None:
    """Of more failed programs than errors are kept of."""

    def program(group: LoopbackGroup) -> None:
        with fddp.Communicator(group) as ranks:
            step = jax.jit(lambda x: psum(x, ranks))
            step(1.0).block_until_ready()
        for _ in range(70):
            with pytest.raises(fddp.ClosedError), named_errors():
                step(1.0)

    fddp.loopback(1, program)


def test_other_errors_pass_named_errors_by() -> None:
    def fail(_: Any) -> Any:
        raise ValueError("own")

    with pytest.raises(KeyError), named_errors():
        raise KeyError(1)
    shape = jax.ShapeDtypeStruct((), np.float32)
    failing = jax.jit(lambda x: jax.pure_callback(fail, shape, x))
    with pytest.raises(jax.errors.JaxRuntimeError, match="own"), named_errors():
        failing(1.0).block_until_ready()


def test_a_closed_communicator() -> None:
    def program(group: LoopbackGroup) -> None:
        with fddp.Communicator(group) as ranks:
            step = jax.jit(lambda x: psum(x, ranks))
            step(1.0).block_until_ready()
        text = r"is closed \(close\(\) was called\); make a new one on every rank, and trace anew"
        with pytest.raises(fddp.ClosedError, match=text), named_errors():
            step(1.0)
        with pytest.raises(fddp.ClosedError, match=r"is closed .*; make a new one on every rank"):
            jax.make_jaxpr(lambda x: psum(x, ranks))(1.0)

    fddp.loopback(2, program)


def test_a_communicator_that_failed_is_opened_anew_by_compiling_anew() -> None:
    def program(group: LoopbackGroup) -> tuple[str, float]:
        step = jax.jit(lambda x: psum(x, group))
        with named_errors():
            step(1.0).block_until_ready()
        jit_communicator_of(group, None).communicator.close()
        with pytest.raises(fddp.ClosedError) as caught, named_errors():
            step(1.0)
        met.wait()
        jax.clear_caches()
        met.wait()
        with named_errors():
            return str(caught.value), float(step(2.0))

    met = threading.Barrier(2)
    for text, total in fddp.loopback(2, program):
        assert "call jax.clear_caches() on every rank" in text
        assert total == 4.0


def test_a_group_that_is_gone(ranks: RankPool) -> None:
    for text in ranks.run(2, after_the_group):
        assert re.match(r"the group of channel \d+ is gone, .*; trace anew", text), text


def after_the_group(rank: int, world_size: int) -> str:
    step = jax.jit(psum)
    with named_errors():
        assert float(step(1.0)) == world_size
    dist.destroy_process_group()
    gc.collect()
    with pytest.raises(fddp.ClosedError) as caught, named_errors():
        step(1.0)
    return str(caught.value)


# JAX runs a program again whose results have NaN


def steps_with_nan(rank: int, group: Any = None, *, nested: bool) -> tuple[list[str], list[float]]:
    """Three steps, of which the second has NaN on rank 1 after its reduction."""

    def reduced(x: Any) -> Any:
        # The callback of a loop runs on a thread of XLA.
        body = lambda total, _: (total @ x, psum(x.sum(), group))  # noqa: E731
        return jax.lax.scan(body, x, None, length=2)[1].sum()

    inner = jax.jit(reduced) if nested else reduced
    program = jax.jit(lambda x, y: (inner(x), jnp.log(y)))
    errors, sums = [], []
    inner(jnp.ones((64, 64)))
    for step in range(3):
        fails = step == 1 and rank == 1
        try:
            with jax.debug_nans(True), named_errors():
                total, _ = program(jnp.full((64, 64), step + 1.0), -1.0 if fails else 1.0)
            sums.append(float(total) / 64**2)
        except fddp.FddpError as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors, sums


def check_steps_with_nan(healthy: Any, failed: Any) -> None:
    assert healthy == ([], [4.0, 8.0, 12.0])
    (text,), sums = failed
    assert re.match(
        rf"TransformError: psum, called at {HERE}:\d+: jax_debug_nans or .* again", text
    )
    assert sums == [4.0, 12.0]


@pytest.mark.parametrize("nested", [False, True])
def test_debug_runs_of_one_rank_meet_no_other_reduction(nested: bool, ranks: RankPool) -> None:
    check_steps_with_nan(
        *fddp.loopback(2, lambda group: steps_with_nan(group.rank, group, nested=False))
    )
    check_steps_with_nan(*ranks.run(2, steps_with_nan_in_a_process, nested))


def steps_with_nan_in_a_process(rank: int, world_size: int, nested: bool) -> Any:
    return steps_with_nan(rank, nested=nested)


def test_one_rank_may_run_a_program_again() -> None:
    def on_rank(group: LoopbackGroup) -> None:
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"\(nan\).* in log"):
            jax.jit(lambda x: (psum(x, group), jnp.log(-x)))(1.0)

    fddp.loopback(1, on_rank)
