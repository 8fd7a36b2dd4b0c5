"""Inputs as another rank may have them: all numbers vary, and stay valid."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad
from torch.nn.functional import cross_entropy

import fddp
from fddp.testing import check_replication
from tests.support.examples import examples

W, X = torch.ones(4, 3), torch.rand(8, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, -100, 1, 0, 2, -100])


def error_of(step: Callable[..., Any], *varying: Any) -> str:
    with pytest.raises(fddp.ReplicationError) as raised:
        check_replication(step, replicated=(W,), varying=varying)
    return str(raised.value)


def inputs_of_ranks(value: Any) -> list[Any]:
    """The input of two ranks."""
    seen = []

    def step(w, batch):
        seen.append(batch)
        return w

    check_replication(step, replicated=(W,), varying=(value,))
    return seen[:2]


def summed(w, x, labels):
    return cross_entropy(x @ w, labels, reduction="sum", ignore_index=-100)


# Faults that only counts show


def test_division_by_the_count_of_this_rank() -> None:
    def step(w, x, labels):
        grads = fddp.pmean(grad(summed)(w, x, labels))
        return w - grads / (labels != -100).sum()

    assert "it depends on `labels`" in error_of(step, X, LABELS)

    def equal(w, x, labels):
        grads = fddp.psum(grad(summed)(w, x, labels))
        return w - grads / fddp.psum((labels != -100).sum())

    check_replication(equal, replicated=(W,), varying=(X, LABELS))


def test_division_by_a_number_of_this_rank() -> None:
    def step(w, batch):
        x, n = batch
        return w - fddp.pmean(grad(lambda w: (x @ w).square().sum())(w)) / n

    assert "it depends on `batch`" in error_of(step, (X, 8))


def test_a_branch_on_a_count() -> None:
    def step(w, x, labels):
        grads = grad(summed)(w, x, labels)
        return w - (fddp.pmean(grads) if (labels != -100).sum() > 3 else grads)

    assert "ranks would make different collective calls" in error_of(step, X, LABELS)


def test_a_branch_on_a_number() -> None:
    def step(w, batch):
        x, n = batch
        grads = grad(lambda w: (x @ w).square().sum())(w)
        return w - (fddp.pmean(grads) if n > 4 else grads)

    assert "ranks would make different collective calls" in error_of(step, (X, 8))


def test_weights_of_classes_by_their_counts() -> None:
    def step(w, x, labels):
        counts = torch.bincount(labels[labels >= 0], minlength=3).float()
        return w - fddp.pmean(grad(summed)(w, x, labels)) / (1 + counts)

    assert "it depends on `labels`" in error_of(step, X, LABELS)


# Values


@examples(10)
@given(st.lists(st.integers(-100, 50), min_size=1, max_size=40).filter(lambda v: len(set(v)) > 1))
def test_integers_are_drawn_from_their_own(values: list[int]) -> None:
    own, other = inputs_of_ranks(torch.tensor(values))
    assert set(other.tolist()) <= set(values)
    assert sorted(other.tolist()) != sorted(own.tolist())


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (torch.tensor([1, 1, 1, 1]), [0, 1, 0, 1]),  # a mask
        (torch.tensor([0, 0, 0]), [1, 0, 1]),
        (torch.tensor([8, 8]), [7, 8]),  # lengths
        (torch.tensor(1), 2),  # a count
        (torch.tensor([True, True]), [False, True]),
        (torch.tensor(True), False),
        (np.array([3, 3]), [2, 3]),
        (np.int64(8), 7),
        (8, 7),
        (1, 2),
        (0, 1),
        (True, False),
        (0.0, 0.1),
    ],
)
def test_equal_numbers_get_neighbours(value: Any, other: Any) -> None:
    found = inputs_of_ranks(value)[1]
    assert getattr(found, "tolist", lambda: found)() == other
    assert type(found) is type(value)


def test_floating_point_zeros_get_small_values() -> None:
    zeros, other = inputs_of_ranks(torch.zeros(4))
    assert not zeros.any()
    assert ((other > 0) & (other < 0.1)).all()


def test_lists_of_labels_stay_labels() -> None:
    own, other = inputs_of_ranks({"labels": [0, 1, 1, 0, 1], "lengths": (3, 4)})
    assert set(other["labels"]) == {0, 1}
    assert sum(other["labels"]) != sum(own["labels"])
    assert other["lengths"] == (2, 3)


def test_what_is_no_number_stays() -> None:
    batch = {"x": X, "names": ["a", "b"], "none": None, "empty": torch.zeros(0, dtype=torch.long)}
    other = inputs_of_ranks(batch)[1]
    assert other["names"] == ["a", "b"]
    assert other["none"] is None
    assert other["empty"].shape == (0,)


def test_sparse_and_expanded_tensors() -> None:
    own, other = inputs_of_ranks([X.to_sparse(), X[:1].expand(3, 4)])
    assert not torch.equal(own[0].to_dense(), other[0].to_dense())
    assert not torch.equal(own[1], other[1])


class Batch:
    def __init__(self, x, n):
        self.x, self.n, self.whole = x, n, self


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    n: int


@pytest.mark.parametrize("kind", [Batch, Record])
def test_attributes_of_objects_vary(kind: Any) -> None:
    own, other = inputs_of_ranks([kind(X, 8)])
    assert (own[0].n, other[0].n) == (8, 7)
    assert not torch.equal(own[0].x, other[0].x)


def test_settings_of_a_loader_stay() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X), batch_size=4)
    own, other = inputs_of_ranks(loader)
    assert other.batch_size == 4
    assert other.num_workers == 0
    assert not torch.equal(next(iter(own))[0], next(iter(other))[0])


def test_sources_of_random_numbers_vary() -> None:
    own, other = inputs_of_ranks(
        [random.Random(0), np.random.default_rng(0), torch.Generator().manual_seed(0)]
    )
    assert own[0].random() != other[0].random()
    assert own[1].random() != other[1].random()
    assert own[2].initial_seed() != other[2].initial_seed()


def test_keys_of_jax_vary() -> None:
    import jax

    own, other = inputs_of_ranks(jax.random.key(0))
    assert jax.random.key_data(own).tolist() != jax.random.key_data(other).tolist()


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [(torch.full((2,), torch.nan), "Tensor"), ({1, 2}, "set"), (range(3), "range")],
)
def test_leaves_without_other_values_are_errors(leaf: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=rf"batch\['y'\] of type {kind} can't be given") as raised:
        check_replication(lambda w, batch: w, replicated=(W,), varying=({"x": X, "y": leaf},))
    assert "pass a function of the rank that returns `batch`" in str(raised.value)


def test_functions_of_the_rank_depend_on_it() -> None:
    with pytest.raises(ValueError, match="`x` has the same values for rank 0 and rank 1"):
        check_replication(lambda w, x: w, replicated=(W,), varying=(lambda rank: X,))
    check_replication(lambda w, x: w, replicated=(W,), varying=(partial(torch.add, X),))
