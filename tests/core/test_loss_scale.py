"""Loss scales that stay alike on all ranks: fddp's, and that of torch.amp.GradScaler."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fddp
from fddp.core.numerics.loss_scale import LossScale, next_loss_scale
from fddp.tree.pytree import flatten
from tests.support.models import rand, same_bits
from tests.support.on_ranks import on_threads

WIDTH, STEPS = 12, 50
OVERFLOWS = {3, 17, 18, 40}
"""Steps in which the gradients of rank 1, and of no other, overflow in float16."""


# The rule


def test_the_rule_is_that_of_grad_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.0)
    scale = LossScale(2.0**10)
    for step in range(40):
        all_finite = step % 7 not in (2, 3)
        assert scaler.get_scale() == scale.factor
        scaler.scale(torch.zeros(1))  # which makes its state
        param.grad = torch.full((1,), 1.0 if all_finite else math.inf)
        scaler.step(optimizer)
        scaler.update()
        scale = next_loss_scale(scale, all_finite, every=3)


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_scale_stays_within_its_bounds(steps: list[bool], every: int) -> None:
    scale = LossScale(4.0)
    for all_finite in steps:
        before, scale = (
            scale,
            next_loss_scale(scale, all_finite, every=every, least=1.0, most=64.0),
        )
        assert 1.0 <= scale.factor <= 64.0
        assert scale.streak < every
        assert all_finite or scale.factor <= before.factor
        assert not all_finite or scale.factor >= before.factor
    assert flatten(scale)[0] == list(scale)


@pytest.mark.parametrize(
    ("scale", "options", "text"),
    [
        (LossScale(0.0), {}, "the loss scale must be finite and above 0, got 0.0"),
        (LossScale(math.nan), {}, "the loss scale must be finite and above 0, got nan"),
        (LossScale(), {"backoff": 1.0}, "backoff between 0 and 1"),
        (LossScale(), {"every": 0}, "every at least 1"),
        (LossScale(2.0**-20), {}, "least=.*, got 9.5367431640625e-07"),
        (LossScale(2.0**30), {}, "most=.*, got 1073741824.0; start within"),
        (LossScale(), {"most": 64.0}, r"least=.* and most=64.0, got 65536\.0"),
    ],
)
def test_invalid_options_are_refused(scale: LossScale, options: dict[str, Any], text: str) -> None:
    for all_finite in True, False:
        with pytest.raises(ValueError, match=text):
            next_loss_scale(scale, all_finite, **options)


def test_all_finite_is_no_tensor() -> None:
    with pytest.raises(TypeError, match=r"must be a bool, got None; pass info\.all_finite"):
        next_loss_scale(LossScale(), None)  # type: ignore[arg-type]


def test_setting_a_scale_keeps_the_count() -> None:
    """Why the guide points to `next_loss_scale` for steps that are left out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.0)

    def good_step() -> None:
        scaler.scale(torch.zeros(1))
        param.grad = torch.ones(1)
        scaler.step(optimizer)
        scaler.update()

    scale = LossScale(8.0)
    for all_finite in (True, True, False, True):
        if all_finite:
            good_step()
        else:
            scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
        scale = next_loss_scale(scale, all_finite, every=3)
    assert (scaler.get_scale(), scale) == (8.0, LossScale(4.0, 1))


# On ranks


def inputs(rank: int, step: int) -> tuple[Tensor, Tensor]:
    x = rand(4, WIDTH, seed=1000 * rank + step, dtype=torch.float32)
    return x * (1e6 if rank == 1 and step in OVERFLOWS else 1.0), x.sum(1, keepdim=True)


def scaled_grads(params: dict[str, Tensor], rank: int, step: int, factor: float) -> Any:
    """Gradients of a scaled loss in float16."""
    x, y = inputs(rank, step)

    def loss(p: dict[str, Tensor]) -> Tensor:
        return ((x @ p["w"] + p["b"] - y).square().mean()) * factor

    return fddp.tree_map(lambda g: g.to(torch.float16), torch.func.grad(loss)(params))


def start() -> dict[str, Tensor]:
    return {"w": torch.zeros(WIDTH, 1), "b": torch.zeros(1)}


def half(tree: Any) -> Any:
    return fddp.tree_map(lambda leaf: leaf.to(torch.float16), tree)


