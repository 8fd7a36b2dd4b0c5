"""Trees of a step: filled in different orders, or others than planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fddp


def test_all_ranks_take_the_plan_of_rank_0() -> None:
    def run(group: Any) -> Any:
        names = ["c", "b", "a"] if group.rank else ["a", "b", "c"]
        tree = {name: torch.ones(4) * (1 + group.rank) for name in names}
        own = fddp.plan_buckets(tree, bucket_cap_mb=[1e-5])
        with fddp.GradSync(tree, group=group, bucket_cap_mb=[1e-5]) as sync:
            mean = sync(tree)
            return own, sync.plan, list(mean), mean["b"].tolist()

    (own, plan, *first), (other, same, *second) = fddp.loopback(2, run)
    assert plan == same == own != other
    assert first == [["a", "b", "c"], [1.5] * 4]
    assert second == [["c", "b", "a"], [1.5] * 4]


def test_other_trees_are_named_and_the_next_step_works() -> None:
    tree = {"a": torch.ones(2), "b": torch.ones(3)}

    def run(group: Any) -> list[float]:
        with fddp.GradSync(tree, group=group) as sync:
            for wrong, text in (
                ({"a": torch.ones(2)}, "missing: 'b'; unexpected: none"),
                ({**tree, "c": torch.ones(1)}, "missing: none; unexpected: 'c'"),
                ({"a": 1, "b": torch.ones(3)}, r"leaf 'a' .* is a int"),
                ([*tree.values()], "missing: 'a', 'b'; unexpected: '0', '1'"),
            ):
                with pytest.raises(fddp.TreeMismatchError, match=text):
                    sync(wrong)
            return sync(tree)["b"].tolist()

    assert fddp.loopback(1, run) == [[1.0] * 3]
