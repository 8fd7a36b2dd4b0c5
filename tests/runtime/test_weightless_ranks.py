"""Ranks of weight 0 contribute nothing, and have no result of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fddp


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_local_leaves_have_a_result_where_there_is_a_weight(weight: float) -> None:
    tree = {"shared": torch.ones(3), "own": torch.ones(2)}
    plan = fddp.plan_buckets(tree, select=lambda path: path == "shared")

    def run(group: Any) -> Any:
        grads = {name: leaf * (1 + group.rank) for name, leaf in tree.items()}
        with fddp.GradSync(plan, group=group) as sync:
            mean = sync(grads, weight=weight if group.rank else 1.0)
        return mean["shared"].tolist(), None if mean["own"] is None else mean["own"].tolist()

    (shared, own), (same, local) = fddp.loopback(2, run)
    assert shared == same == pytest.approx([(1.0 + 2.0 * weight) / (1.0 + weight)] * 3)
    assert own == [1.0, 1.0]
    assert local == ([2.0, 2.0] if weight else None)
