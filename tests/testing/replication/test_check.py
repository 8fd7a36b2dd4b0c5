"""Errors of `check_replication`: what differs, through which line, and what to write."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import grad
from torch.nn.functional import dropout, mse_loss

import fddp
from fddp.testing import check_replication
from tests.testing.replication.loops import (
    descend,
    init_params,
    jax_batches,
    jax_params,
    loss_fn,
    make_batch,
    make_module,
)


def error_of(
    step: Callable[..., Any], replicated: tuple[Any, ...] = (), varying: tuple[Any, ...] = ()
) -> fddp.ReplicationError:
    with pytest.raises(fddp.ReplicationError) as raised:
        check_replication(step, replicated=replicated, varying=varying)
    return raised.value


def line_of(step: Callable[..., Any], offset: int) -> str:
    return f"{__file__}:{step.__code__.co_firstlineno + offset}"


def local(params, batch):
    grads = grad(loss_fn)(params, batch)
    return descend(params, grads)


def averaged(params, batch):
    grads = fddp.pmean(grad(loss_fn)(params, batch))
    return descend(params, grads)


PARAMS, BATCH = init_params(0), make_batch(0)
RESULT = "result['layers.0.bias']"


def test_a_gradient_that_nobody_averages() -> None:
    error = error_of(local, (PARAMS,), (BATCH,))
    assert error.path == RESULT
    assert error.line == line_of(local, 1)
    assert str(error) == (
        f"{RESULT} (and 3 leaves more) differs between ranks: it depends on `batch` through\n"
        f"  grads = grad(loss_fn)(params, batch)      {line_of(local, 1)}\n"
        f"and no collective makes it equal; write grads = fddp.pmean(grads) after it, or average "
        f"by a GradSync. If it may differ, pass allow=[{RESULT!r}]"
    )


def test_a_leaf_left_out() -> None:
    def step(params, batch):
        grads = grad(loss_fn)(params, batch)
        first, last = grads["layers"]
        return descend(
            params, {"layers": [fddp.pmean(first), last | fddp.pmean({"bias": last["bias"]})]}
        )

    error = error_of(step, (PARAMS,), (BATCH,))
    assert error.path == "result['layers.1.weight']"
    assert error.line == line_of(step, 1)


def test_the_line_is_that_of_the_function_that_the_step_calls() -> None:
    def step(params, batch):
        after = local(params, batch)
        return {"after": after}

    assert error_of(step, (PARAMS,), (BATCH,)).line == line_of(local, 1)


def test_parameters_that_are_not_broadcast() -> None:
    error = error_of(averaged, (), (init_params, BATCH))
    assert error.path == RESULT
    assert "it depends on `params`" in str(error)
    error = error_of(averaged, (), (PARAMS, BATCH))
    assert "write params = fddp.broadcast(params) before the first step" in str(error)


def test_modules_and_optimizers_are_checked_after_the_step() -> None:
    def step(module, optimizer, batch):
        ddp = fddp.DistributedDataParallel(module, local_gradients="allow")
        loss = mse_loss(ddp.module(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    module = make_module(0)
    optimizer = torch.optim.AdamW(module.parameters())
    error = error_of(step, (module, optimizer), (BATCH,))
    assert error.path == "module['0.bias']"
    assert error.line == line_of(step, 3)
    assert "p.grad = fddp.pmean(p.grad) after it" in str(error)
    assert all(p.grad is None for p in module.parameters())
    assert not optimizer.state


def test_a_second_mean() -> None:
    def step(params, batch):
        grads = fddp.pmean(grad(loss_fn)(params, batch))
        grads = fddp.pmean(grads)
        return descend(params, grads)

    error = error_of(step, (PARAMS,), (BATCH,))
    assert error.line == line_of(step, 2)
    assert "equal on all ranks already: the factor is 1, a second mean" in str(error)
    assert line_of(step, 1) in str(error)


def test_a_mean_of_values_that_were_equal_from_the_start() -> None:
    def step(params, batch):
        params = fddp.pmean(params)
        return descend(params, fddp.pmean(grad(loss_fn)(params, batch)))

    error = error_of(step, (PARAMS,), (BATCH,))
    assert error.line == line_of(step, 1)
    assert "equal on all ranks already: the factor is 1, a second mean" in str(error)


def test_a_second_sum() -> None:
    def step(params, batch):
        grads = fddp.pmean(grad(loss_fn)(params, batch))
        return descend(params, fddp.psum(grads))

    assert "the factor is the number of ranks" in str(error_of(step, (PARAMS,), (BATCH,)))


def test_a_sum_in_place_of_a_mean() -> None:
    def step(params, batch):
        return descend(params, fddp.psum(grad(loss_fn)(params, batch)))

    error = error_of(step, (PARAMS,), (BATCH,))
    assert error.path == RESULT
    assert error.line == line_of(step, 1)
    assert "changes with the number of ranks" in str(error)

    def divided(params, batch, group):
        grads = fddp.psum(grad(loss_fn)(params, batch))
        return descend(params, fddp.tree_map(lambda g: g / group.size, grads))

    check_replication(divided, replicated=(PARAMS,), varying=(BATCH,))


def _if_small(params, batch):
    grads = grad(loss_fn)(params, batch)
    if loss_fn(params, batch).item() < 1e3:
        grads = fddp.pmean(grads)
    return descend(params, grads)


def _if_finite(params, batch):
    grads = grad(loss_fn)(params, batch)
    if torch.isfinite(loss_fn(params, batch)):
        grads = fddp.pmean(grads)
    return descend(params, grads)


@pytest.mark.parametrize("step", [_if_small, _if_finite])
def test_collectives_that_depend_on_a_number_of_one_rank(step: Callable[..., Any]) -> None:
    error = error_of(step, (PARAMS,), (BATCH,))
    assert error.line == line_of(step, 3)
    assert "ranks would make different collective calls" in str(error)
    if step is _if_small:
        assert f"read at {line_of(step, 2)}" in str(error)


def test_decisions_that_no_extreme_input_changes() -> None:
    def step(params, batch):
        grads = fddp.pmean(grad(loss_fn)(params, batch))
        if batch[0][0, 0].sigmoid().item() > 0.9999:
            fddp.pmean(loss_fn(params, batch))
        return descend(params, grads)

    error = error_of(step, (PARAMS,), ((-BATCH[0].abs(), BATCH[1]),))
    assert "ranks would make different collective calls" in str(error)
    assert f"read at {line_of(step, 2)}" in str(error)


def test_numbers_that_are_equal_on_all_ranks_may_decide() -> None:
    def step(params, batch):
        grads = fddp.pmean(grad(loss_fn)(params, batch))
        loss = loss_fn(params, batch)
        print(loss.item(), bool(loss > 3))
        if torch.isfinite(fddp.pmean(loss)) and fddp.pmean(loss).item() < 1e3:
            grads = fddp.tree_map(torch.add, grads, fddp.pmean(grad(loss_fn)(params, batch)))
        return descend(params, grads)

    check_replication(step, replicated=(PARAMS,), varying=(BATCH,))


def test_collectives_that_depend_on_the_rank() -> None:
    def step(params, batch, group):
        grads = fddp.pmean(grad(loss_fn)(params, batch), group)
        if group.rank == 0:
            fddp.pmean(loss_fn(params, batch), group)
        return descend(params, grads)

    error = error_of(step, (PARAMS,), (BATCH,))
    assert error.line == line_of(step, 3)
    assert "depends on the rank" in str(error)


def test_random_numbers_without_a_shared_seed() -> None:
    def step(params, batch):
        grads = fddp.pmean(grad(loss_fn)(params, batch))
        noisy = fddp.tree_map(lambda g: g + torch.randn(g.shape), grads)
        return descend(params, noisy)

    error = error_of(step, (PARAMS,), (BATCH,))
    assert "random numbers without a shared seed" in str(error)
    assert error.line == line_of(step, 2)

    def seeded(params, generator, batch):
        grads = fddp.pmean(grad(loss_fn)(params, batch))
        noise = lambda g: g + torch.randn(g.shape, generator=generator)  # noqa: E731
        return descend(params, fddp.tree_map(noise, grads)), generator

    generator = torch.Generator().manual_seed(0)
    check_replication(seeded, replicated=(PARAMS, generator), varying=(BATCH,))

    def dropped_out(params, batch):
        x, y = batch
        return descend(params, fddp.pmean(grad(loss_fn)(params, (dropout(x), y))))

    check_replication(dropped_out, replicated=(PARAMS,), varying=(BATCH,))


def test_buffers_are_a_warning() -> None:
    def step(module, batch):
        ddp = fddp.DistributedDataParallel(module)
        ddp(batch[0]).sum().backward()

    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    with pytest.warns(UserWarning, match=r"buffer module\['1.running_mean'\] and 1 other"):
        check_replication(step, replicated=(module,), varying=(BATCH,))


def test_steps_in_jax() -> None:
    import jax

    from tests.testing.replication.loops import jax_loss

    def step(params, batch):
        grads = jax.grad(jax_loss)(params, batch)
        return fddp.tree_map(lambda p, g: p - 0.1 * g, params, grads)

    error = error_of(step, (jax_params(),), (jax_batches(0)[0],))
    assert error.path == "result['bias']"
    assert error.line == line_of(step, 1)


def test_nothing_is_left_behind() -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    generator = torch.Generator().manual_seed(3)
    before = [tensor.clone() for tensor in BATCH], generator.get_state()

    def step(params, batch, generator):
        random.random()
        torch.rand(3), torch.rand(3, generator=generator)
        np.random.random()
        batch[0].zero_()
        return local(params, batch)

    error_of(step, (PARAMS,), (BATCH, generator))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
    assert torch.equal(generator.get_state(), before[1])
    assert all(map(torch.equal, BATCH, before[0]))
    assert sys.gettrace() is None or "coverage" in repr(sys.gettrace())


def test_state_that_is_not_passed() -> None:
    counts = [0.0]

    def step(params, batch):
        counts[0] += 1.0
        return fddp.tree_map(lambda p: p + counts[0], params)

    assert "it does not do the same twice" in str(error_of(step, (PARAMS,), (BATCH,)))


def test_values_that_are_equal_by_accident() -> None:
    def signs(params, batch):
        return descend(params, fddp.tree_map(torch.sign, grad(loss_fn)(params, batch)))

    x, y = BATCH
    close = x, y + 100.0  # gradients of biases have one sign, whatever the batch is
    error = error_of(lambda params, batch: signs(params, batch), (PARAMS,), (close,))
    assert "it depends on `batch`" in str(error)

    def zeros(params, batch):
        loss = fddp.pmean((batch[0] @ params).sigmoid().log().mean())
        return (
            params - fddp.pmean(grad(lambda p: (batch[0] @ p).square().mean())(params) + 0.5) + loss
        )

    check_replication(zeros, replicated=(torch.zeros(4),), varying=(BATCH,))


def test_sums_that_are_no_state() -> None:
    def step(params, batch):
        total = fddp.psum(batch[0].abs().sum())
        grads = fddp.pmean(grad(loss_fn)(params, batch))
        return {"params": descend(params, grads), "total": total}

    check_replication(step, replicated=(PARAMS,), varying=(BATCH,))


def test_a_bucket_that_no_input_reaches_may_be_averaged() -> None:
    def step(params, batch):
        with fddp.GradSync(params, bucket_cap_mb=1e-6, first_bucket_mb=1e-6) as sync:
            grads = sync(grad(lambda p: p["a"].square().sum() + (p["b"] * batch[0]).sum())(params))
        return fddp.tree_map(lambda p, g: p - 0.1 * g, params, grads)

    params = {"a": torch.rand(4), "b": torch.rand(4)}
    check_replication(step, replicated=(params,), varying=(BATCH,))


def test_one_line_may_read_and_agree() -> None:
    def step(params, batch):
        grads = fddp.pmean(grad(loss_fn)(params, batch))
        if fddp.pmax(torch.tensor(float(loss_fn(params, batch).item() > 1e6))).item():
            grads = fddp.pmean(grads)
        return descend(params, grads)

    check_replication(step, replicated=(PARAMS,), varying=(BATCH,))


def test_arguments() -> None:
    with pytest.raises(ValueError, match="`batch` has no numbers that can be changed"):
        check_replication(lambda p, batch: p, replicated=(PARAMS,), varying=("a text",))
    with pytest.raises(ValueError, match="replicas are at least two"):
        check_replication(averaged, replicated=(PARAMS,), varying=(BATCH,), ranks=1)


def test_errors_of_the_step_are_its_own() -> None:
    def step(params, batch):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        check_replication(step, replicated=(PARAMS,), varying=(BATCH,))

    def picky(params, order):
        assert order.tolist() == sorted(order.tolist())
        return params

    error = error_of(picky, (PARAMS,), (torch.arange(5),))
    assert "pass a function of the rank" in str(error)
    check_replication(picky, replicated=(PARAMS,), varying=(lambda rank: torch.arange(5) + rank,))
