"""Reductions over ranks inside of compiled programs of JAX."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.core import FrozenDict, freeze
from hypothesis import given
from hypothesis import strategies as st

import fddp
from fddp.collectives import compiled_calls
from fddp.jax import grad_sync, named_errors, pmean, psum
from fddp.transport import LoopbackGroup
from tests.support.examples import examples, scaled
from tests.support.jax_programs import BODIES, transforms
from tests.support.ranks import RankPool

LENGTH = 3
SAMPLE = ("plain", "scanned", "tree")  # of `make test`; the others run in `make nightly`


def arrays_of(world_size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(world_size, LENGTH))


# Derivatives, on processes


@pytest.mark.parametrize(
    "name",
    [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.nightly) for name in BODIES],
)
def test_derivatives_are_those_of_jax_over_an_axis(name: str, ranks: RankPool) -> None:
    found = ranks.run(2, derivatives_of, name)
    xs, ts = arrays_of(2), arrays_of(2, seed=1)
    with jax.enable_x64(True):
        theirs = jax.jit(
            jax.vmap(
                lambda x, t: transforms(
                    lambda y: BODIES[name](lambda z: REDUCTIONS[name](z, "ranks"), y), x, t
                ),
                axis_name="ranks",
            )
        )(xs, ts)
    for rank, ours in enumerate(found):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            wanted = np.asarray(theirs[key])[rank]
            np.testing.assert_allclose(value, wanted, rtol=1e-12, atol=1e-12, err_msg=key)


REDUCTIONS = {
    name: jax.lax.pmean if name in ("scanned", "mapped") else jax.lax.psum for name in BODIES
}


def derivatives_of(rank: int, world_size: int, name: str) -> dict[str, np.ndarray]:
    """All that `transforms` gives, compiled."""
    own = {jax.lax.psum: psum, jax.lax.pmean: pmean}[REDUCTIONS[name]]
    with jax.enable_x64(True), named_errors():
        compiled = jax.jit(lambda x, t: transforms(lambda y: BODIES[name](own, y), x, t))
        found = compiled(arrays_of(world_size)[rank], arrays_of(world_size, seed=1)[rank])
        return {key: np.asarray(value) for key, value in found.items()}


def test_grad_sync_gives_the_gradient_of_the_mean_loss(ranks: RankPool) -> None:
    assert max(ranks.run(2, grad_sync_beside_the_mean)) < 1e-12


def grad_sync_beside_the_mean(rank: int, world_size: int) -> float:
    xs = arrays_of(world_size)
    params = {"w": jnp.array([0.5, -1.0, 2.0]), "n": jnp.array(3), "none": None}
    with jax.enable_x64(True), named_errors():

        def own_loss(w: Any, x: Any) -> Any:
            synced = grad_sync({**params, "w": w})
            return (jnp.sin(synced["w"] * x) * synced["n"]).sum()

        def mean_loss(w: Any) -> Any:
            return jnp.mean(jnp.stack([(jnp.sin(w * x) * 3).sum() for x in xs]))

        w, t = jnp.asarray(xs[0]), jnp.asarray(xs[1])
        local, grads = jax.jit(jax.value_and_grad(own_loss))(w, xs[rank])
        tangent = jax.jit(lambda w, t: jax.jvp(lambda w: own_loss(w, xs[rank]), (w,), (t,))[1])(
            w, t
        )
        second = jax.jit(jax.jacrev(jax.grad(own_loss)))(w, xs[rank])
        plain = jax.value_and_grad(lambda w: (jnp.sin(w * xs[rank]) * 3).sum())(w)
        return max(
            float(np.abs(np.asarray(ours) - np.asarray(wanted)).max())
            for ours, wanted in (
                (local, plain[0]),
                (grads, jax.grad(mean_loss)(w)),
                # Tangents pass as they are: this rank's own.
                (tangent, plain[1] @ t),
                # The gradient that is differentiated again is the mean, by its own transpose.
                (second, jax.hessian(mean_loss)(w)),
            )
        )


# Order and effects


def test_two_reductions_in_one_program_never_mix(ranks: RankPool) -> None:
    assert ranks.run(3, wrong_steps, scaled(100)) == [[]] * 3


def wrong_steps(rank: int, world_size: int, steps: int) -> list[int]:
    """Steps that gave another sum than theirs; all are started before any is awaited."""

    @jax.jit
    def both(k: Any) -> tuple[Any, Any]:
        # Of one shape, so that a mix-up would not show in sizes.
        first = psum(k * 2 + rank)
        second = psum(-k * 3 - rank)
        psum(k * 1000 + rank)  # unused
        return second, first

    @jax.jit
    def one(k: Any) -> Any:
        psum({"unused": -k, "other": jnp.ones(2)})
        return psum(k * 5 + rank)

    both(0), one(0)  # compiled
    with named_errors():
        # Nothing but the effect keeps one program behind the other.
        pairs = [(both(k), one(k)) for k in range(steps)]
    ranks = sum(range(world_size))
    return [
        k
        for k, ((second, first), third) in enumerate(pairs)
        if (int(first), int(second), int(third))
        != (
            world_size * 2 * k + ranks,
            -world_size * 3 * k - ranks,
            world_size * 5 * k + ranks,
        )
    ]


def test_each_reduction_runs_once_where_it_was_traced(ranks: RankPool) -> None:
    assert ranks.run(2, reductions_that_ran) == [WANTED_REDUCTIONS] * 2


WANTED_REDUCTIONS = {
    "unused": ["psum a", "psum b"],
    "swapped": ["psum first", "psum second"],
    "loop": ["psum in", "psum in", "psum in"],
    "untaken": [],
    "gradient": ["psum in", "backward of psum in"],
    "checkpointed": ["psum in", "backward of psum in"],
    "batched": ["psum in"],
    "of equal values": ["psum in", "psum in"],
    "grad_sync": ["backward of pmean w"],
}


def reductions_that_ran(rank: int, world_size: int) -> dict[str, list[str]]:
    """Of programs whose results or order might tempt a compiler."""
    x = jnp.arange(3.0)

    def named(name: str, value: Any) -> Any:
        return psum({name: value})[name]

    def unused(x: Any) -> Any:
        named("a", x)
        named("b", x + 1)
        return x

    def swapped(x: Any) -> Any:
        first = named("first", x)
        second = named("second", 2 * x)
        return second - first

    programs: dict[str, Any] = {
        "unused": unused,
        "swapped": swapped,
        "loop": lambda x: jax.lax.fori_loop(0, 3, lambda _, y: named("in", y), x),
        "untaken": lambda x: jax.lax.cond(x.sum() < 0, lambda y: named("in", y), lambda y: y, x),
        "gradient": jax.grad(lambda x: named("in", x).sum()),
        "checkpointed": jax.grad(
            lambda x: jax.checkpoint(lambda y: jnp.sin(named("in", jnp.sin(y))).sum())(x)
        ),
        "batched": jax.vmap(lambda x: named("in", x)),
        "of equal values": lambda x: named("in", x) + named("in", x),
        "grad_sync": jax.grad(lambda w: (grad_sync({"w": w, "unused": w})["w"] * x).sum()),
    }
    ran: list[str] = []
    kept = compiled_calls.run_eagerly

    def noted(call: Any, leaves: Any) -> Any:
        roles = "".join(f"{role} of " for role in reversed(call.roles))
        ran.append(f"{roles}{call.program.operator} {call.program.units[0].path}")
        return kept(call, leaves)

    compiled_calls.run_eagerly = noted  # type: ignore[assignment]
    found = {}
    try:
        for name, program in programs.items():
            compiled = jax.jit(program)
            with named_errors():
                compiled(x)
                ran.clear()
                compiled(x)
            found[name] = list(ran)
    finally:
        compiled_calls.run_eagerly = kept
    found["grad_sync"] = [text.replace("unused", "w") for text in found["grad_sync"]]
    return found


def test_programs_and_operators_on_tensors_do_not_wait_for_each_other(ranks: RankPool) -> None:
    assert ranks.run(2, interleaved) == [True, True]


def interleaved(rank: int, world_size: int) -> bool:
    """Ranks await their programs at different times, with operators on tensors in between."""
    step = jax.jit(lambda x: psum(jax.lax.fori_loop(0, 5, lambda _, y: pmean(y), x)))
    right = True
    for k in range(20):
        with named_errors():
            started = step(jnp.full(4, float(k)))
            if (k + rank) % 2:
                started.block_until_ready()
            summed = fddp.psum(torch.tensor([k]))
            right &= summed.item() == 2 * k and bool((started == 2 * k).all())
    return right


def test_donated_arguments(ranks: RankPool) -> None:
    assert ranks.run(2, sums_of_donated) == [[2.0, 4.0, 8.0, 16.0]] * 2


def sums_of_donated(rank: int, world_size: int) -> list[float]:
    step = jax.jit(lambda x: psum({"x": x})["x"], donate_argnums=0)
    x, found = jnp.ones(1000), []
    with named_errors():
        for _ in range(4):
            x = step(x)
            found.append(float(x[-1]))
    return found


# Values, on threads


@given(
    dtypes=st.lists(
        st.sampled_from(["float32", "int32", "float16", "bfloat16", "complex64", "uint8"]),
        min_size=1,
        max_size=4,
    ),
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=2).map(tuple), min_size=4, max_size=4),
    world_size=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
@examples(8)
def test_sums_are_those_of_numpy(
    dtypes: list[str], shapes: list[tuple[int, ...]], world_size: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    # Small whole numbers, whose sums all dtypes hold.
    values = [
        [rng.integers(0, 9, size=shape) for shape in shapes[: len(dtypes)]]
        for _ in range(world_size)
    ]

    def tree_of(group: LoopbackGroup) -> list[Any]:
        leaves = zip(values[group.rank], dtypes, strict=True)
        return [jnp.asarray(value, dtype=dtype) for value, dtype in leaves]

    def summed(group: LoopbackGroup) -> list[Any]:
        with named_errors():
            return jax.jit(lambda tree: psum(tree, group))(tree_of(group))

    for found in fddp.loopback(world_size, summed):
        for leaf, dtype, *terms in zip(found, dtypes, *values, strict=True):
            assert leaf.dtype.name == dtype
            np.testing.assert_array_equal(np.asarray(leaf).astype(complex), sum(terms))


def test_programs_compiled_ahead_of_time() -> None:
    def sums(group: LoopbackGroup) -> list[float]:
        program = jax.jit(lambda x: (psum(x, group), psum(2 * x, group)))
        with named_errors():
            compiled = program.lower(1.0).compile()
            return [float(x) for x in (*compiled(3.0), *program(1.0), *compiled(4.0))]

    assert fddp.loopback(2, sums) == [[6.0, 12.0, 2.0, 4.0, 8.0, 16.0]] * 2


def test_tracing_takes_no_other_rank() -> None:
    def traced(group: LoopbackGroup) -> Any:
        if group.rank == 0:
            return jax.eval_shape(jax.grad(lambda x: psum(x, group)), 1.0).shape
        return None

    assert fddp.loopback(2, traced) == [(), None]


def test_same_bits_as_the_operator_on_tensors() -> None:
    def both(group: LoopbackGroup) -> tuple[Any, Any]:
        rng = np.random.default_rng(group.rank)
        values = {f"p{i}": rng.normal(size=(i + 1, 5)).astype(np.float32) for i in range(12)}
        with named_errors(), fddp.Communicator(group, bucket_cap_mb=1e-4) as ranks:
            compiled = jax.jit(lambda tree: pmean(tree, ranks))(values)
        on_tensors = fddp.pmean({k: torch.from_numpy(v) for k, v in values.items()}, group)
        return compiled, on_tensors

    for compiled, on_tensors in fddp.loopback(3, both):
        for path, value in on_tensors.items():
            np.testing.assert_array_equal(np.asarray(compiled[path]), value.numpy())


def test_along_one_axis_of_a_mesh(ranks: RankPool) -> None:
    wanted = [[3.0, 15.0], [3.0, 15.0], [12.0, 15.0], [12.0, 15.0]]
    assert ranks.run(4, sums_along_axes) == wanted


def sums_along_axes(rank: int, world_size: int) -> list[float]:
    mesh = fddp.Topology(host=2, local=2)

    @jax.jit
    def step(x: Any) -> list[Any]:
        return [psum(x, mesh=mesh, axis="local"), psum(x, mesh=mesh, axis=("local", "host"))]

    with named_errors():
        return [float(x) for x in step(2.0**rank)]


def calls_of(program: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the reductions of a program, which is traced only."""
    equations = jax.make_jaxpr(program)(*args).jaxpr.eqns
    return [equation.params["call"] for equation in equations if "call" in equation.params]


