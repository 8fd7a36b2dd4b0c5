"""`sync.value_and_grad`: its arguments, its results, and whatever a loss function may do."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fddp
from fddp.sync import engine as engines
from fddp.sync.engine import Engine
from fddp.sync.step_handle import StepHandle
from tests.support.endings import Ending, ending
from tests.support.models import (
    Params,
    batch,
    largest_difference,
    mean_gradients,
    mlp,
    mlp_loss,
    rand,
)
from tests.support.ranks import RankPool

SMALL = {"bucket_cap_mb": 0.0005, "first_bucket_mb": 0.0002}


# Arguments


def scaled_loss(x: Tensor, p: Params, *, scale: float = 1.0) -> Tensor:
    return mlp_loss(p, x) * scale


@pytest.mark.parametrize("argnums", [1, -1, (1,), (0, 1), (1, 0)])
def test_argnums(argnums: Any) -> None:
    def run(group: Any) -> Any:
        args = (batch(group.rank, 0), mlp())
        tree = args[argnums] if isinstance(argnums, int) else tuple(args[i] for i in argnums)
        with fddp.GradSync(tree, group=group, **SMALL) as sync:
            return sync.value_and_grad(scaled_loss, argnums)(*args, scale=3.0)[1]

    expected = mean_gradients(
        lambda both, x: scaled_loss(both[0], both[1], scale=3.0) if x is None else 0.0,
        (batch(0, 0), mlp()),
        [(None,)],
        [1.0],
    )
    for grads in fddp.loopback(1, run):
        parts = (grads,) if isinstance(argnums, int) else grads
        chosen = (argnums,) if isinstance(argnums, int) else argnums
        assert isinstance(parts, tuple)
        for position, part in zip(chosen, parts, strict=True):
            assert largest_difference(part, expected[position]) < 1e-14


def test_the_four_shapes_of_a_result() -> None:
    def run(group: Any) -> None:
        def with_aux(p: Params, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
            loss = mlp_loss(p, x)
            hidden = torch.tanh(x @ p["layer0"]["weight"])
            return loss, {"hidden": [hidden], "loss": loss, "rank": group.rank, "no": None}

        x = batch(group.rank, 0)
        with fddp.GradSync(mlp(), group=group) as sync:
            loss, grads = sync.value_and_grad(mlp_loss)(mlp(), x)
            loss_, grads_, info = sync.value_and_grad(mlp_loss, with_info=True)(mlp(), x)
            (_, aux), _ = sync.value_and_grad(with_aux, has_aux=True)(mlp(), x)
            (_, aux_), _, info_ = sync.value_and_grad(with_aux, has_aux=True, with_info=True)(
                mlp(), x
            )
        assert torch.equal(loss, loss_)
        assert largest_difference(grads, grads_) == 0.0
        assert not loss.requires_grad
        for found in (aux, aux_):
            hidden = found.pop("hidden")[0]
            assert torch.equal(hidden, torch.tanh(x @ mlp()["layer0"]["weight"]))
            assert found == {"loss": loss, "rank": group.rank, "no": None}
            assert not hidden.requires_grad
            assert not found["loss"].requires_grad, "what comes back is detached"
        assert (info.step, info_.step) == (1, 3)

    fddp.loopback(2, run)


def test_weight_fn_receives_the_arguments_of_the_loss_function() -> None:
    def run(group: Any) -> None:
        seen = []

        def weight(*args: Any, **kwargs: Any) -> float:
            seen.append((len(args), sorted(kwargs)))
            return 1.0

        with fddp.GradSync(mlp(), group=group) as sync:
            step = sync.value_and_grad(
                lambda p, x, y, scale=1.0: mlp_loss(p, x) * scale, weight_fn=weight
            )
            step(mlp(), batch(0, 0), 5)
        assert seen == [(3, [])]

    fddp.loopback(1, run)


def test_accumulated_gradients_of_no_weight_do_not_count() -> None:
    """As gradients of a step with weight 0: no leaf is used for their sake."""

    def run(group: Any) -> Any:
        params = {"a": torch.ones(()), "b": torch.ones(())}
        nothing = {"a": torch.tensor(math.nan), "b": torch.tensor(math.nan)}
        with fddp.GradSync(params, group=group) as sync:
            step = sync.value_and_grad(lambda p: p["a"] * 3.0)
            return step(params, accumulated=(nothing, 0.0))[1]

    assert fddp.loopback(2, run) == [{"a": torch.tensor(3.0), "b": None}] * 2


# Info of a step


def test_info() -> None:
    def loss_fn(p: dict[str, Tensor], value: float) -> Tensor:
        return (p["a"] * value).sum() + (p["b"] * 2.0).sum()

    params = {
        "a": torch.zeros(3, dtype=torch.float64),
        "b": torch.zeros(2, dtype=torch.float64),
        "c": torch.zeros(2, dtype=torch.float64),
        "own": torch.zeros(1, dtype=torch.float64),
        "step": torch.tensor(0),
    }

    def run(group: Any) -> Any:
        with fddp.GradSync(params, group=group, select=lambda path: path != "own", **SMALL) as sync:
            step = sync.value_and_grad(
                loss_fn, with_info=True, weight_fn=lambda p, value: 1.0 + group.rank
            )
            return [step(params, float(group.rank)) for _ in range(2)], sync.plan

    runs = fddp.loopback(3, run)
    for results, plan in runs:
        for number, (_, grads, info) in enumerate(results):
            assert (info.step, info.world_size, info.active) == (number, 3, 3)
            assert info.total_weight == 6.0
            assert info.used == ("a", "b")
            assert info.unused == ("c",)
            assert info.all_finite
            assert info.repaired == ()
            assert info.transport == "loopback"
            # a: (0 * 1 + 1 * 2 + 2 * 3) / 6 = 4 / 3 in three elements, b: 2 in two.
            assert info.grad_norm == pytest.approx(math.sqrt(3 * 16 / 9 + 2 * 4), rel=1e-12)
            assert grads["c"] is None
            times = info.timeline
            assert times.backward_start_s <= times.backward_end_s <= times.end_s
            assert [times_.bucket for times_ in times.buckets] == list(range(len(plan.buckets)))
            for times_ in times.buckets:
                assert times.backward_start_s <= times_.ready_s <= times_.launch_s
                assert times_.launch_s <= times_.done_s <= times.end_s
            assert sum(times_.nbytes for times_ in times.buckets) == 7 * 8
            assert 0.0 <= times.hidden_fraction <= 1.0
            assert times.exposed_s >= 0.0
    for number in range(2):
        infos = [results[number][2] for results, _ in runs]
        assert len({info.grad_norm for info in infos}) == 1


# What a loss function may do


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def with_backward_inside(p: Params, x: Tensor) -> Tensor:
    """The inner one does not count."""
    mlp_loss(p, 2 * x).backward()
    return mlp_loss(p, x)


def of_complex_numbers(p: Params, x: Tensor) -> Tensor:
    return (x.to(torch.complex128) @ p["z"].conj().T * 1j).abs().sum() + (x * p["w"]).sum()


def with_expanded_and_shared_gradients(p: Params, x: Tensor) -> Tensor:
    """sum() hands out expanded gradients; a and c get one tensor."""
    return (p["a"] + p["c"]).sum() * x.mean() + p["b"].sum() + p["a"].T.sum()


def with_a_hook_that_clamps(p: Params, x: Tensor) -> Tensor:
    weight = p["layer0"]["weight"]
    if weight.requires_grad:
        weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return mlp_loss(p, x)


LOSSES: dict[str, tuple[Any, Any]] = {
    "a hook": (mlp(), with_a_hook_that_clamps),
    "backward inside": (mlp(), with_backward_inside),
    "a custom function": (mlp(), lambda p, x: Cube.apply(mlp_loss(p, x)) + mlp_loss(p, x)),
    "complex": (
        {"z": rand(3, 8, seed=0, dtype=torch.complex128), "w": rand(8, seed=1)},
        of_complex_numbers,
    ),
    "expanded and shared": (
        {"a": rand(4, 5, seed=0), "b": rand(5, seed=1), "c": rand(4, 5, seed=2)},
        with_expanded_and_shared_gradients,
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_mean_of_any_loss(name: str) -> None:
    params, loss_fn = LOSSES[name]
    alike = mlp_loss if loss_fn is with_backward_inside else loss_fn

    def run(group: Any) -> list[Any]:
        with fddp.GradSync(params, group=group, **SMALL) as sync:
            step = sync.value_and_grad(loss_fn)
            return [step(params, batch(group.rank, number)) for number in range(2)]

    runs = fddp.loopback(3, run)
    for number in range(2):
        inputs = [(batch(rank, number),) for rank in range(3)]
        expected = mean_gradients(alike, params, inputs, [1.0] * 3)
        for rank, results in enumerate(runs):
            loss, grads = results[number]
            own = fddp.tree_map(lambda p: p.clone().requires_grad_(), params)
            assert largest_difference(grads, expected) < 1e-12
            assert torch.allclose(loss, alike(own, *inputs[rank]).detach(), rtol=1e-12)


def test_a_loss_that_is_a_parameter_and_one_that_is_a_constant() -> None:
    def run(group: Any) -> Any:
        params = {"s": torch.tensor(2.0), "w": torch.ones(2)}
        with fddp.GradSync(params, group=group) as sync:
            itself = sync.value_and_grad(lambda p: p["s"])(params)
            constant = sync.value_and_grad(lambda p: torch.tensor(5.0))(params)
            only_one = sync.value_and_grad(
                lambda p: p["s"] * 3.0 if group.rank else torch.tensor(5.0)
            )(params)
            return itself, constant, only_one

    for itself, constant, only_one in fddp.loopback(2, run):
        assert itself[0].item() == 2.0
        assert itself[1] == {"s": torch.tensor(1.0), "w": None}
        assert constant[1] == {"s": None, "w": None}
        assert only_one[1] == {"s": torch.tensor(1.5), "w": None}


def test_functions_of_one_sync_take_turns() -> None:
    """Arrival orders learned from one function do not affect the other."""
    names = [f"layer{i}" for i in range(4)]

    def using(chosen: list[str]) -> Any:
        def loss_fn(p: Params, x: Tensor) -> Tensor:
            return mlp_loss({name: p[name] for name in chosen}, x)

        return loss_fn

    losses = [using(names), using(names[:1]), using(names[::-1]), using(names[2:]), using([])]

    def run(group: Any) -> list[Any]:
        with fddp.GradSync(mlp(), group=group, **SMALL) as sync:
            steps = [sync.value_and_grad(loss_fn) for loss_fn in losses]
            order = [0, 1, 2, 3, 4, 0, 3, 1, 4, 2]
            return [(n, steps[n](mlp(), batch(group.rank, 0))[1]) for n in order]

    inputs = [(batch(rank, 0),) for rank in range(3)]
    for results in fddp.loopback(3, run):
        for number, grads in results:
            expected = mean_gradients(losses[number], mlp(), inputs, [1.0] * 3)
            assert largest_difference(grads, expected) < 1e-12


def test_an_error_in_an_inner_call_ends_the_outer_one_on_all_ranks() -> None:
    def run(group: Any) -> Any:
        with fddp.GradSync({"w": torch.ones(2)}, group=group, timeout_s=5.0) as sync:

            def loss_fn(p: dict[str, Tensor], weight: float) -> Tensor:
                sync(p, weight=weight)
                return p["w"].sum()

            step = sync.value_and_grad(loss_fn)
            with pytest.raises(fddp.FddpError, match="got -1") as caught:
                step({"w": torch.ones(2)}, -1.0 if group.rank else 1.0)
            after = step({"w": torch.ones(2)}, 1.0)[1]["w"].tolist()
            return type(caught.value).__name__, after

    assert fddp.loopback(2, run) == [("PeerError", [1.0, 1.0]), ("WeightError", [1.0, 1.0])]


def close_in_the_loss(rank: int, world_size: int) -> list[Ending]:
    def loss_fn(p: Params) -> Tensor:
        sync.close()
        return p["w"].sum()

    params: Any = {"w": torch.ones(3)}
    sync = fddp.GradSync(params, transport="shm")
    step = sync.value_and_grad(loss_fn)
    return [ending(lambda: step(params)) for _ in range(2)]


def test_a_step_that_outlives_its_sync_is_closed(ranks: RankPool) -> None:
    for ends in ranks.run(2, close_in_the_loss):
        for end in ends:
            assert end.kinds[0] == "ClosedError"
            assert end.text.startswith(
                "this GradSync, or its owner, is closed (close() was called)"
            )


# Interruptions, as by a signal handler, just after a function has returned.
PLACES: list[tuple[Any, str, bool]] = [
    (Engine, "open", False),  # before the step was begun
    (Engine, "open", True),
    (Engine, "start", False),  # before it is finished
    (Engine, "start", True),  # before its handle is made
    (StepHandle, "send", True),
    (engines, "finish_step", False),  # before its results are returned
    (engines, "finish_step", True),
]


@pytest.mark.parametrize(("owner", "name", "is_started"), PLACES)
def test_an_interrupted_step_is_ended(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, is_started: bool
) -> None:
    """Otherwise the other ranks would wait, or ranks would take different next steps."""
    function, interrupted = getattr(owner, name), list[int]()

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if threading.get_ident() in interrupted:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, interrupt)

    def run(group: Any) -> list[Ending]:
        params = {"w": torch.ones(3)}
        with fddp.GradSync(params, group=group, timeout_s=20.0) as sync:
            if group.rank == 1:
                interrupted.append(threading.get_ident())
            ends = []
            for _ in range(2):
                call = (lambda: sync.start(params).wait()) if is_started else (lambda: sync(params))
                ends.append(ending(call))
            assert not sync._engine.is_in_step
            return ends

    others, own = fddp.loopback(2, run)
    assert [end.kinds[0] for end in own] == ["KeyboardInterrupt", "ClosedError"]
    assert {end.kinds[0] for end in others} <= {"no error", "RankLostError", "ClosedError"}
    assert any("lost rank 1" in end.text for end in others)


def test_a_step_ends_once() -> None:
    with fddp.loopback(1, lambda group: fddp.GradSync({"w": torch.ones(3)}, group=group))[
        0
    ] as sync:
        engine = sync._engine
        with engine.collect_steps() as steps:
            sync({"w": torch.ones(3)})
        with pytest.raises(fddp.errors.InternalError, match="step 0 was finished a second time"):
            engine.finish(steps[0])
        assert not engine.last_failed
        assert sync({"w": torch.ones(3)})["w"].tolist() == [1.0] * 3


def test_earlier_micro_batches_count_once_beside_late_gradients() -> None:
    """Each further use of `w` gives a gradient of its own, late where the step before had fewer."""

    def loss(p: Any, uses: int) -> Tensor:
        y = p["a"] * 1
        for _ in range(uses):
            y = checkpoint(lambda v: v * p["w"], y, use_reentrant=True)
        return y.sum()

    def run(group: Any) -> None:
        params = {"a": torch.full((2,), 2.0), "w": torch.full((2,), 3.0)}
        earlier = fddp.tree_map(lambda p: torch.full_like(p, 10.0), params)
        with fddp.GradSync(params, group=group, bucket_cap_mb=1e-6, first_bucket_mb=1e-6) as sync:
            step = sync.value_and_grad(loss, with_info=True)
            for uses, repaired in (1, False), (2, True), (3, True), (3, False):
                _, grads, info = step(params, uses, accumulated=(earlier, 1.0))
                own = 2.0 * uses * 3.0 ** (uses - 1)
                assert grads["w"].tolist() == [(own + 10.0) / 2] * 2
                assert bool(info.repaired) == repaired

    fddp.loopback(2, run)
