"""Requests to stop: all ranks see them after the same step, whenever they are made."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fddp
from fddp import periodic
from fddp.transport import Transport
from tests.support.ranks import RankPool

MOST_STEPS = 6
PHASES = ("before the step", "loss function", "backward", "after the step")
PARAMS = {"w": torch.ones(3), "v": torch.ones(2)}


class Request(NamedTuple):
    rank: int
    step: int
    phase: str


REQUESTS = st.lists(
    st.builds(Request, st.integers(0, 2), st.integers(0, MOST_STEPS - 2), st.sampled_from(PHASES)),
    max_size=3,
)


class Loop:
    """A loop of one rank, which makes its requests in their phases."""

    def __init__(self, stoppable: Any, rank: int, requests: list[Request]) -> None:
        self.stoppable, self.step = stoppable, 0
        self.own = {request[1:] for request in requests if request.rank == rank}

    def reach(self, phase: str) -> None:
        if (self.step, phase) in self.own:
            self.stoppable.request_stop()

    def run(self, take_step: Any) -> int | None:
        """Number of the step after which the loop ended; None if it was not stopped."""
        for self.step in range(MOST_STEPS):
            self.reach("before the step")
            take_step()
            if self.stoppable.stopping:
                return self.step
            self.reach("after the step")
        return None


def last_step_within(requests: list[Request]) -> tuple[int, int] | None:
    """Steps between which all ranks stop: a request during a step may be told by it or the next."""
    if not requests:
        return None
    first = [r.step + (r.phase == "after the step") for r in requests]
    return min(first), min(
        step + (r.phase in ("loss function", "backward"))
        for step, r in zip(first, requests, strict=True)
    )


def check(stopped: list[int | None], requests: list[Request]) -> None:
    assert len(set(stopped)) == 1, stopped
    within = last_step_within(requests)
    if within is None:
        assert stopped[0] is None
    else:
        assert stopped[0] is not None
        assert within[0] <= stopped[0] <= within[1]


def hooked(loop: Loop, leaf: Tensor) -> Tensor:
    """The leaf, whose gradient reaches a phase."""
    leaf = leaf * 1.0
    leaf.register_hook(lambda _: loop.reach("backward"))
    return leaf


def steps_of_a_function(group: Any, requests: list[Request], report: Any) -> int | None:
    with fddp.GradSync(PARAMS, group=group, report=report) as sync:
        loop = Loop(sync, group.rank, requests)

        def loss_fn(params: dict[str, Tensor]) -> Tensor:
            loop.reach("loss function")
            return hooked(loop, params["w"]).sum() + params["v"].sum()

        step = sync.value_and_grad(loss_fn)

        def take_step() -> None:
            step(PARAMS)
            sync.check()

        return loop.run(take_step)


def steps_of_a_module(group: Any, requests: list[Request], report: Any) -> int | None:
    module = fddp.DistributedDataParallel(nn.Linear(3, 2), process_group=group, report=report)
    loop = Loop(module, group.rank, requests)

    def take_step() -> None:
        output = module(torch.ones(4, 3))
        loop.reach("loss function")
        hooked(loop, output).sum().backward()
        module.check()

    return loop.run(take_step)


def steps_over_uneven_inputs(group: Any, requests: list[Request], report: Any) -> int | None:
    with fddp.GradSync(PARAMS, group=group) as sync:
        loop = Loop(sync, group.rank, requests)
        step = sync.value_and_grad(lambda p, n: n * p["w"].sum() + p["v"].sum())
        batches = [1.0] * (MOST_STEPS - group.rank)
        for loop.step, n in enumerate(fddp.uneven(batches, sync)):
            loop.reach("before the step")
            for phase in PHASES[1:3]:  # of a rank whose input is exhausted, too
                loop.reach(phase)
            step(PARAMS, n)
            if sync.stopping:
                return loop.step
            loop.reach("after the step")
    return None


def steps_of_operators(group: Any, requests: list[Request], report: Any) -> int | None:
    with fddp.Communicator(group) as ranks:
        loop = Loop(ranks, group.rank, requests)

        def take_step() -> None:
            loop.reach("loss function")
            fddp.pmean(PARAMS, ranks)
            loop.reach("backward")
            fddp.psum(torch.ones(2), ranks)

        return loop.run(take_step)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    REQUESTS,
    st.sampled_from(
        [steps_of_a_function, steps_of_a_module, steps_over_uneven_inputs, steps_of_operators]
    ),
    st.sampled_from(["now", "next"]),
)
def test_all_ranks_stop_after_the_same_step(
    requests: list[Request], loop: Any, report: str
) -> None:
    check(fddp.loopback(3, loop, requests, report), requests)


def test_periodic_means_carry_requests() -> None:
    def run(group: Any) -> int:
        params = {"w": torch.ones(3)}
        with periodic.PeriodicSync(params, periodic.local_sgd(params, 3), group=group) as sync:
            state = sync.init(params)
            for number in range(12):
                if number == 1 and group.rank == 1:
                    sync.request_stop()
                params, state = sync.step(params, state)
                if sync.stopping:
                    return number
        return -1

    assert fddp.loopback(2, run) == [2, 2]


def test_the_info_of_a_step_says_so() -> None:
    def run(group: Any) -> list[bool]:
        with fddp.GradSync(PARAMS, group=group) as sync:
            infos = []
            for number in range(3):
                if number == 1 and group.rank == 0:
                    sync.request_stop()
                infos.append(sync(PARAMS, with_info=True)[1])
        assert "stop: yes" in repr(infos[1])
        return [info.stop for info in infos]

    assert fddp.loopback(2, run) == [[False, True, True]] * 2


def test_operators_along_an_axis_do_not_stop_a_part_of_the_ranks() -> None:
    def run(group: Any) -> list[bool]:
        with fddp.Communicator(group, mesh=fddp.Topology(rows=2, columns=2)) as ranks:
            if group.rank == 3:
                ranks.request_stop()
            seen = []
            for axis in ("rows", "columns", None):
                fddp.pmean(PARAMS, ranks, axis=axis)
                seen.append(ranks.stopping)
        return seen

    assert fddp.loopback(4, run) == [[False, False, True]] * 4


def test_operators_of_one_rank_stop() -> None:
    def run(group: Any) -> bool:
        with fddp.Communicator(group) as ranks:
            ranks.request_stop()
            assert not ranks.stopping
            fddp.pmean(PARAMS, ranks)
            return ranks.stopping

    assert fddp.loopback(1, run) == [True]


def test_a_request_takes_no_further_collective_of_operators() -> None:
    """In steps it is an element of the control word."""
    gathers, gather = [0, 0], Transport.all_gather_in_place

    def counted(self: Transport, *args: Any, **options: Any) -> Any:
        gathers[self.rank] += 1
        return gather(self, *args, **options)

    def run(group: Any) -> bool:
        with fddp.Communicator(group) as ranks:
            gathers[group.rank] = 0
            for number in range(3):
                if number == 1 and group.rank == 1:
                    ranks.request_stop()
                fddp.pmean(PARAMS, ranks)
            return ranks.stopping

    with mock.patch.object(Transport, "all_gather_in_place", counted):
        assert fddp.loopback(2, run) == [True, True]
    assert gathers == [3, 3]


def test_a_deferred_report_is_read_by_the_next_call() -> None:
    def run(group: Any) -> list[bool]:
        with fddp.GradSync(PARAMS, group=group, report="next") as sync:
            seen = []
            for number in range(3):
                if number == 1 and group.rank == 0:
                    sync.request_stop()
                sync(PARAMS)
                seen.append(sync.stopping)
        return seen

    assert fddp.loopback(2, run) == [[False, False, True]] * 2


def test_a_request_outlives_a_failed_step_and_a_rebuild() -> None:
    def run(group: Any) -> bool:
        sync = fddp.GradSync(PARAMS, group=group)
        if group.rank == 0:
            sync.request_stop()

        def loss_fn(params: dict[str, Tensor]) -> Tensor:
            raise ValueError("this rank's own")

        with pytest.raises((ValueError, fddp.errors.PeerError)):
            sync.value_and_grad(loss_fn)(PARAMS)
        with sync.rebuild(group) as again:
            assert not again.stopping
            again(PARAMS)
            return again.stopping

    assert fddp.loopback(2, run) == [True, True]


# Handlers, in processes; tests/faults/test_signals.py has generated signals


def handlers(rank: int, world_size: int) -> list[Any]:
    seen: list[str] = []

    class Sync:
        stopping = False

        def request_stop(self) -> None:
            seen.append("asked")

    def own(number: int, frame: Any) -> None:
        seen.append("own")

    before = signal.signal(signal.SIGTERM, own)
    try:
        with fddp.stop_on_signal(Sync(), Sync(), signals=[signal.SIGTERM, signal.SIGUSR1]):
            for number in (signal.SIGTERM, signal.SIGUSR1):  # which ends a process by default
                os.kill(os.getpid(), number)
                time.sleep(0.01)
        assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    return seen


def test_handlers_are_called_and_restored(ranks: RankPool) -> None:
    expected = ["asked", "asked", "own", "asked", "asked"]
    assert ranks.run(1, handlers) == [expected]


def test_signals_are_the_main_threads() -> None:
    def run(group: Any) -> None:
        with fddp.GradSync(PARAMS, group=group) as sync, fddp.stop_on_signal(sync):
            pass

    with pytest.raises(ValueError, match="request_stop"):
        fddp.loopback(1, run)
