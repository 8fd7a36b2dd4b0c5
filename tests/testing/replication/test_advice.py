"""Advice of messages makes steps pass when it is followed; `advice.py` does so for all mutants."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import pytest
import torch
from torch.func import grad, grad_and_value
from torch.nn.functional import mse_loss

import fddp
from fddp.testing import check_replication
from tests.testing.replication.advice import LEAST_RIGHT, main, trials
from tests.testing.replication.loops import descend, init_params, loss_fn, make_batch, make_module

EVERY = 40  # mutants
PARAMS, BATCH = init_params(0), make_batch(0)


def in_one_statement(params, batch):
    return descend(params, grad(loss_fn)(params, batch))


def with_a_loss(params, batch):
    grads, loss = grad_and_value(loss_fn)(params, batch)
    return descend(params, grads), loss


def helper(params, batch):
    gradient = grad(loss_fn)(params, batch)
    return descend(params, gradient)


def in_a_helper(params, batch):
    return {"params": helper(params, batch)}


def through_leaves(params, batch):
    leaves = fddp.tree_map(lambda p: p.clone().requires_grad_(), params)
    loss_fn(leaves, batch).backward()
    grads = fddp.tree_map(lambda p: p.grad, leaves)
    return descend(params, grads)


@pytest.mark.parametrize(
    ("step", "where", "offset", "advice"),
    [
        (
            *(in_one_statement, in_one_statement, 1),
            "write fddp.pmean(grad(loss_fn)(params, batch)) for grad(loss_fn)(params, batch)",
        ),
        (with_a_loss, with_a_loss, 1, "write grads = fddp.pmean(grads) after it"),
        (in_a_helper, helper, 1, "write gradient = fddp.pmean(gradient) after it"),
        (through_leaves, through_leaves, 3, "write grads = fddp.pmean(grads) after it"),
    ],
)
def test_gradients_are_averaged_where_they_are_made(step, where, offset, advice) -> None:
    with pytest.raises(fddp.ReplicationError) as raised:
        check_replication(step, replicated=(PARAMS,), varying=(BATCH,))
    assert advice in str(raised.value)
    assert raised.value.line == f"{__file__}:{where.__code__.co_firstlineno + offset}"


def test_gradients_of_modules_are_averaged_after_backward() -> None:
    def step(module, optimizer, batch):
        loss = mse_loss(module(batch[0]), batch[1])
        loss.backward()
        optimizer.step()

    module = make_module(0)
    optimizer = torch.optim.AdamW(module.parameters())
    with pytest.raises(fddp.ReplicationError) as raised:
        check_replication(step, replicated=(module, optimizer), varying=(BATCH,))
    advice = "write for p in module.parameters(): p.grad = fddp.pmean(p.grad) after it"
    assert advice in str(raised.value)
    assert raised.value.line == f"{__file__}:{step.__code__.co_firstlineno + 2}"


@pytest.mark.slow
def test_most_advice_is_right_when_followed() -> None:
    tried = trials(every=EVERY)
    followed = [trial for trial in tried if trial.is_followed]
    assert len(followed) >= 10
    assert len(followed) >= 0.85 * len(tried)
    wrong = [trial for trial in followed if not trial.passes]
    # Of all mutants, LEAST_RIGHT of the advice is right; a sample of thirty may have one more.
    assert len(wrong) <= (1 - LEAST_RIGHT) * len(followed) + 1, wrong


@pytest.mark.nightly
def test_all_advice() -> None:
    assert main() == 0
