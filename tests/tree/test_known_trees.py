"""Trees taken apart again: always what `flatten` gives, whatever came before."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fddp.errors import TreeMismatchError
from fddp.tree.cached import KnownTrees
from fddp.tree.pytree import flatten
from tests.support.examples import examples

leaves = st.sampled_from([None, torch.ones(1), torch.nn.Parameter(torch.ones(2))])
keys = st.one_of(st.integers(0, 3), st.sampled_from(["a", "b", "c", "a.b", "0"]))


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.lists(st.tuples(keys, children), max_size=3, unique_by=lambda pair: str(pair[0]))
    return st.one_of(
        dicts.map(dict),
        dicts.map(OrderedDict),
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
    )


trees = st.recursive(leaves, containers, max_leaves=8)


@examples(80)
@given(st.lists(trees, min_size=1, max_size=3), st.lists(st.integers(0, 2), max_size=6))
def test_the_same_as_flatten(some: list[Any], order: list[int]) -> None:
    known = KnownTrees()
    for number in [*range(len(some)), *order, 0, 0]:
        tree = some[number % len(some)]
        found, treedef = known.flatten(tree)
        expected, expected_def = flatten(tree)
        assert list(map(id, found)) == list(map(id, expected))
        assert treedef == expected_def
        assert treedef.paths == expected_def.paths
        again = treedef.unflatten(found)
        assert repr(again) == repr(tree), "containers, and the order in which they were filled"


def filled() -> dict[str, Any]:
    return {"b": [torch.ones(1), None], "a": {1: torch.ones(1)}, "c": (torch.ones(1),)}


@pytest.mark.parametrize(
    "other",
    [
        {"a": {1: None}, "b": [None, None], "c": (None,)},
        {"b": [None, None], "a": {True: None}, "c": (None,)},
        {"b": [None, None], "a": {1: None}, "c": [None]},
        {"b": [None, None], "a": {1: None}, "d": (None,)},
        {"b": [None, None, None], "a": {1: None}, "c": (None,)},
        {"b": [None, None], "a": OrderedDict({1: None}), "c": (None,)},
        {"b": [None, [None]], "a": {1: None}, "c": (None,)},
        {"b": [None, None], "a": {1: None}},
        None,
    ],
)
def test_trees_that_are_nearly_alike(other: Any) -> None:
    known = KnownTrees()
    for tree in (filled(), filled(), other, filled()):
        found, treedef = known.flatten(tree)
        assert (found, treedef.paths) == (flatten(tree)[0], flatten(tree)[1].paths)
        assert repr(treedef.unflatten(found)) == repr(tree)


def test_structure_is_compiled_once_and_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownTrees()
    known.flatten(filled())
    slow: list[Any] = []
    monkeypatch.setattr("fddp.tree.cached.flatten", lambda tree: slow.append(tree) or flatten(tree))
    for _ in range(3):
        assert len(known.flatten(filled())[0]) == 4
    assert slow == []


def test_leaves_that_are_no_tensors_go_the_other_way() -> None:
    known = KnownTrees()
    assert known.flatten({"a": 1.0, "b": [2]})[0] == [1.0, 2]
    assert known.flatten({"a": torch.nn.Linear, "b": [{"c": 3}]})[0] == [torch.nn.Linear, 3]


def test_trees_that_keep_changing_are_no_longer_remembered() -> None:
    known = KnownTrees()
    for size in range(100):
        assert len(known.flatten([None] * size)[0]) == size
    assert known._memories < 50


def test_errors_of_gradients_are_as_before() -> None:
    import fddp

    def run(group: Any) -> None:
        tree = {"a": torch.ones(2), "b": torch.ones(3)}
        with fddp.GradSync(tree, group=group) as sync:
            for _ in range(3):
                assert sync(tree)["b"].tolist() == [1.0] * 3
                with pytest.raises(TreeMismatchError, match="missing: 'b'"):
                    sync({"a": torch.ones(2)})
                with pytest.raises(TreeMismatchError, match=r"leaf 'a' .* is a int"):
                    sync({"a": 1, "b": torch.ones(3)})
                swapped = sync({"b": torch.ones(3), "a": torch.ones(2)})
                assert list(swapped) == ["b", "a"]

    fddp.loopback(1, run)
