"""Runs of one function on the device, with the delays of several seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests import lag
from tests.support.ranks import run_fresh

if TYPE_CHECKING:
    from collections.abc import Callable

SEEDS = range(20)


def on_device(fn: Callable[..., None], *args: Any) -> None:
    """Run a function of the device in a process of its own."""
    (outcome,) = run_fresh(1, call_on_rank, fn, args)
    assert outcome.error is None, outcome.error
    assert outcome.exitcode == 0


def call_on_rank(rank: int, world_size: int, fn: Callable[..., None], args: Any) -> None:
    lag.load()
    fn(torch.device("lag", 0), *args)


def wrong_seeds(run: Callable[[], torch.Tensor], expected: float) -> int:
    """Number of seeds with which a run gives another sum than expected."""
    count = 0
    for seed in SEEDS:
        lag.load().seed(seed)
        count += run().sum().item() != expected
    return count


def check_order(
    lagging: torch.device, run: Callable[..., torch.Tensor], name: str, expected: float
) -> None:
    """Check that a run is right with the keyword `name`, and is seen to be wrong without it."""
    assert wrong_seeds(lambda: run(lagging, **{name: True}), expected) == 0
    # Most seeds on an idle machine, fewer on a busy one.
    assert wrong_seeds(lambda: run(lagging, **{name: False}), expected) > 0