def test_each_mesh_of_a_group_has_its_own_channel() -> None:
    def channels(group: LoopbackGroup) -> list[int]:
        mesh = fddp.Topology(host=2, local=1)
        calls = calls_of(
            lambda x: [
                psum(x, group),
                psum(x, group, mesh=mesh, axis="host"),
                pmean(x, group, mesh=mesh, axis="local"),
                pmean(x, group),
            ],
            1.0,
        )
        return [call.channel for call in calls]

    for first, along_host, along_local, last in fddp.loopback(2, channels):
        assert first == last != along_host == along_local


def test_the_order_of_axis_names_does_not_matter() -> None:
    """Ranks that name two of three axes in different orders are in one reduction."""
    mesh = fddp.Topology(a=2, b=1, c=1)

    def axes(group: LoopbackGroup) -> list[tuple[str, ...]]:
        first, second = ("a", "b") if group.rank else ("b", "a"), ["c", "b"]
        calls = calls_of(
            lambda x: psum(psum(x, group, mesh=mesh, axis=first), group, mesh=mesh, axis=second),
            1.0,
        )
        return [call.axes for call in calls]

    assert fddp.loopback(2, axes) == [[("a", "b"), ("b", "c")]] * 2


def test_tangents_keep_the_paths_of_their_leaves() -> None:
    """Integers have none, so that a tangent has fewer leaves than its value."""

    def paths(group: LoopbackGroup) -> list[tuple[str, ...]]:
        def total(w: Any) -> Any:
            return psum({"n": 3, "w": w}, group)

        return [call.paths for call in calls_of(lambda w: jax.jvp(total, (w,), (w,)), 1.0)]

    assert fddp.loopback(1, paths) == [[("n", "w"), ("w",)]]


