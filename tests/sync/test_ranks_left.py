"""Ranks that are killed, and the others that go on by one call."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fddp
from fddp.transport.c10d import ranks_left
from fddp.transport.c10d.peer_monitor import PeerMonitor
from fddp.transport.liveness import failure_detector
from fddp.transport.torch_private import process_groups
from tests.support.endings import Ending, ending
from tests.support.models import batch, mlp, mlp_loss, same_bits
from tests.support.polling import LONG_S, PROMPT_S, soon
from tests.support.process_resources import resources
from tests.support.ranks import run_fresh, split_into_hosts

HOSTS = {"shm": [[0, 1, 2, 3]], "c10d": [[0], [1], [2], [3]]}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def update(state: Any, grads: Any) -> Any:
    params = fddp.tree_map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {"params": params, "number": state["number"] + 1}


def train_with_losses(rank: int, world_size: int, transport: str) -> Any:
    """Rank 1 is killed before its step 2, and rank 3 before its step 4."""
    hosts = split_into_hosts(HOSTS[transport]) if transport == "c10d" else nullcontext()
    with hosts:
        sync = fddp.GradSync(mlp(), timeout_s=LONG_S)
        assert sync.transport == transport
        step = sync.value_and_grad(mlp_loss, with_info=True)
        state = {"params": mlp(), "number": torch.tensor(0)}
        errors, infos, took_s = [], [], []
        while (number := int(state["number"])) < 6:
            if (rank, number) in ((1, 2), (3, 4)):
                die()
            begin_s = time.perf_counter()
            try:
                _, grads, info = step(state["params"], batch(rank, number))
            except fddp.RankLostError as error:
                errors.append(error.ranks)
                sync, state = sync.rebuild(state=state)
                step = sync.value_and_grad(mlp_loss, with_info=True)
                took_s.append(time.perf_counter() - begin_s)
                continue
            infos.append((number, info.step))
            state = update(state, grads)
        mean = torch.tensor([float(rank)])
        dist.all_reduce(mean, group=sync.group)
        return state, errors, infos, took_s, sync.world_size, mean.item()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_two_ranks_are_killed_one_after_the_other(transport: str) -> None:
    outcomes = run_fresh(4, train_with_losses, transport)
    assert [outcomes[rank].exitcode for rank in (1, 3)] == [-signal.SIGKILL] * 2
    results = [outcomes[rank].result for rank in (0, 2)]
    assert [outcomes[rank].error for rank in (0, 2)] == [None, None]
    assert same_bits([result[0]["params"] for result in results])
    for state, errors, infos, took_s, world_size, total in results:
        assert int(state["number"]) == 6
        assert errors == [(1,), (3,)]  # in the numbers of the first group
        # Each step was finished once, and the numbers of steps go on.
        assert [number for number, _ in infos] == [*range(6)]
        assert all(later > earlier for (_, earlier), (_, later) in itertools.pairwise(infos))
        assert max(took_s) < PROMPT_S
        assert (world_size, total) == (2, 2.0)


def differ_by_a_step(rank: int, world_size: int) -> Any:
    """Rank 1 has finished one step more than rank 0 knows of, and rank 2 is killed."""
    sync = fddp.GradSync(mlp(), timeout_s=LONG_S)
    state = {"w": torch.full((3,), 1.0), "number": 1}
    sync(mlp())
    dist.barrier()
    if rank == 2:
        die()
    with pytest.raises(fddp.RankLostError):
        sync(mlp())
    if rank == 1:  # as if its last collective had ended, and others' not
        sync._engine.finished += 1
        state = {"w": torch.full((3,), 2.0), "number": 2}
    sync, state = sync.rebuild(state=state)
    return state["w"].tolist(), state["number"], sync(mlp(), with_info=True)[1].step


def test_all_take_the_state_of_the_newest_rank() -> None:
    outcomes = run_fresh(3, differ_by_a_step)
    assert [outcome.error for outcome in outcomes[:2]] == [None, None]
    assert outcomes[0].result[:2] == outcomes[1].result[:2] == ([2.0] * 3, 2)
    assert outcomes[0].result[2] == outcomes[1].result[2]


def lose_another_meanwhile(rank: int, world_size: int, when: str) -> Any:
    """Rank 3 is killed, and rank 2 while the others rebuild."""
    sync = fddp.GradSync(mlp(), timeout_s=LONG_S)
    sync(mlp())
    dist.barrier()
    if rank == 3:
        die()
    with pytest.raises(fddp.RankLostError):
        sync(mlp())
    make, connect = ranks_left.new_named_group, ranks_left.agree_on_left
    if rank == 2 and when == "before":
        die()
    if rank == 2:
        name = "agree_on_left" if when == "agreeing" else "new_named_group"
        first = {"agreeing": connect, "connecting": make}[when]

        def dying(*args: Any, **options: Any) -> Any:
            if when == "agreeing":
                first(*args, **options)
            die()

        with mock.patch.object(ranks_left, name, dying):
            sync.rebuild()
    attempts, begin_s = 0, time.perf_counter()
    while True:
        attempts += 1
        try:
            sync = sync.rebuild()
            break
        except fddp.RankLostError as error:
            assert error.ranks == (2,), error  # noqa: PT017
    return attempts, sync.world_size, sync(mlp()), time.perf_counter() - begin_s


@pytest.mark.parametrize("when", ["before", "agreeing", "connecting"])
def test_another_rank_is_killed_during_the_call(when: str) -> None:
    outcomes = run_fresh(4, lose_another_meanwhile, when)
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.error
        attempts, world_size, mean, took_s = outcome.result
        assert (attempts, world_size) == (1 if when == "before" else 2, 2)
        assert took_s < PROMPT_S
        assert same_bits([mean, mlp()])


def close_and_come_back(rank: int, world_size: int, comes_back: bool) -> Any:
    """Rank 1 closes its GradSync during a step of the others, and calls rebuild, or does not."""
    sync = fddp.GradSync(mlp(), timeout_s=LONG_S)
    sync(mlp())
    if rank == 1:
        sync.close()
        if not comes_back:
            dist.barrier()
            return None
        time.sleep(0.2)
    else:
        with pytest.raises(fddp.RankLostError):
            sync(mlp())
    with sync.rebuild() as sync:
        found = sync.rank, sync.world_size, sync.group == dist.group.WORLD
        sync(mlp())
    if not comes_back:
        dist.barrier()
    return found


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_rank_that_has_closed_may_come_back(comes_back: bool) -> None:
    outcomes = run_fresh(3, close_and_come_back, comes_back)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    found = [outcome.result for outcome in outcomes]
    assert found == (
        [(0, 3, True), (1, 3, True), (2, 3, True)]
        if comes_back
        else [(0, 2, False), None, (1, 2, False)]
    )


def refuse(rank: int, world_size: int) -> Any:
    sync = fddp.GradSync(mlp(), timeout_s=LONG_S)
    call: Callable[[], Any] = lambda: sync.rebuild(**({"state": mlp()} if rank else {}))  # noqa: E731
    with pytest.raises(fddp.PlanMismatchError) as caught:
        call()
    sync.close()
    return str(caught.value)


def test_a_state_on_some_ranks_alone_is_an_error_on_all() -> None:
    texts = [outcome.result for outcome in run_fresh(2, refuse)]
    assert [text.partition(": ")[0] for text in texts] == ["rank 0", "rank 1"]
    assert "pass state= to rebuild and join on all ranks, or on none" in texts[0]


def leave_early(rank: int, world_size: int, transport: str, options: Any) -> Any:
    """Rank 1 leaves after its step 2, and rank 0 after step 4."""
    hosts = split_into_hosts(HOSTS[transport]) if transport == "c10d" else nullcontext()
    # A rank that has closed without a word would be waited for.
    with hosts, mock.patch.object(failure_detector, "_GRACE_S", LONG_S):
        sync = fddp.GradSync(mlp(), timeout_s=4 * LONG_S, **options)
        calls, errors, took_s = [], [], [0.0]

        def loss(p: Any, x: Any) -> Any:
            calls.append(number)
            return mlp_loss(p, x)

        step = sync.value_and_grad(loss)
        state = {"params": mlp(), "number": torch.tensor(0)}
        while (number := int(state["number"])) < 6:
            if (rank, number) in ((1, 2), (0, 4)):
                sync.leave()
            try:
                inputs = batch(rank, number)
                if sync.carried_ranks:
                    inputs = sync.virtual_batches(lambda v: batch(v, number))
                _, grads = step(state["params"], inputs)
            except fddp.RankLostError as error:
                errors.append(error.ranks)
                assert "left after the last step, as announced" in str(error)  # noqa: PT017
                begin_s = time.perf_counter()
                sync, state = sync.rebuild(state=state)
                took_s.append(time.perf_counter() - begin_s)
                step = sync.value_and_grad(loss)
                continue
            except fddp.ClosedError as error:
                return state, calls, errors, str(error), max(took_s)
            state = update(state, grads)
        return state, calls, errors, "", max(took_s)


@pytest.mark.parametrize(
    ("transport", "options"),
    [("shm", {"virtual_ranks": 4}), ("c10d", {}), ("shm", {"report": "next"})],
)
def test_a_planned_leave_costs_the_others_no_step(transport: str, options: Any) -> None:
    outcomes = run_fresh(3, leave_early, transport, options)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    first, second, third = [outcome.result for outcome in outcomes]
    assert "this rank has left after step 2" in second[3]
    assert "this rank has left after step" in first[3]
    assert [int(state["number"]) for state, *_ in (first, second, third)] == [5, 3, 6]
    for (_, calls, errors, _, took_s), lost in (
        (first, [(1,)]),
        (second, []),
        (third, [(1,), (0,)]),
    ):
        assert errors == lost
        assert took_s < PROMPT_S
        inputs = {number: calls.count(number) for number in calls}
        assert options.get("virtual_ranks") or set(inputs.values()) == {1}  # nothing twice
    if "virtual_ranks" in options:
        undisturbed = run_fresh(1, never_leave)[0].result
        assert same_bits([third[0]["params"], undisturbed])


def never_leave(rank: int, world_size: int) -> Any:
    sync = fddp.GradSync(mlp(), virtual_ranks=4)
    step, params = sync.value_and_grad(mlp_loss), mlp()
    for number in range(6):
        inputs = [batch(virtual, number) for virtual in sync.carried_ranks]
        _, grads = step(params, sync.virtual_batches(inputs))
        params = fddp.tree_map(lambda p, g: p - 0.1 * g, params, grads)
    return params


def leave_after_a_failed_step(rank: int, world_size: int, report: Any) -> list[Ending]:
    """Rank 1 announces that it leaves, before a step in which rank 0 fails."""
    sync = fddp.GradSync(mlp(), timeout_s=LONG_S, report=report)
    sync(mlp())
    sync.check()
    if rank == 1:
        sync.leave()
    wrong = {"unknown": torch.ones(1)}
    found = [ending(lambda: sync(wrong if rank == 0 else mlp())), ending(sync.check)]
    sync(mlp())
    return [*found, ending(lambda: sync(mlp()))]


@pytest.mark.parametrize("report", ["now", "next"])
def test_a_rank_that_leaves_learns_whether_its_last_step_failed(report: str) -> None:
    """In the step itself. It leaves after the next one that succeeds."""
    outcomes = run_fresh(2, leave_after_a_failed_step, report)
    assert [outcome.error for outcome in outcomes] == [None] * 2
    stays, leaves = [outcome.result for outcome in outcomes]
    assert stays[0].kinds[0] == "TreeMismatchError", stays
    assert leaves[0].kinds[0] == "PeerError", leaves
    again = {"now": "no error", "next": "PeerError"}[report]  # as on ranks that went on
    assert [found[1].kinds[0] for found in (stays, leaves)] == [again] * 2
    assert "left after the last step, as announced" in stays[2].text, stays
    assert "this rank has left after step 2" in leaves[2].text, leaves


def leave_within(rank: int, world_size: int, call: str) -> Any:
    """Rank 1 leaves in the loss function of its first step, whose loss takes steps as well, or
    before a loop over uneven inputs."""
    sync = fddp.GradSync(mlp(), timeout_s=LONG_S)

    def loss(p: Any, x: Any) -> Any:
        if call == "in the loss" and rank == 1 and not results:
            sync.leave()
        sync(mlp())
        sync(mlp())
        return mlp_loss(p, x)

    step = sync.value_and_grad(loss)
    results: list[str] = []
    if call == "before a loop":
        if rank == 1:
            sync.leave()
        for x in fddp.uneven([batch(rank, number) for number in range(2)], sync):
            sync.value_and_grad(mlp_loss)(mlp(), x)
    for number in range(3):
        try:
            step(mlp(), batch(rank, number))
            results.append("taken")
        except (fddp.RankLostError, fddp.ClosedError) as error:
            announced = "as announced" in str(error)
            results.append(f"{type(error).__name__} {announced}")
    return results


@pytest.mark.parametrize("call", ["in the loss", "before a loop"])
def test_the_last_step_is_a_whole_one_after_the_call(call: str) -> None:
    taken = ["taken"] * (2 if call == "in the loss" else 1)
    for outcome, error in zip(
        run_fresh(2, leave_within, call), ("RankLostError True", "ClosedError False"), strict=True
    ):
        assert outcome.error is None, outcome.error
        assert outcome.result == (taken + [error] * 3)[:3]


def test_a_silent_rank_of_this_host_that_lives_is_not_lost() -> None:
    membership, detector = mock.Mock(), mock.Mock(grace_s=0.0)
    membership.reports.return_value = {}
    detector.ended.return_value = ()
    detector.living.return_value = {1}
    detector.unresponsive.return_value = (1, 2), ()
    assert PeerMonitor(membership, detector, mock.Mock()).find_lost(0.0, (1, 2)) == {2}


def rebuild_often(rank: int, world_size: int, transport: str, wrapped: bool) -> Any:
    """Ranks 0 and 1 hold no more after 21 rebuilds than after one, once rank 2 has left."""
    hosts = split_into_hosts(HOSTS[transport]) if transport == "c10d" else nullcontext()
    with hosts:
        model = torch.nn.Linear(2, 1, bias=False)
        sync: Any = fddp.DistributedDataParallel(model) if wrapped else fddp.GradSync(mlp())
        sync.leave() if rank == 2 else None
        take_step(sync)
        if rank == 2:
            return None
        own = dist.new_group([0, 1], use_local_synchronization=True)
        held = []
        for _ in range(21):
            if wrapped:
                sync.rebuild()
            else:
                sync = sync.rebuild()
            take_step(sync)
            dist.all_reduce(torch.ones(1), group=sync.process_group if wrapped else sync.group)
            held.append(resources() if not held else None)

        def few() -> bool:
            """Threads and files of what was closed last may take some time to end."""
            return all(now - then < 10 for now, then in zip(resources(), held[0], strict=True))

        assert soon(few), (resources(), held[0])
        dist.all_reduce(torch.ones(1), group=own)  # a group of the user's stays
        return len(process_groups())


def go_on_twice(rank: int, world_size: int) -> Any:
    """A second `GradSync` over the group of a rebuild goes on after the first one has."""
    first = fddp.GradSync(mlp(), timeout_s=LONG_S)
    first.leave() if rank == 2 else None
    first(mlp())
    if rank == 2:
        return None
    first = first.rebuild()
    group = first.group
    second = fddp.GradSync(mlp(), group=group, timeout_s=LONG_S)
    second(mlp())
    first = first.rebuild()
    dist.all_reduce(torch.ones(1), group=group)  # `second` still goes on from it
    second = second.rebuild()
    assert group not in process_groups()
    first(mlp()), second(mlp())
    return len(process_groups())


def test_a_group_stays_while_another_sync_may_go_on_from_it() -> None:
    outcomes = run_fresh(3, go_on_twice)
    assert [each.error for each in outcomes] == [None] * 3
    assert [each.result for each in outcomes[:2]] == [3, 3]


def go_on_from_own_group(rank: int, world_size: int) -> Any:
    own = dist.new_group([0, 1, 2])
    sync = fddp.GradSync(mlp(), group=own, timeout_s=LONG_S)
    sync.leave() if rank == 2 else None
    sync(mlp())
    if rank == 2:
        return None
    sync = sync.rebuild()
    sync(mlp())
    return own in process_groups(), dist.group.WORLD in process_groups()


def test_the_group_of_the_caller_stays() -> None:
    outcomes = run_fresh(3, go_on_from_own_group)
    assert [each.error for each in outcomes] == [None] * 3
    assert [each.result for each in outcomes[:2]] == [(True, True)] * 2


def take_step(sync: Any) -> None:
    if isinstance(sync, fddp.DistributedDataParallel):
        sync(torch.ones(1, 2)).sum().backward()
    else:
        sync(mlp())


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_groups_of_earlier_rebuilds_are_destroyed(transport: str, wrapped: bool) -> None:
    outcomes = run_fresh(3, rebuild_often, transport, wrapped)
    assert [each.error for each in outcomes] == [None] * 3
    for each in outcomes[:2]:
        assert each.result == 3  # the default one, the user's, and that of the last rebuild
