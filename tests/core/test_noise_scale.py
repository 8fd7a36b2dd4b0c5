"""Gradient noise scales: what estimates are of, and how they are smoothed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fddp.numerics import NoiseScale, SquaredNorms, next_noise_scale
from fddp.tree.pytree import flatten

WEIGHTS = st.floats(0.125, 1000.0)
FINITE = st.floats(0.0, 1e6)
DECAYS = st.sampled_from([0.0, 0.5, 0.9, 0.99])


@st.composite
def gradients(draw: st.DrawFn) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Of 2 to 6 ranks, and their weights."""
    ranks, size = draw(st.integers(2, 6)), draw(st.integers(1, 5))
    numbers = st.lists(st.floats(-100.0, 100.0), min_size=size, max_size=size)
    grads = draw(st.lists(numbers, min_size=ranks, max_size=ranks))
    return np.array(grads), np.array(draw(st.lists(WEIGHTS, min_size=ranks, max_size=ranks)))


def norms_of(grads: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> SquaredNorms:
    squares = weights * np.square(grads).sum(1)
    mean = weights @ grads / weights.sum()
    return SquaredNorms(
        float(squares[0]),
        float(squares.sum()),
        float(np.square(mean).sum()),
        len(weights),
        float(weights.sum()),
    )


def steps() -> st.SearchStrategy[list[SquaredNorms]]:
    norms = st.builds(SquaredNorms, FINITE, FINITE, FINITE, st.just(3), st.just(3.0))
    return st.lists(norms, min_size=1, max_size=20)


def smoothed(steps: Sequence[SquaredNorms], decay: float) -> NoiseScale:
    noise = NoiseScale()
    for norms in steps:
        noise = next_noise_scale(noise, norms, decay=decay)
    return noise


# Estimates


@given(gradients())
def test_the_variance_is_that_between_ranks(case: tuple[npt.NDArray[np.float64], ...]) -> None:
    """The weighted sample variance, without bias for noise that falls with the weight."""
    grads, weights = case
    norms = norms_of(grads, weights)
    mean = weights @ grads / weights.sum()
    between = weights @ np.square(grads - mean).sum(1) / (len(weights) - 1)
    size = norms.total / (len(weights) - 1)
    least = 1e-12 * size + 1e-300  # subnormal numbers are coarse
    assert norms.variance == pytest.approx(between, rel=1e-9, abs=least)
    noise = norms.variance / norms.total_weight
    assert norms.signal + noise == pytest.approx(norms.mean, rel=1e-9, abs=least)


@given(gradients(), st.sampled_from([0.25, 2.0, 1024.0]))
def test_the_scale_counts_units_of_weight(
    case: tuple[npt.NDArray[np.float64], ...], factor: float
) -> None:
    grads, weights = case
    one, other = norms_of(grads, weights), norms_of(grads, weights * factor)
    assert other.variance == pytest.approx(one.variance * factor, rel=1e-12, abs=1e-300)
    assert other.signal == pytest.approx(one.signal, rel=1e-12, abs=1e-300)


def test_the_noise_that_was_added_is_found() -> None:
    """By the mean over many steps, with weights that are numbers of samples."""
    random = np.random.default_rng(0)
    signal, spread = np.full(20, 0.5), 3.0
    counts = np.array([4.0, 9.0, 25.0])
    norms = []
    for _ in range(4000):
        noise = random.normal(size=(3, 20)) * spread / np.sqrt(counts)[:, None]
        norms.append(norms_of(signal + noise, counts))
    assert np.mean([n.variance for n in norms]) == pytest.approx(20 * spread**2, rel=0.02)
    assert np.mean([n.signal for n in norms]) == pytest.approx(5.0, rel=0.02)


@pytest.mark.parametrize("active", [0, 1])
def test_one_gradient_has_no_variance(active: int) -> None:
    norms = SquaredNorms(4.0, 4.0, 4.0, active, 1.0)
    assert math.isnan(norms.variance)
    assert math.isnan(norms.signal)


# Smoothing


@given(steps(), DECAYS)
def test_the_smoothed_value_is_a_mean_that_favours_late_steps(
    steps: list[SquaredNorms], decay: float
) -> None:
    noise = smoothed(steps, decay)
    weights = [decay ** (len(steps) - 1 - i) for i in range(len(steps))]
    for name in "variance", "signal":
        values = [getattr(norms, name) for norms in steps]
        expected = np.average(values, weights=weights)
        assert getattr(noise, name) == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert noise.share == pytest.approx(1.0 - decay ** len(steps))


@given(steps(), DECAYS, st.data())
def test_steps_without_an_estimate_change_nothing(
    steps: list[SquaredNorms], decay: float, data: st.DataObject
) -> None:
    bad = st.sampled_from(
        [
            SquaredNorms(1.0, math.nan, 1.0, 3, 3.0),
            SquaredNorms(1.0, math.inf, 1.0, 3, 3.0),
            SquaredNorms(1.0, 3.0, math.nan, 3, 3.0),
            SquaredNorms(1.0, 1.0, 1.0, 1, 1.0),
            SquaredNorms(0.0, 0.0, math.nan, 0, 0.0),
        ]
    )
    mixed = [each for norms in steps for each in (*data.draw(st.lists(bad, max_size=2)), norms)]
    assert smoothed(mixed, decay) == smoothed(steps, decay)


@given(steps(), st.lists(FINITE, min_size=20, max_size=20))
def test_ranks_have_the_same_value(steps: list[SquaredNorms], owns: list[float]) -> None:
    others = [norms._replace(own=own) for norms, own in zip(steps, owns, strict=False)]
    assert smoothed(others, 0.9) == smoothed(steps, 0.9)


def test_the_scale_of_no_step_and_of_no_signal() -> None:
    assert math.isnan(NoiseScale().scale)
    assert NoiseScale(variance=2.0, signal=0.5, share=1.0).scale == 4.0
    assert NoiseScale(variance=2.0, signal=-0.5, share=1.0).scale == math.inf


def test_it_is_a_pytree_of_numbers() -> None:
    noise = NoiseScale(1.0, 2.0, 0.5)
    assert sorted(flatten(noise)[0]) == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("decay", [-0.1, 1.0, math.nan])
def test_a_decay_is_below_one(decay: float) -> None:
    with pytest.raises(ValueError, match=f"decay must be from 0 to below 1, got {decay}"):
        next_noise_scale(NoiseScale(), SquaredNorms(1.0, 3.0, 1.0, 3, 3.0), decay=decay)
