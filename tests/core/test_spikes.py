"""The rule that finds gradient norms which stand out."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fddp.core.numerics.norm_spikes import NormHistory, NormVerdict, check_norm
from fddp.tree.pytree import flatten

NORMS = st.lists(st.floats(1e-6, 1e6), min_size=4, max_size=40)
QUICK = {"warmup": 4, "window": 16}


def after(norms: list[float], **options: float) -> tuple[NormHistory, NormVerdict]:
    history, verdict = NormHistory(), NormVerdict(False, math.inf, math.nan)
    for norm in norms:
        history, verdict = check_norm(history, norm, **{**QUICK, **options})
    return history, verdict


def usual(count: int, seed: int = 0) -> list[float]:
    """Norms as training has them: they vary by a factor of about 1.2 around 3."""
    numbers = random.Random(seed)
    return [3.0 * math.exp(numbers.gauss(0.0, 0.2)) for _ in range(count)]


# Laws


@given(NORMS, st.floats(1e-6, 1e6), st.floats(1e-9, 1e9))
def test_the_unit_does_not_matter(norms: list[float], last: float, unit: float) -> None:
    history, _ = after(norms)
    scaled, _ = after([norm * unit for norm in norms])
    _, verdict = check_norm(history, last, **QUICK)
    _, other = check_norm(scaled, last * unit, **QUICK)
    assert math.isclose(other.limit, verdict.limit * unit, rel_tol=1e-9)
    assert math.isclose(other.typical, verdict.typical * unit, rel_tol=1e-9)
    if not math.isclose(last, verdict.limit, rel_tol=1e-9):
        assert other.is_spike == verdict.is_spike


@given(NORMS, st.floats(1e-6, 1e6), st.floats(1.0, 1e6))
def test_values_above_a_spike_are_spikes(norms: list[float], last: float, factor: float) -> None:
    history, _ = after(norms)
    _, smaller = check_norm(history, last, **QUICK)
    _, larger = check_norm(history, last * factor, **QUICK)
    assert smaller.limit == larger.limit
    assert larger.is_spike or not smaller.is_spike


@given(NORMS, st.floats(0.1, 10.0), st.floats(1.0, 10.0))
def test_more_deviations_find_fewer(norms: list[float], deviations: float, more: float) -> None:
    history, _ = after(norms)
    _, strict = check_norm(history, 1.0, deviations=deviations, **QUICK)
    _, lax = check_norm(history, 1.0, deviations=deviations * more, **QUICK)
    assert lax.limit >= strict.limit


@given(NORMS, st.sampled_from([math.nan, math.inf, 0.0]))
def test_values_without_a_logarithm_are_ignored(norms: list[float], odd: float) -> None:
    history, _ = after(norms)
    same, verdict = check_norm(history, odd, **QUICK)
    assert same is history
    assert verdict.is_spike == (odd != 0.0)


@given(NORMS, st.floats(1.01, 1e300), st.floats(1.01, 1e300))
def test_the_size_of_a_spike_leaves_no_trace(
    norms: list[float], first: float, second: float
) -> None:
    history, _ = after(norms)
    _, verdict = check_norm(history, 1.0, **QUICK)
    large = [min(verdict.limit * factor, 1e308) for factor in (first, second)]
    results = [check_norm(history, norm, **QUICK) for norm in large]
    assert all(found.is_spike for _, found in results)
    assert results[0][0] == results[1][0]


@given(NORMS)
def test_the_history_is_bounded_and_a_tree_of_floats(norms: list[float]) -> None:
    history, _ = after(norms)
    assert len(history.logs) == min(len(norms), QUICK["window"])
    leaves, treedef = flatten(history)
    assert leaves == list(history.logs)
    assert treedef.unflatten(leaves) == history


# What it is for


def test_spikes_are_found_and_nothing_else() -> None:
    norms = usual(600)
    spikes = {100: 40.0, 101: 1e30, 250: math.inf, 251: math.nan, 400: 25.0}
    history, found = NormHistory(), set()
    for step, norm in enumerate(norms):
        history, verdict = check_norm(history, spikes.get(step, norm))
        if verdict.is_spike:
            found.add(step)
        assert step < 20 or 4.0 < verdict.limit < 20.0
        assert step < 20 or 2.5 < verdict.typical < 3.6
    assert found == set(spikes)


def test_a_quarter_of_spikes_changes_little() -> None:
    history, missed = NormHistory(), 0
    numbers = random.Random(1)
    for step, norm in enumerate(usual(400)):
        is_spike = step >= 50 and numbers.random() < 0.25
        history, verdict = check_norm(history, 300.0 if is_spike else norm)
        missed += is_spike and not verdict.is_spike
    assert missed == 0
    assert verdict.typical < 4.0


def test_norms_that_have_grown_for_good_are_accepted() -> None:
    history, last = NormHistory(), 0
    for step, norm in enumerate([1.0] * 128 + [10.0] * 500):
        history, verdict = check_norm(history, norm)
        last = step if verdict.is_spike else last
    assert 128 + 60 <= last <= 128 + 64


def test_no_spike_before_the_warmup_is_over() -> None:
    _, verdict = after([1.0, 1e9, 1e-9], warmup=4)
    assert not verdict.is_spike
    assert verdict.limit == math.inf
    assert check_norm(NormHistory(), math.nan)[1].is_spike


def test_norms_that_do_not_vary_leave_room() -> None:
    history, _ = after([5.0] * 10)
    for norm, is_spike in (9.9, False), (10.1, True):
        assert check_norm(history, norm, **QUICK)[1].is_spike is is_spike


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"deviations": 0.0}, "deviations must be finite and above 0, got 0.0"),
        ({"least_factor": 1.0}, "least_factor must be finite and above 1, got 1.0"),
        ({"warmup": 9, "window": 8}, "warmup must be from 1 to window, got warmup=9 and window=8"),
        ({"grad_norm": -1.0}, "grad_norm must not be negative, got -1.0"),
    ],
)
def test_invalid_options(options: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_norm(NormHistory(), **{"grad_norm": 1.0, **options})  # type: ignore[arg-type]


def test_a_history_that_was_loaded_as_tensors() -> None:
    history, _ = after([1.0, 1.1, 0.9, 1.0, 1.2])
    tensors = NormHistory(tuple(map(torch.tensor, history.logs)))
    same, verdict = check_norm(tensors, 8.0, **QUICK)
    assert verdict.is_spike is True
    assert all(type(log) is float for log in same.logs)
