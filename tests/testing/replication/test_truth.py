"""Verdicts of steps on real ranks."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import pytest
from torch.func import grad

import fddp
from tests.testing.replication.loops.inputs import Loop, descend, init_params, loss_fn, make_batch
from tests.testing.replication.truth import truth_of, unlike_one_device


def averaged(params, x, y):
    return descend(params, fddp.pmean(grad(loss_fn)(params, (x, y))))


def local(params, x, y):
    return descend(params, grad(loss_fn)(params, (x, y)))


def summed(params, x, y):
    return descend(params, fddp.psum(grad(loss_fn)(params, (x, y))))


def on_one_rank(params, x, y, group):
    grads = grad(loss_fn)(params, (x, y))
    return descend(params, fddp.pmean(grads) if group.rank == 0 else grads)


def unless_large(params, x, y):
    grads = grad(loss_fn)(params, (x, y))
    return descend(params, grads if loss_fn(params, (x, y)) > 1e4 else fddp.pmean(grads))


def broken(params, x, y):
    return params["none"]


@pytest.mark.parametrize(
    ("fn", "verdict"),
    [
        *((averaged, "same"), (local, "parts"), (summed, "changes"), (on_one_rank, "hangs")),
        *((unless_large, "hangs"), (broken, "raises")),
    ],
)
def test_verdicts(fn, verdict):
    params, batch = init_params(0), make_batch(0, rows=8)
    truth = truth_of(Loop(fn, (params,), batch), Loop(averaged, (params,), batch))
    assert truth.verdict == verdict


def test_parts_of_a_batch():
    params, batch = (init_params(0),), make_batch(0, rows=8)
    assert unlike_one_device(averaged, params, batch, 2, is_even=True) == ""
    assert unlike_one_device(averaged, params, batch, 2) == "result 0 layers.0.bias"
