"""Bytes, bound on the error, error feedback and non-finite values of `int8` and `int4`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fddp
from fddp.hooks import error_feedback, int4, int8
from tests.hooks.one_leaf import random_inputs, run_leaf
from tests.support.collectives import record_issued
from tests.support.groups import rank_of
from tests.support.hook_models import name_of, steps
from tests.support.models import same_bits
from tests.support.on_ranks import on_threads
from tests.support.ranks import Launch

#: bytes that each rank sends for each byte of an operation's tensor, times ranks / (ranks - 1)
SENT = {"all_reduce": 2, "reduce_scatter": 1, "all_to_all": 1, "all_gather": 1}


def chunks(values: list[float], ranks: int) -> list[list[float]]:
    """Equal chunks of values, padded with zeros."""
    length = -(-len(values) // ranks)
    padded = values + [0.0] * (ranks * length - len(values))
    return [padded[i * length : (i + 1) * length] for i in range(ranks)]


def scales(values: list[float], hook: Any, ranks: int) -> list[float]:
    """Scale of the block of each value."""
    block, largest = hook.block, {8: 127, 4: 7}[hook.bits]
    return [
        max(map(abs, chunk[i // block * block :][:block])) / largest
        for chunk in chunks(values, ranks)
        for i in range(len(chunk))
    ][: len(values)]


def rounded(values: list[float], hook: Any, ranks: int) -> list[float]:
    """Nearest multiples of the scales."""
    return [
        scale * round(value / scale) if scale else 0.0
        for value, scale in zip(values, scales(values, hook, ranks), strict=True)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("hook", [int8(1), int8(7), int8(64), int4(1), int4(7)], ids=name_of)
def test_values_and_sums_are_multiples_of_the_blocks_scale(ranks: int, hook: Any) -> None:
    inputs = random_inputs(ranks, 30, steps=2)
    inputs[1][0][:7] = 0.0
    found, _ = run_leaf(hook, inputs)
    for own, mean in zip(inputs, found, strict=True):
        parts = [rounded((grad / ranks).tolist(), hook, ranks) for grad in own]
        total = [sum(column) for column in zip(*parts, strict=True)]
        wanted = rounded(total, hook, ranks) if ranks > 2 else total
        assert mean.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.slow
@settings(max_examples=40)
@given(data=st.data())
def test_errors_are_within_half_a_step_of_each_rank_and_of_the_sum(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([2, 3, 4, 5]), label="ranks")
    make = data.draw(st.sampled_from([int8, int4]), label="hook")
    hook: Any = make(data.draw(st.sampled_from([1, 3, 16, 1000]), label="block"))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]), label="dtype")
    numbers = st.floats(-1e6, 1e6, width=32).map(lambda x: x if abs(x) > 1e-30 else 0.0)
    numel = data.draw(st.integers(1, 40), label="numel")
    vectors = st.lists(numbers, min_size=numel, max_size=numel)
    own = [torch.tensor(data.draw(vectors), dtype=dtype) for _ in range(ranks)]
    (mean,), _ = run_leaf(hook, [own])

    sent = [(grad.double() / ranks).tolist() for grad in own]
    exact = [math.fsum(column) for column in zip(*sent, strict=True)]
    units = [scales(values, hook, ranks) for values in sent]
    bounds = [sum(column) / 2 for column in zip(*units, strict=True)]
    largest = [sum(127 * unit for unit in column) for column in zip(*units, strict=True)]
    if ranks > 2:
        sums = rounded_sums(sent, hook, ranks)
        halves = [scale / 2 for scale in scales(sums, hook, ranks)]
        bounds = [bound + half for bound, half in zip(bounds, halves, strict=True)]
    for found, wanted, bound, magnitude in zip(mean.tolist(), exact, bounds, largest, strict=True):
        rounding = 4 * ranks * torch.finfo(dtype).eps * magnitude
        assert abs(found - wanted) <= bound + rounding


def rounded_sums(sent: list[list[float]], hook: Any, ranks: int) -> list[float]:
    parts = [rounded(values, hook, ranks) for values in sent]
    return [sum(column) for column in zip(*parts, strict=True)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("algorithm", ["all_reduce", "reduce_scatter"])
def test_bytes_do_not_grow_with_the_ranks(ranks: int, algorithm: Any) -> None:
    grads = {"w": torch.ones(100_003)}

    def run(group: Any, hook: Any) -> float:
        with fddp.GradSync(grads, group=group, hook=hook, algorithm=algorithm) as sync:
            kinds = {op.kind for op in sync.schedule.ops}
            assert kinds & {"all_reduce", "reduce_scatter", "all_gather"} == {algorithm}
            average = sync if algorithm == "all_reduce" else sync.reduce_scatter
            average(grads)
            issued = record_issued(sync)
            average(grads)
            nbytes = sum(
                SENT[op.kind] * op.numel * getattr(torch, op.dtype).itemsize for op in issued
            )
            return nbytes * (ranks - 1) / ranks

    eighth, quarter, plain = (fddp.loopback(ranks, run, h) for h in (int4(), int8(), None))
    assert max(quarter) <= 0.26 * min(plain)
    assert max(eighth) <= 0.15 * min(plain)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("hook", "most"), [(int8(8), 0.3), (int4(8), 6.0)], ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_error_feedback_keeps_the_errors_of_values_and_sums(
    ranks: int, hook: Any, most: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(ranks)
    own = [torch.randn(50, generator=generator, dtype=dtype) for _ in range(ranks)]
    for count in (1, 40):
        found, states = run_leaf(error_feedback(hook), [own] * count)
        owed = sum(state[0]["residual"] for state in states)
        exact, total = count * sum(own), ranks * sum(found)
        assert torch.allclose(total + owed, exact, rtol=1e-4, atol=1e-4 * count)
        # The difference of the sums does not grow with the steps.
        assert float((total - exact).abs().max()) < most


@on_threads(2)
def test_a_residual_that_is_not_finite_is_not_kept(group: Any) -> None:
    """Rank 0's value is finite, and a multiple of its scale is not. Its chunk is that of rank 1."""
    own, params = torch.tensor([1.0, 1.0, 1.0, 0.0]), {"w": torch.zeros(4)}
    own[3] = -torch.finfo(torch.float32).max if group.rank == 0 else 0.0
    plan = fddp.plan_buckets(params)
    schedule = fddp.make_schedule(plan, 2, algorithm="reduce_scatter", scaling="after")
    with fddp.GradSync(schedule, group=group, hook=error_feedback(int8())) as sync:
        step = sync.value_and_grad(lambda p: (p["w"] * own).sum())
        _, _, state = step(params, hook_state=sync.init_state())
        assert bool(state[0]["residual"].isfinite().all())


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("hook", [int8(4), int4(4), error_feedback(int8(4))], ids=name_of)
def test_values_that_are_not_finite_arrive(ranks: int, value: float, hook: Any) -> None:
    own = [torch.ones(30) for _ in range(ranks)]
    own[1][17] = value
    (mean,), states = run_leaf(hook, [own])
    assert not mean[17].isfinite()
    others = torch.tensor([abs(i - 17) >= 4 for i in range(30)])
    assert torch.allclose(mean[others], torch.ones(30)[others])
    for state in states:
        assert state == () or not state[0]["residual"].any()


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_out_of_range_are_not_finite(ranks: int) -> None:
    grads = {"w": torch.full((8,), 3e38)}
    schedule = fddp.make_schedule(fddp.plan_buckets(grads), ranks, scaling="after")

    def run(group: Any) -> Tensor:
        with fddp.GradSync(schedule, group=group, hook=int8(4)) as sync:
            return sync(grads)["w"]

    for mean in fddp.loopback(ranks, run):
        assert not mean.isfinite().any()


