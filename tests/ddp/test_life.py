"""Events of real runs, replayed through the table of a step's life."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc
from torch.utils.checkpoint import checkpoint

import fddp
from fddp.core.protocol.lifecycle import BETWEEN, Event, Life, advance
from fddp.ddp.parameters import HookedParameters
from fddp.runtime.contributions import BackwardContributions
from fddp.runtime.step import Step
from tests.support.groups import init_rpc
from tests.support.ranks import run_fresh
from tests.support.wrapped_net import DDP, TINY_CAP_MB, WIDTH, Net, batch, net

pytestmark = [
    pytest.mark.filterwarnings("ignore:the step of an aborted backward"),
    pytest.mark.filterwarnings("ignore:find_unused_parameters=True"),
]


def states(events: Sequence[Event]) -> list[str]:
    """The states that a run goes through. The last one must be between steps."""
    life, found = Life(), []
    for event in events:
        life, _ = advance(life, event)
        found.append(life.name)
    assert life.name in BETWEEN
    return found


# Wrapped modules

Program = Callable[[Any, int], object]


def plain(ddp: Any, rank: int) -> None:
    for step in range(2):
        ddp(batch(rank, step)).square().mean().backward()


def no_gradient_on_a_rank(ddp: Any, rank: int) -> None:
    plain(ddp, rank)
    x = batch(rank).requires_grad_()
    ddp(x, through=(0, 1, 2) if rank else ()).square().mean().backward()


def gradients_of_inputs(ddp: Any, rank: int) -> None:
    x = batch(rank).requires_grad_()
    torch.autograd.grad(ddp(x).square().mean(), x)
    plain(ddp, rank)


def accumulated(ddp: Any, rank: int) -> None:
    with ddp.no_sync():
        plain(ddp, rank)
    plain(ddp, rank)


def aborted(ddp: Any, rank: int) -> None:
    ddp.module.fails_in_backward = rank == 1
    with contextlib.suppress(ValueError, fddp.PeerError):
        plain(ddp, rank)
    ddp.module.fails_in_backward = False
    plain(ddp, rank)


def aborted_unseen(ddp: Any, rank: int) -> None:
    """A thread of a device frees the pass just after the next forward pass has looked for it."""
    ddp.module.fails_in_backward = rank == 1
    loss = ddp(batch(rank)).square().mean()
    ddp.module.fails_in_backward = False
    settle = ddp.steps.settle

    def settle_before() -> None:
        settle()
        del ddp.steps.settle
        with contextlib.suppress(ValueError):
            loss.backward()

    if rank == 1:
        ddp.steps.settle = settle_before
    else:
        with contextlib.suppress(fddp.PeerError):
            loss.backward()
    plain(ddp, rank)


def raised_in_step(ddp: Any, rank: int) -> None:
    plain(ddp, rank)
    with contextlib.suppress(ValueError, fddp.PeerError), ddp.in_step():
        loss = ddp(batch(rank)).square().mean()
        if rank == 1:
            raise ValueError("no loss here")
        loss.backward()
    plain(ddp, rank)


def aborted_in_step(ddp: Any, rank: int) -> None:
    ddp.module.fails_in_backward = rank == 1
    with contextlib.suppress(ValueError, fddp.PeerError), ddp.in_step():
        ddp(batch(rank)).square().mean().backward()


def finalized(ddp: Any, rank: int) -> None:
    ddp.require_manual_backward_finalization = True
    for step in range(2):
        ddp(batch(rank, step)).square().mean().backward()
        with contextlib.suppress(RuntimeError):
            ddp(batch(rank))
        ddp.finalize_backward()
        with contextlib.suppress(RuntimeError):
            ddp.finalize_backward()


def raised_before_it_was_finalized(ddp: Any, rank: int) -> None:
    ddp.require_manual_backward_finalization = True
    with contextlib.suppress(ValueError, fddp.PeerError), ddp.in_step():
        ddp(batch(rank)).square().mean().backward()
        if rank == 1:
            raise ValueError("no update here")
        ddp.finalize_backward()


def left_out(ddp: Any, rank: int) -> None:
    ddp.require_manual_backward_finalization = True
    ddp(batch(rank)).square().mean().backward()
    ddp.module(batch(rank)).sum().backward()
    with contextlib.suppress(RuntimeError):
        ddp.finalize_backward()


def uneven(ddp: Any, rank: int) -> None:
    with ddp.join():
        for step in range(1 + rank):
            ddp(batch(rank, step)).square().mean().backward()


def replaced(ddp: Any, rank: int) -> None:
    plain(ddp, rank)
    ddp.module.layers["l0"].bias = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
    plain(ddp, rank)


def lost(ddp: Any, rank: int) -> None:
    loss = ddp(batch(rank)).square().mean()
    if rank == 1:
        return
    with contextlib.suppress(fddp.RankLostError):
        loss.backward()
    loss = ddp(batch(rank)).square().mean()
    with contextlib.suppress(fddp.errors.ClosedError):
        loss.backward()


class Recomputed(Net):
    """A net of re-entrant checkpoints."""

    def forward(self, x: Tensor, through: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        for i in through:
            layer: nn.Module = self.layers[f"l{i}"]
            x = checkpoint(layer, x, use_reentrant=True, preserve_rng_state=False)
        return x


def recomputed(ddp: Any, rank: int) -> None:
    for _ in range(2):
        ddp(batch(rank).requires_grad_()).square().mean().backward()


def closed(ddp: Any, rank: int) -> None:
    plain(ddp, rank)
    ddp.steps.close()


STEP = ["idle", "expected", "reached", "open", "complete", "ended"]
FAILED = [*STEP[:-1], "failed"]
OPEN, ENDED = STEP[:4], STEP[4:]

# The states of both ranks, without repetitions.
RUNS: list[tuple[Program, list[str], list[str]]] = [
    (plain, STEP * 2, STEP * 2),
    (accumulated, STEP * 2, STEP * 2),
    (gradients_of_inputs, [*STEP[:2], "touched", "expected", *STEP * 2], []),
    (no_gradient_on_a_rank, [*STEP * 2, *STEP[:3], *ENDED], STEP * 3),
    (aborted, [*FAILED, *STEP * 2], [*OPEN, "aborted", "failing", "failed", *STEP * 2]),
    (aborted_unseen, [], [*OPEN, "aborted", "failing", "failed", *STEP * 2]),
    (aborted_in_step, FAILED, [*OPEN, "aborted", "failing", "failed"]),
    (raised_in_step, [], [*STEP * 2, *STEP[:2], "failing", "failed", *STEP * 2]),
    (finalized, [*OPEN, "suspended", *ENDED] * 2, [*OPEN, "suspended", *ENDED] * 2),
    (raised_before_it_was_finalized, [], [*OPEN, "suspended", "dropping", "failed"]),
    (left_out, [*OPEN, "suspended", "dropping", "ended"], []),
    (uneven, [*STEP, "joining", "ended"], STEP * 2),
    (replaced, STEP * 4, STEP * 4),
    (recomputed, STEP * 2, STEP * 2),
    (lost, [*STEP[:5], "broken", *OPEN, "unopened", "idle"], STEP[:2]),
    (closed, [*STEP * 2, "broken"], [*STEP * 2, "broken"]),
]


@pytest.mark.parametrize(
    ("program", "first", "second"), RUNS, ids=lambda value: getattr(value, "__name__", "-")
)
def test_runs_of_a_wrapped_module(program: Program, first: list[str], second: list[str]) -> None:
    def run(group: Any) -> list[Event]:
        model = Recomputed() if program is recomputed else net()
        ddp = DDP(model, process_group=group, bucket_cap_mb=TINY_CAP_MB)
        ddp.steps.trace = events = []
        program(ddp, group.rank)
        ddp.steps.settle()
        return events

    traces = fddp.loopback(2, run)
    for events, expected in zip(traces, (first, second), strict=True):
        found = [state for state, _ in itertools.groupby(states(events))]
        assert found == expected or not expected
    if program is replaced:
        assert all(events.count("reported change") == 1 for events in traces)


def test_an_interrupted_action_closes_the_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the other ranks would wait, and the next event would find a step half done."""
    used_names = HookedParameters.used_names
    interrupted: list[int] = []

    def interrupt(self: HookedParameters) -> frozenset[str]:
        if threading.get_ident() in interrupted:
            raise KeyboardInterrupt
        return used_names(self)

    monkeypatch.setattr(HookedParameters, "used_names", interrupt)

    def run(group: Any) -> list[str]:
        ddp = DDP(net(), process_group=group)
        plain(ddp, group.rank)
        ddp.steps.trace = events = []
        if group.rank == 1:
            interrupted.append(threading.get_ident())
        ends = []
        for _ in range(2):
            ddp.zero_grad()
            try:
                ddp(batch(group.rank)).square().mean().backward()
            except BaseException as error:
                ends.append(f"{type(error).__name__}: {error}")
            interrupted.clear()
            assert {param.grad is None for param in ddp.parameters()} == {len(ends) == 1}
        assert "broken" in states(["outputs made", *events])
        return ends

    first, second = fddp.loopback(2, run)
    assert first[0].startswith("RankLostError: ")
    assert second[0] == "KeyboardInterrupt: "
    text = "ClosedError: this DistributedDataParallel is closed (a step of the wrapped module was "
    assert second[1].startswith(f"{text}interrupted); ")


