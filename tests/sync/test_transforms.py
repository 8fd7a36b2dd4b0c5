"""`fddp.as_transform`: the sync in chains of torchopt and optax, and its state in theirs."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torchopt
from flax import serialization
from torch import Tensor

import fddp
import fddp.jax
from fddp.hooks import power_sgd, top_k
from fddp.tree.pytree import flatten
from tests.support.endings import ending
from tests.support.models import Params, batch, largest_difference, mlp, mlp_loss, same_bits

SMALL = {"bucket_cap_mb": 0.0005, "first_bucket_mb": 0.0002}
WORLD_SIZE, STEPS = 2, 6

#: hooks that keep state, and none
HOOKS: dict[str, Callable[[], Any]] = {
    "no hook": lambda: None,
    "top_k": lambda: top_k(0.25),
    "power_sgd": lambda: power_sgd(rank=1),
}


def local_grads(params: Params, rank: int, step: int) -> Params:
    grads: Params = torch.func.grad(mlp_loss)(params, batch(rank, step))
    return grads


def apply(params: Params, updates: Params) -> Params:
    result: Params = torchopt.apply_updates(params, updates, inplace=False)
    return result


def chain(sync: fddp.GradSync) -> Any:
    return torchopt.chain(fddp.as_transform(sync), torchopt.adam(1e-2))


def train_with_chain(
    group: Any, hook: str, start: int, stop: int, saved: bytes | None, inplace: bool = False
) -> tuple[Params, Any, bytes]:
    """Some steps, from parameters and state as they were saved; those at the end."""
    params = mlp()
    with fddp.GradSync(params, group=group, hook=HOOKS[hook](), **SMALL) as sync:
        optimizer = chain(sync)
        if saved is None:
            state = optimizer.init(params)
        else:
            params, state = torch.load(io.BytesIO(saved), weights_only=False)
        for step in range(start, stop):
            updates, state = optimizer.update(
                local_grads(params, group.rank, step), state, params=params, inplace=inplace
            )
            params = apply(params, updates)
        file = io.BytesIO()
        torch.save((params, state), file)
        return params, state, file.getvalue()


@pytest.mark.parametrize("inplace", [False, True])
def test_a_chain_of_torchopt_is_that_of_one_process(inplace: bool) -> None:
    runs = fddp.loopback(WORLD_SIZE, train_with_chain, "no hook", 0, STEPS, None, inplace)
    params, optimizer = mlp(), torchopt.adam(1e-2)
    state = optimizer.init(params)
    for step in range(STEPS):
        grads = [local_grads(params, rank, step) for rank in range(WORLD_SIZE)]
        mean = fddp.tree_map(lambda *g: torch.stack(g).mean(0), *grads)
        updates, state = optimizer.update(mean, state, inplace=False)
        params = apply(params, updates)
    assert same_bits([params for params, _, _ in runs])
    assert largest_difference(runs[0][0], params) < 1e-12
    assert runs[0][1][0] == (), "there is no state to keep"


@pytest.mark.parametrize("hook", ["top_k", "power_sgd"])
def test_the_state_of_a_hook_is_the_optimizers(hook: str) -> None:
    """The chain does what a loop does that passes the hook's state on by hand."""

    def by_hand(group: Any) -> tuple[Params, Any]:
        params, optimizer = mlp(), torchopt.adam(1e-2)
        with fddp.GradSync(params, group=group, hook=HOOKS[hook](), **SMALL) as sync:
            rest, state = optimizer.init(params), sync.init_state()
            for step in range(STEPS):
                grads, state = sync.update(local_grads(params, group.rank, step), state)
                updates, rest = optimizer.update(grads, rest, inplace=False)
                params = apply(params, updates)
        return params, state

    runs = fddp.loopback(WORLD_SIZE, train_with_chain, hook, 0, STEPS, None)
    for (params, state, _), (expected, kept) in zip(
        runs, fddp.loopback(WORLD_SIZE, by_hand), strict=True
    ):
        assert same_bits([params, expected])
        assert same_bits([state[0], kept])
        assert any(leaf.abs().max() > 0 for leaf in flatten(kept)[0])


