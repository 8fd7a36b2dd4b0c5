"""Factors before and after a sum over ranks give the weighted mean, for every place of division."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fddp.core.numerics.weighting import WeightScale

weights = st.lists(st.sampled_from([0.5, 1.0, 3.0, 64.0, 1000.0]), min_size=1, max_size=4)


@given(weights, st.sampled_from([0.25, 1.0, 32.0]), st.sampled_from(["before", "after", "average"]))
def test_factors_give_the_weighted_mean(
    ranks: list[float], unit: float, scaling: Literal["before", "after", "average"]
) -> None:
    scale = WeightScale(len(ranks), unit, scaling)
    values = [1.0 + 2.0 * rank for rank in range(len(ranks))]
    total = sum(scale.before(w) * value for w, value in zip(ranks, values, strict=True))
    if scaling == "average":
        total /= len(ranks)
    due = sum(w * value for w, value in zip(ranks, values, strict=True)) / sum(ranks)
    assert total * scale.after(sum(ranks)) == pytest.approx(due)
