"""Times of the garbage collector."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fddp
from fddp.watch.pauses import collections_during
from tests.support.models import mlp
from tests.support.monitored import DELAY_S, check_events, check_steps_add_up


@pytest.fixture
def slow_collections() -> Iterator[None]:
    """Make each collection that `gc.collect` starts take long."""

    def pause(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            time.sleep(DELAY_S)

    gc.callbacks.append(pause)
    yield
    gc.callbacks.remove(pause)


class Owner:
    """Something that records collections."""


def test_collections_of_this_thread_are_recorded(slow_collections: None) -> None:
    owner, before = Owner(), len(gc.callbacks)
    found = collections_during(owner)
    assert len(gc.callbacks) == before + 1
    start_s = time.perf_counter()
    gc.collect()
    end_s = time.perf_counter()
    other = threading.Thread(target=gc.collect)
    other.start()
    other.join()
    (only,) = [each for each in found if each[1] - each[0] >= DELAY_S]
    assert start_s <= only[0] < only[1] <= end_s
    del owner
    assert len(gc.callbacks) == before


def test_collections_count_for_no_other_phase(slow_collections: None) -> None:
    """Neither in the step, nor between steps, in a named phase or not."""

    def run(group: Any) -> Any:
        params = mlp()

        def loss_fn(params: Any) -> Any:
            gc.collect()
            return sum(leaf.sum() for leaf in torch.utils._pytree.tree_leaves(params))

        with fddp.GradSync(params, group=group) as sync:
            step = sync.value_and_grad(loss_fn, with_info=True)
            monitor = fddp.watch.Monitor(sync)
            for _ in range(3):
                gc.collect()
                monitor.observe(step(params)[2])
                with monitor.phase("update"):
                    gc.collect()
            return monitor.steps, monitor.trace()

    steps, trace = fddp.loopback(1, run)[0]
    first, *others = (record.phases_s for record in steps)
    assert first["gc"] >= DELAY_S
    check_steps_add_up(steps)
    assert all(phases_s["gc"] >= 3 * DELAY_S for phases_s in others)
    names = [event["name"] for event in check_events(trace)]
    assert names.count("gc") >= 7