@pytest.mark.parametrize("hook", HOOKS)
def test_saved_run_resumes_bit_for_bit(hook: str) -> None:
    whole = fddp.loopback(WORLD_SIZE, train_with_chain, hook, 0, STEPS, None)
    halves = fddp.loopback(WORLD_SIZE, train_with_chain, hook, 0, STEPS // 2, None)

    def go_on(group: Any, forgetful: bool) -> tuple[Params, Any, bytes]:
        saved = halves[group.rank][2]
        if forgetful:
            params, state = torch.load(io.BytesIO(saved), weights_only=False)
            with fddp.GradSync(params, group=group, hook=HOOKS[hook](), **SMALL) as sync:
                state = (sync.init_state(), *state[1:])
            file = io.BytesIO()
            torch.save((params, state), file)
            saved = file.getvalue()
        return train_with_chain(group, hook, STEPS // 2, STEPS, saved)

    ends = fddp.loopback(WORLD_SIZE, go_on, False)
    for (params, state, _), (expected, wanted, _) in zip(ends, whole, strict=True):
        assert same_bits([params, expected])
        assert same_bits([state, wanted])
    if hook != "no hook":
        forgotten = fddp.loopback(WORLD_SIZE, go_on, True)
        assert not same_bits([forgotten[0][0], whole[0][0]]), "the state must matter"


def test_an_optimizer_object_of_torchopt() -> None:
    """`torchopt.Optimizer` hands its parameters over as a tuple."""

    def run(group: Any) -> list[Tensor]:
        torch.manual_seed(0)  # on threads: made before any rank continues
        leaves = [leaf.clone().requires_grad_() for leaf in flatten(mlp())[0]]
        treedef = flatten(mlp())[1]
        with fddp.GradSync(tuple(leaves), group=group, hook=top_k(0.25), **SMALL) as sync:
            optimizer = torchopt.Optimizer(leaves, chain(sync))
            for step in range(STEPS):
                optimizer.zero_grad()
                mlp_loss(treedef.unflatten(leaves), batch(group.rank, step)).backward()
                optimizer.step()
        return [leaf.detach() for leaf in leaves]

    runs = fddp.loopback(WORLD_SIZE, run)
    assert same_bits(runs)
    assert largest_difference(runs[0], flatten(mlp())[0]) > 1e-2


def test_inputs_are_not_written_and_results_may_be() -> None:
    def run(group: Any) -> None:
        grads = {"w": torch.arange(4.0) + group.rank}
        with fddp.GradSync(grads, group=group, hook=top_k(0.5)) as sync:
            init, update = fddp.as_transform(sync)
            state = init(grads)
            first, after = update(grads, state, params=grads, inplace=True)
            assert grads["w"].tolist() == [group.rank + i for i in range(4)]
            assert not state[0]["residual"].any()
            kept = first["w"].clone()
            second, _ = update(grads, after)
            assert torch.equal(first["w"], kept)
            assert torch.equal(second["w"], update(grads, after)[0]["w"]), "states are values"
            first["w"].mul_(0.0)

    fddp.loopback(2, run)


# Differentiable optimizers


def meta_gradient(params: Params, mean_of: Callable[[Any], Any], rows: list[Tensor]) -> Params:
    """Through two steps of gradient descent whose gradients are averaged by `mean_of`."""
    leaves, treedef = flatten(fddp.tree_map(lambda p: p.clone().requires_grad_(), params))
    impl = torchopt.chain(fddp.as_transform(mean_of), torchopt.sgd(0.3, moment_requires_grad=True))
    optimizer, adapted = torchopt.FuncOptimizer(impl), tuple(leaf.clone() for leaf in leaves)
    for _ in range(2):
        losses = [mlp_loss(treedef.unflatten(list(adapted)), x) for x in rows]
        adapted = optimizer.step(torch.stack(losses).mean(), adapted)
    judged = torch.stack([mlp_loss(treedef.unflatten(list(adapted)), x + 1.0) for x in rows])
    loss = mean_of({"loss": judged.mean()})["loss"]
    return treedef.unflatten(list(torch.autograd.grad(loss, leaves)))


def test_gradients_of_synced_gradients() -> None:
    """`fddp.pmean` in a chain, differentiated through: as one process on all data."""

    def run(group: Any) -> Params:
        def mean_of(tree: Any) -> Any:
            return fddp.pmean(tree, group)

        own = meta_gradient(mlp(), mean_of, [batch(group.rank, 0)])
        return fddp.pmean(own, group)

    expected = meta_gradient(mlp(), lambda tree: tree, [batch(rank, 0) for rank in range(2)])
    for result in fddp.loopback(2, run):
        assert largest_difference(result, expected) < 1e-12


# Mistakes


@pytest.mark.parametrize("sync", [None, 3, {"w": torch.ones(1)}])
def test_invalid_sync_is_refused(sync: Any) -> None:
    with pytest.raises(
        TypeError, match=f"a GradSync, or a function .* got a {type(sync).__name__}"
    ):
        fddp.as_transform(sync)


def test_parameters_of_another_tree() -> None:
    def run(group: Any) -> None:
        with fddp.GradSync({"w": torch.ones(2)}, group=group) as sync:
            init, _ = fddp.as_transform(sync)
            with pytest.raises(fddp.TreeMismatchError, match=r"missing.*'w'.*unexpected.*'v'"):
                init({"v": torch.ones(2)})
            flat = torchopt.chain.flat(fddp.as_transform(sync))  # makes lists of trees
            with pytest.raises(fddp.TreeMismatchError, match="'w'"):
                flat.init({"w": torch.ones(2)})

    fddp.loopback(2, run)


def test_a_state_that_does_not_fit_is_an_error_on_every_rank() -> None:
    def run(group: Any) -> tuple[str, str]:
        grads = {"w": torch.ones(4)}
        with fddp.GradSync(grads, group=group, hook=top_k(0.5), timeout_s=10.0) as sync:
            init, update = fddp.as_transform(sync)
            seen = ending(lambda: update(grads, () if group.rank else init(grads)))
            update(grads, init(grads))
            return seen.kinds[0], seen.text

    (peer, outcome), (own, message) = fddp.loopback(2, run)
    assert (peer, own) == ("PeerError", "TreeMismatchError")
    assert "a tuple of 1" in outcome
    assert "a tuple of 1" in message


# optax, on arrays of JAX


def jax_train(group: Any, hook: str, start: int, stop: int, saved: Any) -> tuple[Any, Any]:
    """As `train`, with optax on arrays of JAX."""

    def loss_fn(params: Any, x: Any) -> Any:
        for layer in params.values():
            x = jnp.tanh(x @ layer["weight"] + layer["bias"])
        return jnp.square(x).mean()

    params = jax.tree.map(lambda p: jnp.asarray(p.numpy()), mlp(dtype=torch.float32))
    with fddp.GradSync(params, group=group, hook=HOOKS[hook](), **SMALL) as sync:
        optimizer = optax.chain(fddp.as_transform(sync), optax.adam(1e-2))
        state = optimizer.init(params)
        if saved is not None:
            params, state = saved(params, state)
        for step in range(start, stop):
            x = jnp.asarray(batch(group.rank, step).float().numpy())
            updates, state = optimizer.update(jax.grad(loss_fn)(params, x), state, params)
            params = optax.apply_updates(params, updates)
    return params, state


def same_arrays(tree: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


def by_pickle(half: Any) -> Callable[..., Any]:
    data = pickle.dumps(half)
    return lambda *like: pickle.loads(data)


def by_flax(half: Any) -> Callable[..., Any]:
    data = serialization.to_bytes(half)
    return lambda *like: serialization.from_bytes(like, data)


@pytest.mark.parametrize("hook", ["no hook", "top_k"])
def test_optax_resumes_bit_for_bit(hook: str) -> None:
    whole = fddp.loopback(WORLD_SIZE, jax_train, hook, 0, STEPS, None)
    halves = fddp.loopback(WORLD_SIZE, jax_train, hook, 0, STEPS // 2, None)
    assert same_arrays(whole[0][0], whole[1][0])
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(whole))
    residuals = jax.tree.leaves([state[0] for _, state in whole])
    assert bool(residuals) == (hook == "top_k")
    assert all(bool(residual.any()) for residual in residuals)

    def go_on(group: Any, way: Callable[[Any], Any]) -> tuple[Any, Any]:
        return jax_train(group, hook, STEPS // 2, STEPS, way(halves[group.rank]))

    for way in (by_pickle, by_flax):
        for end, expected in zip(fddp.loopback(WORLD_SIZE, go_on, way), whole, strict=True):
            assert same_arrays(end, expected)


def test_optax_is_that_of_one_process() -> None:
    params = mlp(dtype=torch.float32)
    optimizer = torchopt.adam(1e-2)
    state = optimizer.init(params)
    for step in range(STEPS):
        grads = [
            torch.func.grad(mlp_loss)(params, batch(rank, step).float())
            for rank in range(WORLD_SIZE)
        ]
        mean = fddp.tree_map(lambda *g: torch.stack(g).mean(0), *grads)
        updates, state = optimizer.update(mean, state, inplace=False)
        params = apply(params, updates)
    for trained, _ in fddp.loopback(WORLD_SIZE, jax_train, "no hook", 0, STEPS, None):
        as_torch = jax.tree.map(lambda p: torch.from_numpy(np.array(p)), trained)
        assert largest_difference(as_torch, params) < 1e-5


def test_optax_hands_a_weight_on() -> None:
    def run(group: Any) -> list[float]:
        grads = {"w": jnp.full((2,), float(group.rank))}
        with fddp.GradSync(grads, group=group) as sync:
            weighted = optax.GradientTransformationExtraArgs(*fddp.as_transform(sync))
            optimizer = optax.chain(weighted, optax.sgd(1.0))
            state = optimizer.init(grads)
            updates, _ = optimizer.update(grads, state, grads, weight=1.0 + 2 * group.rank)
            result: list[float] = updates["w"].tolist()
            return result

    assert fddp.loopback(2, run) == [[-0.75, -0.75]] * 2


def test_a_rank_without_gradients_keeps_arrays() -> None:
    def run(group: Any) -> list[str]:
        grads = {"w": jnp.arange(4.0)}
        with fddp.GradSync(grads, group=group, hook=top_k(0.5)) as sync:
            init, update = fddp.as_transform(sync)
            state, kinds = init(grads), []
            for own in ({"w": None} if group.rank else grads, grads):
                mean, state = update(own, state, weight=1.0 - group.rank if own else 1.0)
                kinds += [type(leaf).__name__ for leaf in jax.tree.leaves((mean, state))]
            return kinds

    assert fddp.loopback(2, run) == [["ArrayImpl"] * 4] * 2


def test_a_chain_of_optax_within_jit_takes_the_operator() -> None:
    def run(group: Any) -> tuple[list[float], str]:
        grads = {"w": jnp.full((2,), 2.0 * group.rank)}
        mean_of = lambda tree: fddp.jax.pmean(tree, group)  # noqa: E731
        within = optax.chain(fddp.as_transform(mean_of), optax.sgd(1.0))
        updates, _ = jax.jit(within.update)(grads, within.init(grads))
        with fddp.GradSync(grads, group=group) as sync:
            outside = optax.chain(fddp.as_transform(sync), optax.sgd(1.0))
            with pytest.raises(fddp.TransformError, match="'w' of the gradients") as caught:
                jax.jit(outside.update)(grads, outside.init(grads))
            same, _ = outside.update(grads, outside.init(grads))
        assert same["w"].tolist() == updates["w"].tolist()
        return updates["w"].tolist(), str(caught.value)

    for result, text in fddp.loopback(2, run):
        assert result == [-1.0, -1.0]
        assert "fddp.jax.pmean" in text


def test_optax_may_not_decide_by_local_gradients() -> None:
    """A rank with a NaN would replace it by zeros, or leave the others alone, unless the sync is
    first."""

    def run(group: Any) -> list[str]:
        params = {"w": jnp.ones(2)}
        grads = {"w": jnp.array([jnp.nan if group.rank else 1.0, 1.0])}
        with fddp.GradSync(grads, group=group) as sync:
            mean = fddp.as_transform(sync)
            wrong: list[Any] = [
                optax.apply_if_finite(optax.chain(mean, optax.sgd(1.0)), 5),
                optax.MultiSteps(optax.chain(mean, optax.sgd(1.0)), 2),
                optax.conditionally_transform(mean, lambda step: step % 2 == 0),
                optax.conditionally_mask(mean, lambda step: step % 2 == 0),
            ]
            right = optax.chain(mean, optax.apply_if_finite(optax.sgd(1.0), 5))
            updates, _ = right.update(grads, right.init(params), params)
            assert updates["w"].tolist() == [0.0, 0.0]
            return [
                ending(lambda o=o: o.update(grads, o.init(params), params)).kinds[0] for o in wrong
            ]

    assert fddp.loopback(2, run) == [["TransformError"] * 4] * 2
