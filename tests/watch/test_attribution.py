"""Delays of real ranks, attributed to their rank and phase by a monitor."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fddp
from fddp.hooks import AllReduce, Bucket, BucketSpec, Future, Hook
from fddp.runtime import operations
from tests.support.backward_calls import call_in_backward
from tests.support.models import batch, mlp, mlp_loss
from tests.support.monitored import DELAY_S, STEPS, check_events
from tests.support.ranks import RankPool


@dataclass(frozen=True)
class Sluggish(Hook[tuple[()]]):
    """The plain sum, from a hook that is slow in the phase of `HERE`."""

    def init(self, spec: BucketSpec) -> tuple[()]:
        return ()

    def apply(
        self, state: tuple[()], bucket: Bucket, all_reduce: AllReduce
    ) -> Future[tuple[Tensor, tuple[()]]]:
        pause("hook" if bucket.spec.is_last else "hook in backward")

        def take(total: Tensor) -> tuple[Tensor, tuple[()]]:
            if bucket.spec.is_last:
                pause("end of hook")
            return total, state

        return all_reduce(bucket.buffer.clone()).map(take)


def delay_backward() -> None:
    time.sleep(DELAY_S)


HERE = {"where": ""}  # what takes longer on this rank
PHASE_OF = {
    "pack": "sync",
    "unpack": "sync",
    "pack in backward": "backward",
    "hook in backward": "hook",
    "end of hook": "hook",
    "before a pmean": "forward",
}


def pause(where: str) -> None:
    if HERE["where"] == where:
        time.sleep(DELAY_S)


def slow_parts() -> ExitStack:
    """Packing and unpacking pause, too."""
    pack, unpack = operations.pack, operations.unpack

    def packed(step: Any, position: int) -> None:
        is_last = step.program.schedule.ops[position].bucket == step.program.schedule.sequence[-1]
        pause("pack" if is_last else "pack in backward")
        pack(step, position)

    def unpacked(step: Any, position: int) -> None:
        if step.program.schedule.ops[position].bucket == 0:
            pause("unpack")
        unpack(step, position)

    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(operations, "pack", packed))
        patched.enter_context(mock.patch.object(operations, "unpack", unpacked))
        return patched.pop_all()


def loss(params: Any, x: Tensor) -> Tensor:
    pause("forward")
    value = mlp_loss(params, x)
    pause("before a pmean")
    if HERE["pmean"]:
        # Ranks that wait here for another's input or forward are not slow themselves.
        value = value + 0.0 * fddp.pmean(x.sum())
    return call_in_backward(value, delay_backward) if HERE["where"] == "backward" else value


def watched(rank: int, world_size: int, transport: str, cases: Sequence[tuple[int, str]]) -> Any:
    return [watched_once(rank, transport, slow, where) for slow, where in cases]


def watched_once(rank: int, transport: str, slow: int, where: str) -> Any:
    hook = Sluggish() if "hook" in where else None
    HERE.update(where="", pmean="pmean" if "pmean" in where else "")
    with (
        fddp.GradSync(mlp(), transport=transport, first_bucket_mb=1e-4, hook=hook) as sync,
        slow_parts(),
    ):
        assert sync.transport == transport
        assert len(sync.plan.buckets) > 1
        step = sync.value_and_grad(loss, with_info=True)
        step(mlp(), batch(rank, 0))
        HERE["where"] = where if slow == rank else ""
        monitor = fddp.watch.Monitor(sync)
        for number in range(STEPS):
            pause("input")
            with monitor.phase("update"):
                pause("update")
            _, _, info = step(mlp(), batch(rank, number))
            monitor.observe(info)
        report, trace = monitor.report(), monitor.trace()
    return slow, where, report.straggler, str(report), trace


@pytest.mark.parametrize(
    ("transport", "world_size"), [("shm", 3), pytest.param("c10d", 2, marks=pytest.mark.nightly)]
)
def test_a_delay_is_attributed_to_its_rank_and_phase(
    ranks: RankPool, transport: str, world_size: int
) -> None:
    last = world_size - 1
    cases = [(1, "input"), (0, "forward"), (last, "backward"), (0, "update"), (1, "pack")]
    cases += [(0, "pack in backward"), (last, "unpack"), (1, "hook"), (0, "hook in backward")]
    cases += [(last, "end of hook"), (1, "before a pmean")]
    outcome = ranks.run(world_size, watched, transport, cases)
    for found in outcome:
        for slow, where, straggler, text, trace in found:
            assert straggler is not None, f"{where}: {text}"
            phase = PHASE_OF.get(where, where)
            assert (straggler.rank, straggler.phase) == (slow, phase), f"{where}: {text}"
            assert straggler.behind_s > DELAY_S / 2, text
            assert straggler.phase_behind_s > DELAY_S / 2, text
            assert f"rank {slow} holds the others up by" in text
            names = [e["name"] for e in check_events(trace) if e["pid"] == slow]
            assert ("hook" in names) == ("hook" in where)
            assert set(names) >= {"input", "forward", "backward", "sync"}
    assert [case[3:] for case in outcome[0]] == [case[3:] for case in outcome[1]], (
        "alike on all ranks"
    )


def wrapped(rank: int, world_size: int, cases: Sequence[tuple[int, str]]) -> Any:
    found = []
    for slow, where in cases:
        model = fddp.DistributedDataParallel(Slow())
        assert model.sync_info is None
        HERE["where"] = where if slow == rank else ""
        monitor = fddp.watch.Monitor(model)
        for number in range(STEPS + 5):  # beyond those that DDP's log takes
            with model.no_sync():
                model(batch(rank, number)).square().mean().backward()
            if number:
                monitor.observe(model.sync_info)  # no news: passed over
            model(batch(rank, number)).square().mean().backward()
            monitor.observe(model.sync_info)
        assert [record.step for record in monitor.steps] == list(range(STEPS + 5))
        found.append((slow, where, monitor.report()))
    return found


class Slow(torch.nn.Linear):
    """Has its forward or backward pass take longer."""

    def __init__(self) -> None:
        super().__init__(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        pause("forward")
        value = super().forward(x)
        return call_in_backward(value, delay_backward) if HERE["where"] == "backward" else value


def test_delays_of_wrapped_modules_are_attributed(ranks: RankPool) -> None:
    for found in ranks.run(2, wrapped, [(1, "forward"), (0, "backward")]):
        for slow, where, report in found:
            straggler, text = report.straggler, str(report)
            assert straggler is not None, text
            # What micro-batches before the last take is in "input".
            assert straggler.rank == slow, text
            behind_s = {
                phase: report.ranks[slow].phases[phase].median_s
                - report.ranks[1 - slow].phases[phase].median_s
                for phase in ("input", where)
            }
            assert min(behind_s.values()) > DELAY_S / 2, text
            assert straggler.phase in behind_s
            assert straggler.behind_s > 1.5 * DELAY_S, text
