"""Choice of a compression: laws of pure functions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fddp.core.numerics.compression_choice import (
    CompressionErrors,
    cheapest,
    is_measured,
    next_errors,
)
from fddp.numerics import NoiseScale, SquaredNorms

COSTS, ERRORS = st.floats(0.0, 1e9), st.floats(0.0, 1e9)
CANDIDATES = st.lists(st.tuples(COSTS, ERRORS), min_size=1, max_size=8)
UNKNOWN = st.sampled_from([math.nan, math.inf])


@given(CANDIDATES, ERRORS)
def test_the_choice_is_within_the_bound_and_none_within_it_is_cheaper(
    candidates: list[tuple[float, float]], bound: float
) -> None:
    costs, errors = zip(*candidates, strict=True)
    chosen = cheapest(costs, errors, bound)
    within = [cost for cost, error in candidates if error <= bound]
    if within:
        assert errors[chosen] <= bound
        assert costs[chosen] == min(within)
    else:
        assert errors[chosen] == min(errors)


@given(CANDIDATES, ERRORS, ERRORS)
def test_a_larger_bound_never_costs_more(
    candidates: list[tuple[float, float]], first: float, second: float
) -> None:
    costs, errors = zip(*[(1e10, 0.0), *candidates], strict=True)  # with an exact sum
    low, high = sorted((first, second))
    assert costs[cheapest(costs, errors, high)] <= costs[cheapest(costs, errors, low)]


@given(CANDIDATES, ERRORS, st.integers(-20, 20), st.permutations(range(8)))
def test_units_and_order_do_not_matter(
    candidates: list[tuple[float, float]], bound: float, exponent: int, order: list[int]
) -> None:
    costs, errors = zip(*candidates, strict=True)
    unit = 2.0**exponent
    chosen = cheapest(costs, errors, bound)
    assert cheapest(costs, [error * unit for error in errors], bound * unit) == chosen
    shuffled = [candidates[i] for i in order if i < len(candidates)]
    found = shuffled[cheapest(*zip(*shuffled, strict=True), bound)]
    assert (found == candidates[chosen]) or (found[1] == errors[chosen] > bound)


@given(CANDIDATES, st.sampled_from([math.nan, -1.0]))
def test_without_a_known_noise_the_sum_is_exact(
    candidates: list[tuple[float, float]], bound: float
) -> None:
    costs, errors = zip(*[(5.0, 0.0), *candidates], strict=True)
    assert cheapest(costs, errors, bound) == 0


def test_what_is_unknown_is_not_chosen() -> None:
    assert cheapest([3.0, 2.0, 1.0], [0.0, math.nan, math.inf], 1e300) == 0
    assert cheapest([3.0, 2.0], [math.nan, 5.0], 1.0) == 1
    assert cheapest([1.0], [math.nan], 1.0) == 0


@given(st.integers(1, 300), st.integers(0, 10))
def test_measured_steps(every: int, multiple: int) -> None:
    assert is_measured(every * multiple, every)
    early = [step for step in range(every) if is_measured(step, every)]
    assert early == [0, *(2**n for n in range(9) if 2**n < every)]
    later = [step for step in range(every, 4 * every) if is_measured(step, every)]
    assert later == [every, 2 * every, 3 * every]


NORMS = st.builds(
    SquaredNorms, st.just(math.nan), ERRORS, ERRORS, st.integers(2, 4), st.floats(0.5, 8.0)
)


@given(st.lists(st.tuples(NORMS, ERRORS), min_size=1, max_size=10), st.sampled_from([0.0, 0.5]))
def test_errors_are_smoothed_as_the_noise(
    steps: list[tuple[SquaredNorms, float]], decay: float
) -> None:
    known, share = CompressionErrors(NoiseScale(), (0.0, 0.0)), 0.0
    weighted = [0.0, 0.0]
    for norms, error in steps:
        known = next_errors(known, norms, [0.0, error], decay=decay)
        share = decay * share + (1 - decay)
        for i, value in enumerate((norms.variance, error)):
            weighted[i] = decay * weighted[i] + (1 - decay) * value
    size = max(abs(norms.variance) for norms, _ in steps)
    assert known.noise.variance == pytest.approx(weighted[0] / share, abs=1e-9 * size)
    assert known.errors == (0.0, pytest.approx(weighted[1] / share, abs=1e-3))


def test_steps_without_estimates_and_errors_that_are_not_finite() -> None:
    norms = SquaredNorms(math.nan, 12.0, mean=4.0, active=2, total_weight=2.0)
    known = next_errors(CompressionErrors(NoiseScale(), (0.0,)), norms, [1.0], decay=0.5)
    for bad in (norms._replace(total=math.inf), norms._replace(active=1)):
        assert next_errors(known, bad, [7.0], decay=0.5) == known
    lost = next_errors(known, norms, [math.inf], decay=0.5)
    assert lost.errors == (math.inf,)
    assert next_errors(lost, norms, [3.0], decay=0.5).errors == (3.0,)
