"""`check_replication` ends, whatever loops its inputs make."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad

import fddp
from fddp.testing import check_replication

W, X = torch.ones(3), torch.rand(8, 3, generator=torch.Generator().manual_seed(0))


def averaged(w, x):
    return w - 0.1 * fddp.pmean(grad(lambda w: (x @ w).square().mean())(w))


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import what `averaged` needs, which takes longer than the limits below."""
    check_replication(averaged, replicated=(W,), varying=(X,))


def endless_in_torch(w, x):
    while x.sum() > -1:
        x = x.abs()
    return averaged(w, x)


def endless_in_python(w, x):
    number = 0
    while number >= 0:
        number += 1
    return averaged(w, x)


def endless_that_handles_errors(w, x):
    while True:
        try:
            math.sqrt(x.sum() - 1e9)
        except Exception:
            continue


ENDLESS = [endless_in_torch, endless_in_python, endless_that_handles_errors]


def check_ends(step: Callable[..., Any]) -> None:
    with pytest.raises(fddp.ReplicationError) as raised:
        check_replication(step, replicated=(W,), varying=(X,), limit_s=0.3)
    filename, _, line = raised.value.line.rpartition(":")
    first = step.__code__.co_firstlineno
    assert filename == __file__
    assert first < int(line) < first + 6
    limits = "within 0.3 s of CPU time (limit_s) and 1000000 calls of torch"
    assert f"did not end {limits}; it was at {raised.value.line}" in str(raised.value)


@pytest.mark.parametrize("step", ENDLESS)
def test_a_run_that_does_not_end_is_an_error_with_its_line(step: Callable[..., Any]) -> None:
    check_ends(step)


def test_other_threads_have_limits_too() -> None:
    errors: list[BaseException] = []

    def check() -> None:
        try:
            check_ends(endless_in_python)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=check)
    thread.start()
    thread.join()
    assert not errors


def test_a_run_as_another_rank_that_does_not_end() -> None:
    def step(w, x):
        while x.max() < 0.93:  # numbers of another rank are smaller
            x = x.abs()
        return averaged(w, x)

    with pytest.raises(fddp.ReplicationError, match="did not end within") as raised:
        check_replication(step, replicated=(W,), varying=(X / X.max(),), limit_s=0.3)
    assert raised.value.line.startswith(__file__)


# Loops that only extreme inputs, or other numbers than those read, make endless


def fixed_point(w, x):
    while not (x - x.cos()).abs().max() < 1e-3:  # never of NaN
        x = x.cos()
    return averaged(w, x)


def backtracking(w, x):
    size = 1.0
    while not ((x @ (w - size)).square().sum() < (x @ w).square().sum()).item():
        size /= 2
    return averaged(w, x * size)


def as_often_as_a_value(w, x):
    for _ in range(int(100 * x.sum())):
        x = x + 0.01
    return averaged(w, x)


def in_python(w, x):
    number = (1 + x.sum()).item()
    while not number < 1:  # never of NaN
        number /= 2
    return averaged(w, x)


LOOPS = [fixed_point, backtracking, as_often_as_a_value, in_python]


@pytest.mark.parametrize("step", LOOPS)
def test_loops_that_extreme_inputs_make_endless_pass(step: Callable[..., Any]) -> None:
    check_replication(step, replicated=(W,), varying=(X,))


def test_what_precedes_an_endless_loop_counts() -> None:
    def step(w, x):
        agree = fddp.pmean if torch.isfinite(x).all() else fddp.pmax
        w = w - agree(x.sum())
        while not x.sum() < 1:
            x = x / 2
        return averaged(w, x)

    with pytest.raises(fddp.ReplicationError, match="would make different collective calls"):
        check_replication(step, replicated=(W,), varying=(X,))


def test_no_exception_and_no_thread_is_left() -> None:
    before = {*threading.enumerate()}
    for _ in range(3):
        with pytest.raises(fddp.ReplicationError):
            check_replication(endless_in_python, replicated=(W,), varying=(X,), limit_s=0.1)
    check_replication(averaged, replicated=(W,), varying=(X,))
    for thread in threading.enumerate():
        if thread.name == "fddp-check-limit":
            thread.join()
    # "fddp-closer" ends by itself, and begins again if it is needed.
    assert before.issuperset(each for each in threading.enumerate() if each.name != "fddp-closer")
