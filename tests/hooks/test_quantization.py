"""Bytes, bound on the error, error feedback and non-finite values of `int8`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fddp
from fddp.hooks import error_feedback, int8
from fddp.transport.operation import Operation
from tests.support.models import same_bits

#: bytes that each rank sends for each byte of an operation's tensor, times ranks / (ranks - 1)
SENT = {"all_reduce": 2, "all_to_all": 1, "all_gather": 1}


def chunks(values: list[float], ranks: int) -> list[list[float]]:
    """Equal chunks of values, padded with zeros."""
    length = -(-len(values) // ranks)
    padded = values + [0.0] * (ranks * length - len(values))
    return [padded[i * length : (i + 1) * length] for i in range(ranks)]


def scales(values: list[float], block: int, ranks: int) -> list[float]:
    """Scale of the block of each value."""
    return [
        max(map(abs, chunk[i // block * block :][:block])) / 127
        for chunk in chunks(values, ranks)
        for i in range(len(chunk))
    ][: len(values)]


def rounded(values: list[float], block: int, ranks: int) -> list[float]:
    """Nearest multiples of the scales."""
    return [
        scale * round(value / scale) if scale else 0.0
        for value, scale in zip(values, scales(values, block, ranks), strict=True)
    ]


def means(hook: Any, inputs: list[list[Tensor]]) -> tuple[list[Tensor], list[Any]]:
    """Means by step and each rank's last state, from gradients by step and rank."""

    def run(group: Any) -> Any:
        with fddp.GradSync({"w": inputs[0][0]}, group=group, hook=hook) as sync:
            found, state = [], sync.init_state()
            for own in inputs:
                mean, state = sync.update({"w": own[group.rank]}, state)
                found.append(mean["w"])
            return found, state

    runs = fddp.loopback(len(inputs[0]), run)
    bits = [[mean.view(torch.uint8) for mean in found] for found, _ in runs]  # of NaN, too
    assert same_bits(bits)
    return runs[0][0], [state for _, state in runs]


def random_inputs(ranks: int, numel: int, steps: int = 2) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(ranks)
    return [
        [torch.randn(numel, generator=generator, dtype=torch.float64) for _ in range(ranks)]
        for _ in range(steps)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("block", [1, 7, 64])
def test_values_and_sums_are_multiples_of_the_blocks_scale(ranks: int, block: int) -> None:
    inputs = random_inputs(ranks, 30)
    inputs[1][0][:7] = 0.0
    found, _ = means(int8(block), inputs)
    for own, mean in zip(inputs, found, strict=True):
        parts = [rounded((grad / ranks).tolist(), block, ranks) for grad in own]
        total = [sum(column) for column in zip(*parts, strict=True)]
        wanted = rounded(total, block, ranks) if ranks > 2 else total
        assert mean.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@settings(max_examples=40)
@given(data=st.data())
def test_errors_are_within_half_a_step_of_each_rank_and_of_the_sum(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([2, 3, 4, 5]), label="ranks")
    block = data.draw(st.sampled_from([1, 3, 16, 1000]), label="block")
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]), label="dtype")
    numbers = st.floats(-1e6, 1e6, width=32).map(lambda x: x if abs(x) > 1e-30 else 0.0)
    numel = data.draw(st.integers(1, 40), label="numel")
    vectors = st.lists(numbers, min_size=numel, max_size=numel)
    own = [torch.tensor(data.draw(vectors), dtype=dtype) for _ in range(ranks)]
    (mean,), _ = means(int8(block), [own])

    sent = [(grad.double() / ranks).tolist() for grad in own]
    exact = [math.fsum(column) for column in zip(*sent, strict=True)]
    steps = [scales(values, block, ranks) for values in sent]
    bounds = [sum(column) / 2 for column in zip(*steps, strict=True)]
    largest = [sum(127 * step for step in column) for column in zip(*steps, strict=True)]
    if ranks > 2:
        sums = rounded_sums(sent, block, ranks)
        halves = [scale / 2 for scale in scales(sums, block, ranks)]
        bounds = [bound + half for bound, half in zip(bounds, halves, strict=True)]
    for found, wanted, bound, magnitude in zip(mean.tolist(), exact, bounds, largest, strict=True):
        rounding = 4 * ranks * torch.finfo(dtype).eps * magnitude
        assert abs(found - wanted) <= bound + rounding


def rounded_sums(sent: list[list[float]], block: int, ranks: int) -> list[float]:
    parts = [rounded(values, block, ranks) for values in sent]
    return [sum(column) for column in zip(*parts, strict=True)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_bytes_do_not_grow_with_the_ranks(ranks: int) -> None:
    numel = 100_003

    def run(group: Any, hook: Any) -> float:
        grads = {"w": torch.ones(numel)}
        with fddp.GradSync(grads, group=group, hook=hook) as sync:
            sync(grads)
            operations: list[Operation] = []
            transport = sync._engine.transport
            start = transport._start

            def note(operation: Operation) -> Any:
                operations.append(operation)
                return start(operation)

            transport._start = note  # type: ignore[method-assign]
            sync(grads)
            nbytes = sum(SENT[op.kind] * op.tensor.nbytes for op in operations)
            return nbytes * (ranks - 1) / ranks

    quantized, plain = (fddp.loopback(ranks, run, hook) for hook in (int8(), None))
    assert max(quantized) <= 0.26 * min(plain)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_error_feedback_keeps_the_errors_of_values_and_sums(ranks: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(ranks)
    own = [torch.randn(50, generator=generator, dtype=dtype) for _ in range(ranks)]
    for steps in (1, 40):
        found, states = means(error_feedback(int8(8)), [own] * steps)
        owed = sum(state[0]["residual"] for state in states)
        exact, total = steps * sum(own), ranks * sum(found)
        assert torch.allclose(total + owed, exact, rtol=1e-4, atol=1e-4 * steps)
        # The difference of the sums does not grow with the steps.
        assert float((total - exact).abs().max()) < 0.3


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("feedback", [False, True])
def test_values_that_are_not_finite_arrive(ranks: int, value: float, feedback: bool) -> None:
    own = [torch.ones(30) for _ in range(ranks)]
    own[1][17] = value
    hook: Any = error_feedback(int8(4)) if feedback else int8(4)
    (mean,), states = means(hook, [own])
    assert not mean[17].isfinite()
    others = torch.tensor([abs(i - 17) >= 4 for i in range(30)])
    assert torch.allclose(mean[others], torch.ones(30)[others])
    for state in states if feedback else ():
        assert not state[0]["residual"].any()


def test_tiny_values_keep_their_sign() -> None:
    own = [torch.full((3,), 190 * 2.0**-149), torch.zeros(3), torch.zeros(3)]
    (mean,), _ = means(int8(), [[grad * 3 for grad in own]])
    assert (mean > 0).all()
