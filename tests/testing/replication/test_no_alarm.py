"""Steps in which state depends on the number of ranks, or on the rank, and is meant to."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad

import fddp
from fddp.testing import check_replication

PARAMS, BATCH = {"w": torch.ones(4), "b": torch.zeros(1)}, torch.rand(8, 4)


def gradients(params, batch):
    return grad(lambda p: (batch @ p["w"] + p["b"]).square().mean())(params)


def descend(params, grads, rate=0.1):
    return fddp.tree_map(lambda p, g: p - rate * g, params, grads)


def mean_of(params, batch):
    return fddp.pmean(gradients(params, batch))


# Meant, and found out


def scaled_rate(params, batch, group):
    return descend(params, mean_of(params, batch), 0.01 * group.size)


def running_moments(moments, batch):
    return {
        "count": moments["count"] + fddp.psum(torch.tensor(float(len(batch)))),
        "sum": moments["sum"] + fddp.psum(batch.sum(0)),
    }


def owned_leaves(params, batch, group):
    grads = mean_of(params, batch)
    after = {}
    for number, name in enumerate(params):
        root = number % group.size
        own = params[name] - 0.1 * grads[name] if group.rank == root else params[name]
        after[name] = fddp.broadcast_from(own, root)
    return after


def padded(params, rows):
    longest = int(fddp.pmax(torch.tensor(len(rows))))
    whole = torch.nn.functional.pad(rows, (0, 0, 0, longest - len(rows)))
    total = fddp.psum(whole)
    return {"w": params["w"] + total.mean(0) / fddp.psum(torch.tensor(1.0)), "b": params["b"]}


MOMENTS = {"count": torch.tensor(0.0), "sum": torch.zeros(4)}


@pytest.mark.parametrize(
    ("step", "state", "batch"),
    [
        (scaled_rate, PARAMS, BATCH),
        (running_moments, MOMENTS, BATCH),
        (owned_leaves, PARAMS, BATCH),
        (padded, PARAMS, lambda rank: BATCH[: 4 + 2 * rank]),
    ],
)
def test_correct_steps_pass(step: Callable[..., Any], state: Any, batch: Any) -> None:
    check_replication(step, replicated=(state,), varying=(batch,))


@pytest.mark.parametrize("ranks", [2, 3])
def test_lengths_that_a_maximum_makes_equal(ranks: int) -> None:
    own = lambda rank: BATCH[: 4 + 2 * rank]  # noqa: E731
    check_replication(padded, replicated=(PARAMS,), varying=(own,), ranks=ranks)

    def unpadded(params, rows):
        return {"w": params["w"] + fddp.pmean(rows).mean(0), "b": params["b"]}

    with pytest.raises(fddp.ReplicationError, match="different collective calls"):
        check_replication(unpadded, replicated=(PARAMS,), varying=(own,))


def test_a_mean_that_is_divided_again_is_no_learning_rate() -> None:
    def step(params, batch, group):
        return descend(params, mean_of(params, batch), 0.1 / group.size)

    with pytest.raises(fddp.ReplicationError, match="changes with the number of ranks"):
        check_replication(step, replicated=(PARAMS,), varying=(BATCH,))


def test_a_sum_that_is_read_is_no_count() -> None:
    def step(params, moments, batch):
        after = running_moments(moments, batch)
        grads = mean_of(params, batch - moments["sum"])
        return descend(params, grads), after

    with pytest.raises(fddp.ReplicationError, match=r"result\[1\]\['sum'\] changes with the n"):
        check_replication(step, replicated=(PARAMS, MOMENTS), varying=(BATCH,))


# Only read


@pytest.mark.parametrize(
    "constant",
    [PARAMS, 0.1, torch.Generator().manual_seed(0)],
    ids=["teacher", "rate", "generator"],
)
def test_what_is_only_read_has_no_result(constant: Any) -> None:
    def step(params, constant, batch):
        grads = mean_of(params, batch)
        return descend(params, grads), (batch @ params["w"]).mean()

    def unsynced(params, constant, batch):
        return descend(params, gradients(params, batch)), (batch @ params["w"]).mean()

    check_replication(step, replicated=(PARAMS, constant), varying=(BATCH,))
    with pytest.raises(fddp.ReplicationError, match=r"result\[0\]\['b'\]"):
        check_replication(unsynced, replicated=(PARAMS, constant), varying=(BATCH,))


# Meant, and allowed as the message says


def of_a_sum(params, batch):
    return descend(params, fddp.psum(gradients(params, batch)))


def with_residual(state, batch):
    grads = gradients(state["params"], batch)
    kept = fddp.tree_map(lambda g, r: g + r, grads, state["residual"])
    coarse = fddp.tree_map(torch.round, kept)
    residual = fddp.tree_map(lambda k, c: k - c, kept, coarse)
    return {"params": descend(state["params"], fddp.pmean(coarse)), "residual": residual}


def averaged_twice(params, batch):
    return descend(params, fddp.pmean(mean_of(params, batch)))


@pytest.mark.parametrize(
    ("step", "state", "named", "allow"),
    [
        (of_a_sum, PARAMS, "growth", "growth"),
        (averaged_twice, PARAMS, "repeats", "repeats"),
        (
            with_residual,
            {"params": PARAMS, "residual": fddp.tree_map(torch.zeros_like, PARAMS)},
            "result['residual.b']",
            "result['residual']",
        ),
    ],
)
def test_messages_name_what_to_allow(
    step: Callable[..., Any], state: Any, named: str, allow: str
) -> None:
    with pytest.raises(fddp.ReplicationError) as raised:
        check_replication(step, replicated=(state,), varying=(BATCH,))
    assert f"pass allow=[{named!r}]" in str(raised.value)
    check_replication(step, replicated=(state,), varying=(BATCH,), allow=[allow])


def test_what_is_allowed_hides_nothing_else() -> None:
    def step(params, batch):
        return descend(params, gradients(params, batch))

    for allow in (["growth"], ["repeats"], ["result['b']"]):
        with pytest.raises(fddp.ReplicationError, match="differs between ranks"):
            check_replication(step, replicated=(PARAMS,), varying=(BATCH,), allow=allow)
    with pytest.raises(ValueError, match="'grwoth' is neither 'growth', 'repeats' nor a path"):
        check_replication(step, replicated=(PARAMS,), varying=(BATCH,), allow=["grwoth"])
