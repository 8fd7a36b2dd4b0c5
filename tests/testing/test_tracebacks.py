"""Tracebacks of failed assertions begin and end in the user's test."""

from __future__ import annotations

import dataclasses
import traceback
from typing import Any

import pytest
import torch

import fddp
from fddp import testing


def mean_of_one(group: Any) -> None:
    trees = [{"w": torch.full((3,), float(rank))} for rank in range(2)]
    with fddp.GradSync(trees[0], group=group) as sync:
        testing.assert_mean(sync, trees, through=lambda grads: grads)


def wrong_derivative(group: Any) -> None:
    x = torch.ones(2, dtype=torch.float64)
    testing.check_gradients(lambda x: x.detach() * x.sum(), x, group)


def incomplete() -> None:
    schedule = fddp.make_schedule(fddp.plan_buckets({"w": torch.zeros(4)}), 2)
    testing.assert_schedule_ok(dataclasses.replace(schedule, ops=schedule.ops[:-1]))


@pytest.mark.parametrize(
    ("call", "last"),
    [
        (lambda: fddp.loopback(2, mean_of_one), "mean_of_one"),
        (lambda: fddp.loopback(2, wrong_derivative), "wrong_derivative"),
        (incomplete, "incomplete"),
    ],
)
def test_own_frames_are_hidden(call: Any, last: str) -> None:
    with pytest.raises(AssertionError) as caught:
        call()
    assert caught.value.__traceback__ is not None
    shown = [
        frame.f_code.co_name
        for frame, _ in traceback.walk_tb(caught.value.__traceback__)
        if "__tracebackhide__" not in frame.f_locals
    ]
    assert shown[0] == "test_own_frames_are_hidden"
    assert shown[-1] == last
    assert {*shown} <= {"test_own_frames_are_hidden", "<lambda>", last}
