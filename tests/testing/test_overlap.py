"""`assert_overlap` names the bucket that ran after backward, and what it waited for."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fddp
from fddp.core.timeline import BucketTimes, StepTimes
from fddp.testing import assert_overlap
from tests.support.polling import PROMPT_S

BACKWARD = {"backward_start_s": 10.0, "backward_end_s": 11.0}
# By bucket: ready, launched and done; then the times of the leaves "a", "b" and "c", whose buckets
# are 2, 1 and 0; and what the error says.
CASES: dict[str, tuple[list[tuple[float, float, float]], tuple[float, float, float], str]] = {
    "behind another": (
        [(10.9, 10.9, 11.1), (10.2, 10.9, 12.0), (10.95, 10.95, 11.2)],
        (10.95, 10.2, 10.9),
        "bucket 1 (b) ran for 1000.0 ms after backward: it was ready at 200.0 ms of 1000.0 ms, and "
        "waited for bucket 0 (c), which comes before it and was ready at 900.0 ms",
    ),
    "a late gradient": (
        [(10.1, 10.1, 10.2), (10.3, 10.3, 10.4), (11.0, 11.0, 12.5)],
        (11.0, 10.3, 10.1),
        "bucket 2 (a) ran for 1500.0 ms after backward: its last gradient, of 'a', came at 1000.0 "
        "ms of 1000.0 ms",
    ),
    "a busy link": (
        [(10.1, 10.1, 11.8), (10.2, 10.2, 12.8), (10.95, 10.95, 11.3)],
        (10.95, 10.2, 10.1),
        "bucket 1 (b) ran for 1800.0 ms after backward: it was sent at 200.0 ms of 1000.0 ms, and "
        "the link was busy with bucket 0 (c) until 1800.0 ms",
    ),
    "a slow link": (
        [(10.1, 10.1, 13.0), (10.2, 10.2, 10.3), (10.4, 10.4, 10.5)],
        (10.4, 10.2, 10.1),
        "bucket 0 (c) ran for 2000.0 ms after backward: it was sent at 100.0 ms of 1000.0 ms, and "
        "8 bytes took 2900.0 ms",
    ),
    "nothing": ([(math.nan,) * 3] * 3, (math.nan,) * 3, "no bucket was sent"),
}


def check(group: Any) -> None:
    params = {name: torch.ones(2) for name in "abc"}
    plan = fddp.plan_buckets(params, order=(2, 1, 0), bucket_cap_mb=1e-6, first_bucket_mb=1e-6)
    with fddp.GradSync(plan, group=group) as sync:
        _, info = sync(params, with_info=True)
        for buckets, leaves_s, text in CASES.values():
            times = StepTimes(
                tuple(BucketTimes(k, 8, *seconds) for k, seconds in enumerate(buckets)),
                end_s=13.0,
                leaves_s=leaves_s,
                **BACKWARD,
            )
            step = replace(info, timeline=times)
            with pytest.raises(AssertionError) as caught:
                assert_overlap(sync, step, 1.0)
            assert str(caught.value).endswith(text)
            assert_overlap(sync, step, 0.0)
        with pytest.raises(ValueError, match="fraction=2"):
            assert_overlap(sync, info, 2)


def test_the_error_names_bucket_and_reason() -> None:
    fddp.loopback(1, check)


def overlapping(group: Any, arrived: list[threading.Event], cap_mb: float) -> None:
    """Rank 0 sends its first bucket half a second before rank 1 does, and is within backward until
    rank 1 has sent it, too, whatever the clock says."""
    params = {"below": torch.ones(8, 8), "above": torch.ones(8, 8)}

    def loss_fn(params: Any, passed: threading.Event) -> Tensor:
        def wait(_: Tensor) -> None:
            if group.rank == 1:
                passed.set()
            assert passed.wait(PROMPT_S)

        y = torch.ones(2, 8) @ params["below"]
        y.register_hook(wait)
        return (y @ params["above"]).sum()

    options = {"bucket_cap_mb": cap_mb, "first_bucket_mb": cap_mb}
    with fddp.GradSync(params, group=group, **options) as sync:
        step = sync.value_and_grad(loss_fn, with_info=True)
        for passed in arrived:  # in the first step the plan is made
            if group.rank == 1:
                time.sleep(0.5)
            info = step(params, passed)[2]
        if group.rank == 0:
            assert_overlap(sync, info, 0.5)


def test_communication_with_a_late_rank_overlaps() -> None:
    fddp.loopback(2, overlapping, [threading.Event(), threading.Event()], 1e-4)


def test_a_single_bucket_does_not_overlap() -> None:
    with pytest.raises(AssertionError, match="its last gradient, of 'below', came at"):
        fddp.loopback(2, overlapping, [threading.Event(), threading.Event()], 1.0)
