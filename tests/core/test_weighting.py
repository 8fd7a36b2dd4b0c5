"""Factors before and after a sum over ranks give the weighted mean, for every place of division."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fddp.core.numerics.weighting import WeightScale, weight_problem

weights = st.lists(st.sampled_from([0.5, 1.0, 3.0, 64.0, 1000.0]), min_size=1, max_size=4)


@given(weights, st.sampled_from(["before", "after", "average"]))
def test_factors_give_the_weighted_mean(
    ranks: list[float], scaling: Literal["before", "after", "average"]
) -> None:
    scale = WeightScale(len(ranks), scaling)
    values = [1.0 + 2.0 * rank for rank in range(len(ranks))]
    total = sum(scale.before(w) * value for w, value in zip(ranks, values, strict=True))
    if scaling == "average":
        total /= len(ranks)
    due = sum(w * value for w, value in zip(ranks, values, strict=True)) / sum(ranks)
    assert total * scale.after(sum(ranks)) == pytest.approx(due)


@pytest.mark.parametrize(
    ("mean", "narrow", "fits"),
    [
        (1.0, "bucket 0", True),
        (1.0 / 64.0, "bucket 0", True),
        (1.01, "bucket 0", False),
        (0.015, "bucket 0", False),
        (2.0**40, "", True),
        (2.0**-40, "", True),
        (2.0**41, "", False),
        (2.0**-41, "", False),
        (float("inf"), "", False),
    ],
)
def test_sums_serve_weights_in_proportion(mean: float, narrow: str, fits: bool) -> None:
    problem = weight_problem(mean, narrow)
    assert (problem is None) == fits
    if problem is not None:
        assert problem.startswith(f"the mean weight is {mean}, and {narrow or 'sums serve'}")
