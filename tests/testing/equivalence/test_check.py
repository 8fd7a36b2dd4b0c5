"""Errors and warnings of `check_equivalence`, the inputs it takes, and what it leaves unchanged."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import grad

import fddp
from fddp.testing import check_equivalence, check_replication
from tests.testing.equivalence.steps import batch_norm_module, micro_batches, rows
from tests.testing.replication.loops import descend, init_params, loss_fn

PARAMS, X = {"w": torch.ones(3)}, torch.linspace(-1.0, 1.0, 24).view(8, 3)


def loss(params, x):
    return (x @ params["w"]).square().mean()


def weighted(params, x):
    with fddp.GradSync(params) as sync:
        return descend(params, sync(grad(loss)(params, x), weight=len(x)))


def error_of(step: Any, state: Any = (PARAMS,), batch: Any = (X,), **options: Any) -> Any:
    with pytest.raises(fddp.EquivalenceError) as raised:
        check_equivalence(step, state, batch, **options)
    return raised.value


def test_the_text_names_leaf_ratio_parts_and_cause() -> None:
    def step(params, x, group):
        grads = grad(loss)(params, x)
        with fddp.GradSync(params, group=group) as sync:
            grads = sync(grads, weight=len(x))
        return descend(params, fddp.tree_map(lambda g: g * group.size, grads))

    error = error_of(step)
    assert str(error) == (
        "params['w'] changed 2 times as much as on one device after step 1, on 2 ranks with 3 and "
        "5 of 8 rows: it is summed over ranks where the mean is meant: the factor is 2, the number "
        "of ranks; write pmean for psum, or divide by group.size or by a sum over ranks"
    )
    assert error.path == "params['w']"
    assert error.ratio == pytest.approx(2.0)


def test_the_ratio_is_nan_where_changes_are_not_proportional() -> None:
    error = error_of(lambda params, x: descend(params, fddp.psum(grad(loss)(params, x))))
    assert math.isnan(error.ratio)


def test_more_ranks_and_other_parts() -> None:
    def only_on_three(params, x, group):
        factor = 1.0 + (group.size == 3)
        return fddp.tree_map(lambda p: factor * p, weighted(params, x))

    check_equivalence(only_on_three, (PARAMS,), (X,), parts=((1, 7), (1, 1, 1, 5)))
    assert "on 3 ranks with 1, 2 and 5 of 8 rows" in str(error_of(only_on_three))


def test_a_difference_in_the_second_step() -> None:
    def kept(params, momentum, x, group):
        mean = fddp.tree_map(lambda m: m * group.size, momentum)
        with fddp.GradSync(params) as sync:
            grads = sync(grad(loss)(params, x), weight=len(x))
        return descend(params, mean), grads

    error = error_of(kept, (PARAMS, {"w": torch.zeros(3)}))
    assert "after step 2" in str(error)
    assert error.path == "params['w']"


def test_rounding_in_float32_is_no_difference_and_adams_epsilon_is() -> None:
    def step(module, optimizer, x, group, factor=1.0):
        optimizer.zero_grad()
        count = fddp.psum(torch.tensor(len(x)))
        module(x).square().sum().backward()
        with torch.no_grad():
            for p in module.parameters():
                p.grad = factor * fddp.psum(p.grad) / count
        optimizer.step()

    def times_ranks(module, optimizer, x, group):
        step(module, optimizer, x, group, group.size)
        for p in module.parameters():
            optimizer.state[p]["exp_avg"].zero_()  # the parameters alone show it
            optimizer.state[p]["exp_avg_sq"].zero_()

    module = torch.nn.Linear(3, 2, bias=False)
    state = module, torch.optim.Adam(module.parameters())
    check_equivalence(step, state, (X,))
    assert error_of(times_ranks, state).path == "module['weight']"


def test_dtypes_that_the_step_insists_on() -> None:
    def step(params, x):
        assert params["w"].dtype == torch.float32
        return weighted(params, x)

    check_equivalence(step, (PARAMS,), (X,))

    def summed(params, x):
        assert params["w"].dtype == torch.float32
        return descend(params, fddp.psum(grad(loss)(params, x)))

    assert "the factor is 2" in str(error_of(summed))


def test_other_batches() -> None:
    def step(params, words):
        x = torch.stack([X[len(word)] for word in words]).to(params["w"].dtype)
        return weighted(params, x)

    def split(batch, ratios):
        (words,) = batch
        return [(words[rank :: len(ratios)],) for rank in range(len(ratios))]

    words = ["all", "these", "are", "words", "of", "a", "batch"]
    check_equivalence(step, (PARAMS,), (words,), split=split)

    def unweighted(params, words):
        x = torch.stack([X[len(word)] for word in words]).to(params["w"].dtype)
        return descend(params, fddp.pmean(grad(loss)(params, x)))

    assert "without split=" in str(error_of(unweighted, batch=(words,), split=split))


def test_the_bits_of_virtual_ranks() -> None:
    def step(params, batches):
        with fddp.GradSync(params, virtual_ranks=4) as sync:
            trees = sync.virtual_batches([grad(loss_fn)(params, batch) for batch in batches])
            grads = sync(trees, weight=[1.0] * len(trees))
        return descend(params, grads)

    def other_sum(params, batches):
        trees = [grad(loss_fn)(params, batch) for batch in batches]
        total = trees[0]
        for tree in trees[1:]:
            total = fddp.tree_map(torch.add, total, tree)
        return descend(params, fddp.tree_map(lambda g: g / 4, fddp.psum(total)))

    batch = (micro_batches(rows()),)
    options: dict[str, Any] = {"virtual_ranks": 4, "parts": ((1, 1, 1),)}
    check_equivalence(step, (init_params(0),), batch, **options)
    error = error_of(other_sum, (init_params(0),), batch, **options)
    assert "virtual ranks give the same bits if" in str(error)


def test_a_buffer_that_differs_is_a_warning() -> None:
    def step(module, optimizer, x, y):
        with torch.no_grad():
            module(x)
            for p in module.parameters():
                p += 1.0

    with pytest.warns(UserWarning, match=r"the buffer module\['1.running_mean'\] on 2 ranks"):
        check_equivalence(step, batch_norm_module(), rows(), parts=((3, 5),), steps=1)


def test_what_can_not_be_compared_is_an_error() -> None:
    noted = {"w": X, "note": np.array([object()])}
    with pytest.raises(TypeError, match=r"params\['note'\] of the state is a ndarray"):
        check_equivalence(lambda params, x: params, (noted,), (X,))
    with pytest.raises(TypeError, match="the batch is a object, which has no rows"):
        check_equivalence(weighted, (PARAMS,), (X, object()))
    with pytest.raises(ValueError, match="has no array with rows"):
        check_equivalence(weighted, (PARAMS,), (3,))
    with pytest.raises(ValueError, match=r"2 rows can't be divided over 2 ranks in the ratio 3:5"):
        check_equivalence(weighted, (PARAMS,), (X[:2],))
    with pytest.raises(ValueError, match="8 rows are no even parts on 3 ranks"):
        check_equivalence(weighted, (PARAMS,), (X,), parts=((1, 1, 1),))
    with pytest.raises(ValueError, match="the step changes nothing of its state"):
        check_equivalence(lambda params, x: None, (PARAMS,), (X,))


def test_a_step_that_does_not_do_the_same_twice() -> None:
    calls = []

    def step(params, x):
        calls.append(x)
        return fddp.tree_map(lambda p: p + len(calls), params)

    assert "does not do the same twice on one device" in str(error_of(step))


def test_errors_of_the_step_are_raised() -> None:
    def step(params, x):
        raise LookupError("no such key")

    with pytest.raises(LookupError, match="no such key"):
        check_equivalence(step, (PARAMS,), (X,))


def test_inputs_and_global_state_stay_as_they_were() -> None:
    def step(params, x):
        random.random(), np.random.rand(), torch.rand(3)
        with torch.no_grad():
            params["w"] += fddp.psum(x.sum(0))
            x.zero_()

    torch.manual_seed(3)
    params, x = {"w": torch.ones(3)}, X.clone()
    before = random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist()
    check_equivalence(step, (params,), (x,))
    after = random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist()
    assert after == before
    assert torch.get_default_dtype() == torch.float32
    assert params["w"].tolist() == [1.0, 1.0, 1.0]
    assert torch.equal(x, X)


class Trainer:
    """An object that holds all state, and is changed in place."""

    def __init__(self) -> None:
        self.w, self.rows = torch.ones(3), 0


@pytest.mark.parametrize("result", [None, 1.0, (1.0, 2.0)], ids=str)
def test_objects_changed_in_place_are_not_followed_by_other_results(result) -> None:
    def step(trainer, x):
        count = fddp.psum(torch.tensor(len(x)))
        grads = grad(lambda w: (x @ w).square().sum())(trainer.w)
        trainer.w = trainer.w - 0.1 * fddp.psum(grads) / count
        trainer.rows += int(count)
        return result

    check_equivalence(step, (Trainer(),), (X,))


def optimizer_of_closures() -> Any:
    module = torch.nn.Linear(3, 3)
    return module, torch.optim.LBFGS(module.parameters(), max_iter=2)


def test_lbfgs_is_copied_with_all_that_it_needs() -> None:
    def step(module, optimizer, x):
        count = fddp.psum(torch.tensor(len(x)))

        def closure():
            optimizer.zero_grad()
            total = module(x).square().sum()
            total.backward()
            for p in module.parameters():
                p.grad = fddp.psum(p.grad) / count
            return fddp.psum(total.detach()) / count

        optimizer.step(closure)

    check_equivalence(step, optimizer_of_closures(), (X,))
    check_replication(step, replicated=optimizer_of_closures(), varying=(X,))


def test_causes_in_state_of_one_rank() -> None:
    def counted(params, seen, x):
        return weighted(params, x), {"seen": seen["seen"] + len(x)}

    text = str(error_of(counted, (PARAMS, {"seen": torch.tensor(0.0)})))
    assert "each rank has a part of a sum" in text
    assert "0.375 and 0.625" in text

    def histogram(params, counts, x, words):
        return weighted(params, x), {"counts": counts["counts"] + words.bincount(minlength=4)}

    state = PARAMS, {"counts": torch.zeros(4, dtype=torch.int64)}
    assert "ranks differ from each other" in str(
        error_of(histogram, state, (X, torch.arange(8) % 4))
    )

    def near(params, state, x, group):
        ranks_apart = (1.0,) if group.size == 1 else (1.016, 0.992, 1.0)
        return weighted(params, x), {"best": torch.tensor(ranks_apart[group.rank])}

    assert "ranks differ from each other" in str(
        error_of(near, (PARAMS, {"best": torch.tensor(0.0)}))
    )


def test_a_sum_that_is_averaged_below_adam() -> None:
    def step(module, optimizer, x):
        optimizer.zero_grad()
        module(x).square().sum().backward()
        for p in module.parameters():
            p.grad = fddp.pmean(p.grad)
        optimizer.step()

    module = torch.nn.Linear(3, 3)
    state = module, torch.optim.Adam(module.parameters())
    assert "a sum over rows is averaged" in str(error_of(step, state))
