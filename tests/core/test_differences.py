"""Texts about differences between ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fddp
from fddp.core.plan.leaf import LeafSpec
from fddp.core.protocol.differences import (
    LEAVES,
    check_equal,
    format_ranks,
    format_values,
    leaf_difference,
    minority_ranks,
    ranks_by_value,
)
from fddp.core.protocol.messages import decode

WEIGHT = LeafSpec("w", (2, 3), "float32")
BIAS = LeafSpec("b", (3,), "float32", device="cuda#1")
COLUMNS = LeafSpec("w", (2, 3), "float32", strides=(1, 2))
EMBEDDING = LeafSpec("e", (9, 2), "bfloat16", sparse=True)
NOTHING = LeafSpec("b", (), "none", device="none")


def test_equal_values_pass() -> None:
    check_equal("cap", [[1, 2], [1, 2]], "pass the same cap")
    check_equal("cap", [None], "pass the same cap")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([3, 3, 2, 1], "cap is 3 on rank 0 and 2 on rank 2; pass the same cap"),
        ([None, False], "cap is None on rank 0 and False on rank 1; pass the same cap"),
        (["a", "b"], "cap is a on rank 0 and b on rank 1; pass the same cap"),
    ],
)
def test_first_different_value_is_named(values: list[Any], text: str) -> None:
    with pytest.raises(fddp.PlanMismatchError) as caught:
        check_equal("cap", values, "pass the same cap")
    assert str(caught.value) == text
    with pytest.raises(fddp.DesyncError):
        check_equal("cap", values, "pass the same cap", fddp.DesyncError)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (
            [BIAS, WEIGHT],
            [BIAS, COLUMNS],
            "rank 1 has leaf 'w' of shape (2, 3), float32 on cpu where rank 4 has leaf 'w' of "
            "shape (2, 3), float32 on cpu with strides (1, 2)",
        ),
        (
            [NOTHING],
            [BIAS],
            "rank 1 has leaf 'b', which is None where rank 4 has leaf 'b' of shape (3,), float32 "
            "on cuda#1",
        ),
        (
            [EMBEDDING],
            [],
            "rank 1 has 1 leaf and rank 4 has 0; only rank 1 has leaf 'e' of shape (9, 2), "
            "bfloat16 on cpu, declared sparse",
        ),
        (
            [WEIGHT],
            [WEIGHT, NOTHING],
            "rank 1 has 1 leaf and rank 4 has 2; only rank 4 has leaf 'b', which is None",
        ),
    ],
)
def test_first_different_leaf_is_described(
    first: list[LeafSpec], second: list[LeafSpec], text: str
) -> None:
    received = decode(json.dumps([*first]), LEAVES), decode(json.dumps([*second]), LEAVES)
    assert leaf_difference(1, received[0], 4, received[1]) == text
    assert leaf_difference(1, first, 4, second) == text


def test_equal_leaves_have_no_difference() -> None:
    leaves = [BIAS, COLUMNS, EMBEDDING, NOTHING]
    received = decode(json.dumps(leaves), LEAVES)
    assert leaf_difference(0, received, 1, decode(json.dumps(leaves), LEAVES)) is None
    assert leaf_difference(0, [], 1, []) is None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_groups_partition_the_ranks_by_value(column: list[int]) -> None:
    groups = ranks_by_value(column)
    assert sorted(rank for group in groups for rank in group) == [*range(len(column))]
    assert all(len({column[rank] for rank in group}) == 1 for group in groups)
    assert len(groups) == len(set(column))
    sizes = [len(group) for group in groups]
    assert sizes == sorted(sizes, reverse=True)
    others = set(minority_ranks(groups))
    assert others == set(range(len(column))) - (set() if len({*sizes}) == 1 else {*groups[0]})


@given(st.text(max_size=90), st.text(max_size=90))
def test_values_keep_their_first_difference(one: str, two: str) -> None:
    text = format_values([[0], [1]], [one, two])
    if one != two:
        mine, theirs = text.removesuffix(" on rank 1").split(" on rank 0 and ", 1)
        assert mine != theirs
    assert len(text) <= 2 * (56 + 6) + len(" on rank 0 and  on rank 1")


def test_long_lists_of_ranks_are_cut() -> None:
    assert format_ranks([*range(8)]) == "ranks 0, 1, 2, 3, 4, 5, 6 and 7"
    assert format_ranks([*range(9)]) == "ranks 0, 1, 2, 3, 4, 5, 6 and 2 others"