def train_with_loss_scale(group: Any, policy: Any, algorithm: Any) -> Any:
    """50 steps with fddp's loss scale; what it was in each, and the parameters."""
    params, scale, factors = start(), LossScale(2.0**8), []
    options = {"algorithm": algorithm, "nonfinite": policy}
    with fddp.GradSync(half(params), group=group, **options) as sync:
        call = sync.reduce_scatter if algorithm == "reduce_scatter" else sync
        for step in range(STEPS):
            factors.append(scale.factor)
            grads, info = call(scaled_grads(params, group.rank, step, scale.factor), with_info=True)
            if info.all_finite:
                if algorithm == "reduce_scatter":
                    grads = sync.all_gather(grads)
                params = fddp.tree_map(
                    lambda p, g, f=scale.factor: p - 0.05 * (g.float() / f), params, grads
                )
            scale = next_loss_scale(scale, info.all_finite, every=10)
    return factors, params


@pytest.mark.parametrize(
    ("policy", "algorithm"),
    [("propagate", "all_reduce"), ("skip", "all_reduce"), ("skip", "reduce_scatter")],
)
def test_ranks_halve_and_skip_alike(policy: Any, algorithm: Any) -> None:
    runs = fddp.loopback(2, train_with_loss_scale, policy, algorithm)
    factors, params = runs[0]
    assert runs[1][0] == factors
    assert same_bits([params, runs[1][1]])
    halved = {s for s in range(STEPS - 1) if factors[s + 1] < factors[s]}
    assert halved == OVERFLOWS - {STEPS - 1}
    alone = start()  # one process, which knows all gradients
    for step, factor in enumerate(factors):
        if step not in OVERFLOWS:
            both = [scaled_grads(alone, rank, step, factor) for rank in range(2)]
            mean = fddp.tree_map(lambda a, b: a * 0.5 + b * 0.5, *both)
            alone = fddp.tree_map(lambda p, g, f=factor: p - 0.05 * (g.float() / f), alone, mean)
    assert same_bits([params, alone])
    assert (params["w"] - 1.0).abs().max() < 0.2


# torch.amp.GradScaler


def with_scaler(group: Any, algorithm: Any) -> Any:
    """Its scale in each step, whether it found infinity, and the parameters."""
    shards = algorithm == "reduce_scatter"
    options: Any = {"algorithm": algorithm, "nonfinite": "skip" if shards else "propagate"}
    found = []
    with fddp.GradSync(half(start()), group=group, **options) as sync:
        own = sync.shard(half(start())) if shards else start()
        params = {name: torch.nn.Parameter(leaf.float()) for name, leaf in own.items()}
        optimizer = torch.optim.SGD(params.values(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=10)
        for step in range(STEPS):
            scale = scaler.get_scale()
            scaler.scale(torch.zeros(1))
            held = {name: p.detach() for name, p in params.items()}
            whole = (
                fddp.tree_map(torch.Tensor.float, sync.all_gather(half(held))) if shards else held
            )
            grads = scaled_grads(whole, group.rank, step, scale)
            if shards:
                mean, info = sync.reduce_scatter(grads, with_info=True)
                if info.skipped:
                    scaler.update(scale * scaler.get_backoff_factor())
                    found.append((scale, 1.0))
                    continue
            else:
                mean = sync(grads)
            for name, param in params.items():
                param.grad = mean[name].float()
            scaler.unscale_(optimizer)
            found.append(
                (scale, sum(float(v) for v in scaler._found_inf_per_device(optimizer).values()))
            )
            scaler.step(optimizer)
            scaler.update()
        held = {name: p.detach() for name, p in params.items()}
        return found, sync.all_gather(half(held)) if shards else held


@pytest.mark.parametrize("algorithm", ["all_reduce", "reduce_scatter"])
def test_grad_scaler_finds_the_same_on_all_ranks(algorithm: Any) -> None:
    (found, params), (others, theirs) = fddp.loopback(2, with_scaler, algorithm)
    assert found == others
    assert same_bits([params, theirs])
    assert {step for step, (_, inf) in enumerate(found) if inf} == OVERFLOWS
    for step in range(STEPS - 1):
        assert (found[step + 1][0] < found[step][0]) == (step in OVERFLOWS)


@on_threads(2)
def test_ranks_diverge_over_shards_without_a_policy(group: Any) -> None:
    """An overflow shows only where the shard is that it is in."""
    grads = {"w": torch.tensor([1.0, 1.0, 1.0, 40000.0], dtype=torch.float16)}
    plan = fddp.plan_buckets(grads)
    schedule = fddp.make_schedule(plan, 2, algorithm="reduce_scatter", scaling="after")
    for policy, finite in (("propagate", group.rank == 0), ("skip", False)):
        with fddp.GradSync(schedule, group=group, nonfinite=policy) as sync:
            assert sync.reduce_scatter(grads, with_info=True)[1].all_finite is finite