def test_tiny_values_keep_their_sign() -> None:
    own = [torch.full((3,), 190 * 2.0**-149), torch.zeros(3), torch.zeros(3)]
    (mean,), _ = run_leaf(int8(), [[grad * 3 for grad in own]])
    assert (mean > 0).all()


# Shards


def shards(group: Any, hook: Any, numel: int, count: int, **options: Any) -> list[Tensor]:
    """This rank's shard of the sum of each step's mean, with the whole tree gathered from it."""
    generator = torch.Generator().manual_seed(rank_of(group))
    params = {"w": torch.zeros(numel, dtype=torch.float64)}
    own = torch.randn(numel, generator=generator, dtype=torch.float64)
    options = {"algorithm": "reduce_scatter", **options}
    with fddp.GradSync(params, group=group, hook=hook, **options) as sync:
        step = sync.value_and_grad(lambda p: p["w"] @ own)
        total, state = sync.shard(params), sync.init_state()
        for _ in range(count):
            if state:
                _, grads, state = step(params, hook_state=state)
            else:
                _, grads = step(params)
            total = {"w": total["w"] + grads["w"]}
        return [own, total["w"], sync.all_gather(total)["w"]]


@pytest.mark.parametrize("mesh", [(1,), (2,), (3,), (2, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("count", [1, 20])
def test_shards_are_means_within_the_bound(mesh: tuple[int, ...], count: int) -> None:
    ranks = math.prod(mesh)
    options = {"mesh": fddp.Topology(**{f"axis{i}": size for i, size in enumerate(mesh)})}
    hook = error_feedback(int8(8))
    runs = fddp.loopback(ranks, lambda group: shards(group, hook, 101, count, **options))
    found = [whole for *_, whole in runs]
    assert same_bits([[whole] for whole in found])
    exact = count * sum(own for own, *_ in runs) / ranks
    # Error feedback: the difference does not grow with the steps.
    assert float((found[0] - exact).abs().max()) <= (0.04 if ranks > 1 else 1e-12)
    assert ranks == 1 or not torch.allclose(found[0], exact, rtol=1e-6)


def test_every_transport_has_the_same_bits(launch: Launch) -> None:
    for sum_up, *arguments in ((shards, int8(8), 1001, 2), (wholes, error_feedback(int8(8)), 2)):
        expected = fddp.loopback(3, sum_up, *arguments)
        for found, wanted in zip(launch(3, sum_up, *arguments), expected, strict=True):
            assert same_bits([found, wanted])


def wholes(group: Any, hook: Any, count: int) -> list[dict[str, Tensor]]:
    means, _ = steps(group, hook, count)
    return means


def test_shards_are_sums_of_multiples_of_the_blocks_scale() -> None:
    runs = fddp.loopback(3, lambda group: shards(group, int8(8), 99, 1))
    parts = [rounded((own / 3).tolist(), int8(8), 3) for own, *_ in runs]
    total = [sum(column) for column in zip(*parts, strict=True)]
    assert runs[0][2].tolist() == pytest.approx(total, rel=1e-9, abs=1e-12)
