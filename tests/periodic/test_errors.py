"""Low-communication training: errors are the same on all ranks, and nothing hangs."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fddp
from fddp import periodic
from fddp.hooks import bf16_compress
from tests.support.endings import Ending, ending
from tests.support.groups import rank_of
from tests.support.ranks import Launch, run_fresh


def params(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3,), value), "b": torch.full((2,), value)}


def late(tree: Any, period: int = 3, **options: Any) -> periodic.PeriodicSchedule:
    return periodic.streaming_diloco(tree, period, fragments=2, delay=1, **options)


def kinds(ends: list[Ending]) -> list[str]:
    return [end.kinds[0] for end in ends]


DIFFERENT = {
    "period": ({"schedule": partial(late, period=3)}, {"schedule": partial(late, period=4)}),
    "pattern": (
        {"schedule": late, "tree": {"a": torch.zeros(3), "b": torch.zeros(3)}},
        {
            "schedule": lambda tree: periodic.PeriodicSchedule(late(tree).fragments[::-1]),
            "tree": {"a": torch.zeros(3), "b": torch.zeros(3)},
        },
    ),
    "mixing": ({"schedule": late}, {"schedule": partial(late, mixing=0.25)}),
    "tree": ({}, {"tree": {"a": torch.zeros(3), "b": torch.zeros(4)}}),
    "outer": ({}, {"outer": periodic.sgd()}),
    "hook": ({}, {"hook": bf16_compress}),
}
TEXTS = {
    "period": "when of fragment 0 is Periodic(period=3, warmup_steps=0) on rank 0 and "
    "Periodic(period=4, warmup_steps=1) on rank 1",
    "pattern": "paths of fragment 0 is ('a',) on rank 0 and ('b',) on rank 1",
    "mixing": "mixing of fragment 0 is 0.5 on rank 0 and 0.25 on rank 1",
    "tree": "nbytes of fragment 1 is 8 on rank 0 and 16 on rank 1",
    "outer": "the outer optimizer is",
    "hook": "hook is",
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_must_agree(launch: Launch, name: str) -> None:
    for end in launch(2, constructed_differently, name):
        assert end.kinds[0] == "PlanMismatchError"
        assert TEXTS[name] in end.text


def constructed_differently(group: Any, name: str) -> Ending:
    options = {"tree": params(), "schedule": late, **DIFFERENT[name][rank_of(group)]}
    return ending(lambda: periodic.PeriodicSync(group=group, **options))


def test_a_wrong_schedule_is_not_run(launch: Launch) -> None:
    first, second = launch(2, with_a_wrong_schedule)
    assert (first.kinds[0], second.kinds[0]) == ("PlanMismatchError", "ScheduleError")
    for end in (first, second):
        assert "its delay of 4 steps is longer than its period of 3" in end.text


def with_a_wrong_schedule(group: Any) -> Ending:
    def schedule(tree: Any) -> Any:
        return periodic.local_sgd(tree, 3, delay=4 if rank_of(group) else 0)

    return ending(lambda: periodic.PeriodicSync(params(), schedule, group=group))


def test_a_schedule_of_another_tree() -> None:
    schedule = periodic.local_sgd({"a": torch.zeros(3), "c": torch.zeros(2)}, 3)

    def call(group: Any) -> Ending:
        return ending(lambda: periodic.PeriodicSync(params(), schedule, group=group))

    for end in fddp.loopback(2, call):
        assert end.kinds[0] == "TreeMismatchError"
        assert "leaf 'b' is in no fragment of the schedule; make the schedule for" in end.text


def test_outer_steps_begin_with_equal_parameters(launch: Launch) -> None:
    for end in launch(2, with_other_parameters):
        assert end.kinds[0] == "DesyncError"
        assert "'a'" in end.text


def with_other_parameters(group: Any) -> Ending:
    own = params(float(rank_of(group)))
    with periodic.PeriodicSync(own, late, outer=periodic.sgd(), group=group) as sync:
        return ending(lambda: sync.init(own))


def test_ranks_must_be_at_the_same_step(launch: Launch) -> None:
    for end, value in launch(2, at_other_steps):
        assert end.kinds[0] == "DesyncError"
        assert "(fragment 0 after step 2)" in end.text
        assert "(fragment 0 after step 5)" in end.text
        assert value == 0.5, "all can go on"


def at_other_steps(group: Any) -> tuple[Ending, float]:
    own, rank = params(float(rank_of(group))), rank_of(group)

    def schedule(tree: Any) -> Any:
        return periodic.local_sgd(tree, 3)

    with periodic.PeriodicSync(own, schedule, group=group) as sync:
        state = sync.init(own)
        end = ending(lambda: sync.step(own, {**state, "step": 2 + 3 * rank}))
        result, _ = sync.step(own, {**state, "step": 8})
        return end, result["a"][0].item()


@pytest.mark.parametrize("delay", [0, 2])
def test_a_parameter_must_not_be_missing(launch: Launch, delay: int) -> None:
    """Reported to all ranks where the average is applied; ranks can go on."""
    first, second = launch(2, missing, delay)
    assert kinds([first, second]) == ["PeerError", "TreeMismatchError"]
    for end in (first, second):
        assert "leaf 'b' to average is None; pass all parameters" in end.text


def missing(group: Any, delay: int) -> Ending:
    own: dict[str, Any] = params()

    def schedule(tree: Any) -> Any:
        return periodic.local_sgd(tree, 3, delay=delay)

    with periodic.PeriodicSync(own, schedule, outer=periodic.sgd(), group=group) as sync:
        state = first = sync.init(own)
        for _ in range(2):
            own, state = sync.step(own, state)
        if rank_of(group) == 1:
            own["b"] = None
        for _ in range(delay):
            own, state = sync.step(own, state)
        end = ending(lambda: sync.step(own, state))
        own, state = params(), first
        for _ in range(3 + delay):
            own, state = sync.step(own, state)
        return end


def test_a_state_of_another_schedule() -> None:
    def call(group: Any) -> Ending:
        own = params()
        with (
            periodic.PeriodicSync(own, late, group=group) as sync,
            periodic.PeriodicSync(own, lambda t: periodic.local_sgd(t, 2), group=group) as other,
        ):
            return ending(lambda: other.step(own, sync.init(own)))

    for end in fddp.loopback(2, call):
        assert end.kinds[0] == "TreeMismatchError"
        assert "the state has 2 fragments, and the schedule 1" in end.text


@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_a_rank_that_dies_while_a_collective_is_in_flight(transport: str) -> None:
    outcomes = run_fresh(2, dying, transport)
    assert outcomes[1].exitcode == 3
    assert outcomes[0].error is None, outcomes[0].error
    assert outcomes[0].result.kinds[0] == "RankLostError"


def dying(rank: int, world_size: int, transport: Any) -> Ending:
    own = params()
    sync = periodic.PeriodicSync(
        own, late, outer=periodic.sgd(), transport=transport, group=dist.group.WORLD
    )
    state = sync.init(own)
    for _ in range(2):
        own, state = sync.step(own, state)
    if rank == 1:
        os._exit(3)
    return ending(lambda: [sync.step(own, {**state, "step": step}) for step in (2, 3)])


def test_arguments_of_schedules() -> None:
    tree = {"layers": [torch.zeros(2) for _ in range(3)]}
    with pytest.raises(ValueError, match="an int from 1 to 3, because there are 3 layers and the"):
        periodic.streaming_diloco(tree, 100, fragments=4)
    with pytest.raises(
        fddp.NoGradientError, match="there is nothing to reduce: the tree has 1 leaf"
    ):
        periodic.local_sgd({"n": torch.zeros(2, dtype=torch.int64)}, 2)