def in_contexts(rank: int, world_size: int, shared_file: str) -> list[list[Event]]:
    init_rpc(rank, shared_file)
    found = []
    for manual in (False, True):
        ddp = DDP(net())
        ddp.require_manual_backward_finalization = manual
        ddp.steps.trace = events = []
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [ddp(batch(rank) * 1.0).square().mean()])
            if manual:
                ddp.finalize_backward()
        found.append(events)
    rpc.shutdown()
    return found


def test_runs_in_contexts_of_distributed_autograd(tmp_path: Path) -> None:
    for outcome in run_fresh(2, in_contexts, str(tmp_path / "store")):
        assert outcome.error is None
        ended, suspended = map(states, outcome.result)
        assert ended[-3:] == ["deferred", "complete", "ended"]
        assert suspended[-4:] == ["deferred", "suspended in context", "complete", "ended"]


# Functional steps


def test_a_step_is_armed_before_threads_of_devices_can_fail_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise one of them could note a failure between the two halves of "armed"."""
    arm, found = BackwardContributions.arm, []

    def noted(self: Any, *args: Any, **options: Any) -> None:
        *_, buffer_of, _, _ = args
        found.append(buffer_of.__self__.life.name)
        arm(self, *args, **options)

    monkeypatch.setattr(BackwardContributions, "arm", noted)

    def run(group: Any) -> None:
        plain(DDP(net(), process_group=group), group.rank)

    fddp.loopback(1, run)
    assert found == ["armed", "armed"]


def test_runs_of_functional_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"a": torch.ones(WIDTH), "b": torch.ones(2)}
    traces: dict[Step, list[Event]] = {}
    note = Step.note

    def noted(self: Step, event: Event) -> None:
        traces.setdefault(self, ["opened"]).append(event)
        note(self, event)

    monkeypatch.setattr(Step, "note", noted)

    def run(group: Any) -> None:
        with fddp.GradSync(params, group=group) as sync:
            step = sync.value_and_grad(lambda p: p["a"].sum() * p["b"].sum())
            step(params)
            sync(params)
            with contextlib.suppress(ValueError, fddp.PeerError):
                sync(params, weight=-1.0 if group.rank else 1.0)
            sync.start(params).wait()
            with contextlib.suppress(fddp.errors.DesyncError):
                sync(params) if group.rank else step(params)
            if group.rank == 0:
                with contextlib.suppress(fddp.RankLostError):
                    step(params)

    fddp.loopback(2, run)
    assert {tuple(dict.fromkeys(states(events))) for events in traces.values()} == {
        ("open", "armed", "complete", "ended"),
        ("open", "complete", "ended"),
        ("open", "complete", "failed"),
        ("open", "armed", "complete", "failed"),
        ("open", "armed", "complete", "broken"),
    }
