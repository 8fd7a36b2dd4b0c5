"""The page on recovery from lost ranks: its program, its loop and its sessions run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models import same_bits
from tests.support.pages import alone, run_script, run_sessions
from tests.support.ranks import run_fresh

LOST = 1


@pytest.mark.slow
@pytest.mark.nightly
def test_the_page_runs_on_two_ranks(tmp_path: Path) -> None:
    run_script("docs/going_on.md", tmp_path)


def loop_of_the_page(rank: int, world_size: int) -> Any:
    """The loop of the page's first block; rank 1 is killed in its sixth loss function."""
    page: dict[str, Any] = {}
    exec(alone("docs/going_on.md", "python").split("dist.init_process_group")[0], page)
    calls, loss_fn = [], page["loss_fn"]

    def dying(params: Any, x: Tensor) -> Tensor:
        calls.append(x)
        if rank == LOST and len(calls) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss_fn(params, x)

    page["loss_fn"] = dying
    zeros = {"w": torch.zeros(3, 1)}
    state, sync = page["train"]({"params": zeros, "momenta": zeros, "number": 0}, steps=9)
    return state, sync.world_size, len(calls)


def test_the_loop_of_the_page_loses_a_rank() -> None:
    outcomes = run_fresh(3, loop_of_the_page)
    assert outcomes[LOST].exitcode == -signal.SIGKILL
    (zero, size, calls), (two, *same) = outcomes[0].result, outcomes[2].result
    for part in ("params", "momenta"):
        assert same_bits([zero[part], two[part]])
    assert zero["number"] == two["number"] == 9
    assert [size, calls] == same == [2, 10], "the step that failed is taken again"


def test_sessions_of_the_page() -> None:
    failed, attempted = run_sessions("docs/going_on.md")
    assert attempted
    assert not failed