def test_grad_sync_averages_no_integers() -> None:
    def paths(group: LoopbackGroup) -> list[tuple[str, ...]]:
        def loss(w: Any) -> Any:
            return grad_sync({"n": 3, "w": w}, group)["w"] * 2.0

        return [call.paths for call in calls_of(jax.grad(loss), 1.0)]

    assert fddp.loopback(1, paths) == [[("w",)] * 2]  # forward and backward


def test_batches_along_any_axis() -> None:
    """Of one leaf, beside one that is the same for all examples."""

    def summed(group: LoopbackGroup) -> Any:
        batched = jax.vmap(
            lambda x: psum({"own": x, "same": jnp.ones(2)}, group),
            in_axes=1,
            out_axes={"own": 1, "same": None},
        )
        with named_errors():
            return jax.jit(batched)(jnp.arange(6.0).reshape(2, 3) * (1 + group.rank))

    for found in fddp.loopback(2, summed):
        assert found["own"].tolist() == [[0.0, 3.0, 6.0], [9.0, 12.0, 15.0]]
        assert found["same"].tolist() == [2.0, 2.0]


def test_modules_of_other_libraries_are_trees() -> None:
    def gradients(group: LoopbackGroup) -> tuple[Any, Any, Any]:
        model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
        arrays, rest = eqx.partition(model, eqx.is_array)

        def loss(arrays: Any, x: Any) -> Any:
            return (eqx.combine(grad_sync(arrays, group), rest)(x) ** 2).sum()

        with named_errors():
            grads = jax.jit(jax.grad(loss))(arrays, jnp.ones(2) * group.rank)
            frozen = jax.jit(lambda tree: psum(tree, group))(freeze({"a": {"b": jnp.ones(2)}}))
        own = [
            jax.grad(lambda a, k=k: (eqx.combine(a, rest)(jnp.ones(2) * k) ** 2).sum())(arrays)
            for k in range(2)
        ]
        return grads, frozen, jax.tree.map(lambda *g: sum(g) / 2, *own)

    for grads, frozen, wanted in fddp.loopback(2, gradients):
        assert type(grads) is type(wanted) is eqx.nn.MLP
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), grads, wanted)
        assert isinstance(frozen, FrozenDict)
        assert frozen["a"]["b"].tolist() == [2.0, 2.0]


def test_while_loops_and_numbers_and_none() -> None:
    def counted(group: LoopbackGroup) -> tuple[Any, ...]:
        with named_errors():
            looped = jax.jit(
                lambda n: jax.lax.while_loop(lambda n: n < 20, lambda n: psum(n + 1, group), n)
            )(group.rank * 0)
            tree = psum({"n": 2, "x": np.ones(1, np.float32), "none": None}, group)
        return int(looped), int(tree["n"]), float(tree["x"][0]), tree["none"]

    assert fddp.loopback(2, counted) == [(30, 4, 2.0, None)] * 2


def test_custom_derivatives_around_a_reduction() -> None:
    def gradient(group: LoopbackGroup) -> float:
        @jax.custom_vjp
        def summed(x: Any) -> Any:
            return psum(x, group)

        summed.defvjp(lambda x: (psum(x, group), x), lambda x, ct: (psum(ct * x, group),))
        with named_errors():
            return float(jax.jit(jax.grad(lambda x: summed(x) * 10.0))(1.0 + group.rank))

    assert fddp.loopback(2, gradient) == [30.0, 30.0]


def test_a_program_and_tensors_meet_on_one_communicator() -> None:
    """A rank in torch and a rank in JAX: operators, trees, buckets and derivatives are the same."""

    def gradients(group: LoopbackGroup) -> list[float]:
        numbers = [1.0 + group.rank, 2.0, 4.0 * group.rank]
        with fddp.Communicator(group) as ranks, named_errors():
            if group.rank:
                tree: Any = {"b": list(map(jnp.float32, numbers[:2])), "a": jnp.float32(numbers[2])}
                grads = jax.jit(jax.grad(lambda t: squares(pmean(t, ranks))))(tree)
            else:
                tree = {"a": torch.tensor(numbers[2]), "b": [torch.tensor(x) for x in numbers[:2]]}
                grads = torch.func.grad(lambda t: squares(fddp.pmean(t, ranks)))(tree)
            return [float(grads["a"]), *map(float, grads["b"])]

    def squares(tree: Any) -> Any:
        return tree["a"] ** 2 + tree["b"][0] ** 2 + tree["b"][1] ** 2

    assert fddp.loopback(2, gradients) == [[4.0, 3.0, 4.0]] * 2
