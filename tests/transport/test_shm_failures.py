"""Ranks that die, stop, leave or go elsewhere, over shared memory: raised on all others in time.

Functions named `*_on_rank` run on ranks, which are processes, as `fn(rank, world_size, *args)`.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from fddp.errors import ClosedError, FddpError, RankLostError
from fddp.transport import open_transport
from tests.support.chunks import AXES, SQUARE
from tests.support.polling import LONG_S, PROMPT_S
from tests.support.ranks import run_fresh, split_into_hosts

if TYPE_CHECKING:
    from torch import Tensor

    from fddp.transport import Transport
    from tests.support.ranks import Outcome, RankPool

# Of a rank whose time was over, or which heard that another one's was.
OVER = (
    r"not finished within timeout_s=1\.0|"
    r"after \d+\.\d s of timeout_s=1\.0, because the time limit of .*rank"
)


class Ended(NamedTuple):
    """Outcome of an operation on a rank that waited for it."""

    error: str
    text: str
    ranks: tuple[int, ...]
    took_s: float


def ended(transport: Transport, *, numel: int = 10, axes: tuple[str, ...] = ()) -> Ended:
    """Return the outcome of a sum that some rank does not join."""
    start_s = time.perf_counter()
    with pytest.raises(FddpError) as caught:
        transport.all_reduce(torch.ones(numel), axes=axes).wait("bucket 3 of step 17")
    took_s = time.perf_counter() - start_s
    with pytest.raises(ClosedError, match="failed"):
        transport.exchange(b"more")
    ranks = caught.value.ranks if isinstance(caught.value, RankLostError) else ()
    return Ended(type(caught.value).__name__, str(caught.value), ranks, took_s)


def survivors(outcomes: list[Outcome], dead: int) -> list[tuple[int, Any]]:
    for rank, outcome in enumerate(outcomes):
        assert rank == dead or (outcome.error, outcome.exitcode) == (None, 0), outcome
    return [(rank, outcome.result) for rank, outcome in enumerate(outcomes) if rank != dead]


# Death

ENDS = {"exit": 7, "kill": -signal.SIGKILL, "exception": 0}


def die(how: str) -> None:
    if how == "exit":
        os._exit(ENDS[how])
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("the program's own mistake")


def dying_on_rank(rank: int, world_size: int, dead: int, how: str, numel: int) -> Ended:
    transport = open_transport(timeout_s=LONG_S)
    assert transport.name == "shm"
    value = torch.ones(numel)
    transport.all_reduce(value).wait("a sum with all")
    if rank == dead:
        time.sleep(0.3)
        with transport:  # as a program would that may raise
            die(how)
    return ended(transport, numel=numel)


@pytest.mark.parametrize(
    ("world_size", "dead", "how", "numel"),
    [
        (2, 0, "kill", 10),
        (3, 1, "kill", 2_000_000),
        (3, 2, "exit", 10),
        (4, 0, "exit", 2_000_000),
        (3, 1, "exception", 10),
    ],
)
def test_a_rank_that_ends_is_named(world_size: int, dead: int, how: str, numel: int) -> None:
    outcomes = run_fresh(world_size, dying_on_rank, dead, how, numel)
    assert outcomes[dead].exitcode == ENDS[how]
    for rank, seen in survivors(outcomes, dead):
        print(f"{how}: rank {rank} of {world_size} noticed after {seen.took_s - 0.3:.2f} s")
        why = "it closed its transport" if how == "exception" else "its process has ended"
        assert seen.text.startswith(
            f"bucket 3 of step 17 on rank {rank} of {world_size}: lost rank {dead} ({why}); start "
            "the job again from a checkpoint"
        )
        assert (seen.error, seen.ranks) == ("RankLostError", (dead,))
        assert seen.took_s < PROMPT_S


def killed_at_any_moment_on_rank(rank: int, world_size: int, delay_s: float) -> Ended:
    """Rank 1 is killed while operations of all sizes run one after the other."""
    transport = open_transport(timeout_s=LONG_S)
    sizes = [3, 10_000, 300_000, 1_500_000]
    shared = [transport.empty(n, torch.float32, torch.device("cpu")) for n in sizes]
    dist.barrier()
    if rank == 1:
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    start_s = time.perf_counter()
    with pytest.raises(RankLostError) as caught:
        reduce_for_ever(transport, shared)
    took_s = time.perf_counter() - start_s - delay_s
    return Ended("RankLostError", str(caught.value), caught.value.ranks, took_s)


def reduce_for_ever(transport: Transport, tensors: list[Tensor]) -> None:
    while True:
        works = [
            transport.all_reduce(tensor.fill_(1.0)) if i % 3 else transport.broadcast(tensor, 1)
            for i, tensor in enumerate(tensors)
        ]
        for work in works:
            work.wait("bucket 3 of step 17")


@pytest.mark.parametrize("delay_s", [0.05, 0.0777, 0.1])
def test_a_rank_may_be_killed_at_any_moment(delay_s: float) -> None:
    outcomes = run_fresh(3, killed_at_any_moment_on_rank, delay_s)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for _, seen in survivors(outcomes, 1):
        assert seen.ranks == (1,)
        assert seen.took_s < PROMPT_S


# Groups of some ranks: hosts as they share memory, of which others are reached over gloo.

ONE, TWO, NONE = [(0, 1, 2, 3)], [(0, 1), (2, 3)], [(0,), (1,), (2,), (3,)]
Hosts = list[tuple[int, ...]]


def missed_in_a_group_on_rank(
    rank: int, world_size: int, hosts: Hosts, missed: int, how: str
) -> Ended | None:
    """One rank is missed; those who don't wait for it wait for another one that does."""
    with split_into_hosts(hosts):
        transport = open_transport(timeout_s=LONG_S if how == "kill" else 1.0)
        transport.open_subgroups(SQUARE, AXES)
    transport.exchange(b"all are there")
    if rank == missed:
        time.sleep(0.3)
        if how == "kill":
            die(how)
        dist.barrier()  # until the others have given up
        transport.close()
        return None
    if rank in (0, 1):
        time.sleep(0.5)  # so that its own time is not up when that of the others is
    # Rank 0 waits for 2, and 1 for 0; 2 for 3, or 3 for 2.
    seen = ended(transport, axes=("host",) if rank == 0 else ("local",))
    if how == "late":
        dist.barrier()
    return seen


@pytest.mark.parametrize(("hosts", "dead"), [(ONE, 3), (NONE, 3), (TWO, 2), (TWO, 3)])
def test_a_rank_killed_in_one_group_is_raised_on_all(hosts: Hosts, dead: int) -> None:
    """Of two hosts, rank 3 is missed in shared memory by 2, and rank 2 in gloo by 0 as well."""
    outcomes = run_fresh(4, missed_in_a_group_on_rank, hosts, dead, "kill")
    for rank, seen in survivors(outcomes, dead):
        print(f"rank {rank} noticed the end of {dead} after {seen.took_s - 0.3:.2f} s: {seen.text}")
        assert f"bucket 3 of step 17 on rank {rank} of 4: lost rank {dead} (" in seen.text
        assert (seen.error, seen.ranks) == ("RankLostError", (dead,))
        assert seen.took_s < PROMPT_S


@pytest.mark.parametrize("hosts", [ONE, TWO])
def test_a_rank_late_in_one_group_is_raised_on_all(ranks: RankPool, hosts: Hosts) -> None:
    for rank, seen in enumerate(ranks.run(4, missed_in_a_group_on_rank, hosts, 3, "late")):
        if seen is not None:
            assert seen.error == "SyncTimeoutError", seen
            assert f"bucket 3 of step 17 on rank {rank} of 4: " in seen.text
            assert re.search(OVER, seen.text)
            if hosts is ONE or rank == 2:
                assert "no response from rank 3. All" in seen.text
            assert seen.took_s < PROMPT_S


# Stopped processes


def stopped_on_rank(
    rank: int, world_size: int, stopped_s: float, timeout_s: float
) -> tuple[Ended | None, str]:
    """Rank 1 is stopped for some seconds, as by a debugger or a busy host."""
    transport = open_transport(timeout_s=timeout_s)
    transport.exchange(b"all are there")
    if rank == 1:
        waker = os.fork()
        if waker == 0:
            time.sleep(stopped_s)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.waitpid(waker, 0)
    start_s = time.perf_counter()
    try:
        value = torch.ones(10)
        transport.all_reduce(value).wait("bucket 3 of step 17")
        assert value.tolist() == [3.0] * 10
        return None, ""
    except FddpError as error:
        took_s = time.perf_counter() - start_s
        return Ended(type(error).__name__, str(error), (), took_s), str(error)


def test_a_rank_that_is_stopped_for_long_is_late() -> None:
    outcomes = run_fresh(3, stopped_on_rank, 3.5, 2.0)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, outcome.error
        seen, text = outcome.result
        assert seen.error == "SyncTimeoutError", seen
        if rank != 1:
            assert "within timeout_s=2.0; no response from rank 1. All ranks must" in text
            assert 1.9 < seen.took_s < PROMPT_S


def test_a_rank_stopped_for_a_moment_continues() -> None:
    for outcome in run_fresh(3, stopped_on_rank, 0.9, PROMPT_S):
        assert outcome.error is None, outcome.error
        assert outcome.result[0] is None


# Leaving


def interrupted_on_rank(rank: int, world_size: int) -> float:
    """Ctrl-C ends a wait at once."""
    transport = open_transport(timeout_s=LONG_S)
    transport.exchange(b"all are there")
    took_s = 0.0
    if rank == 0:
        work = transport.all_reduce(torch.ones(3))
        start_s = time.perf_counter()
        # Last of all before the wait: elsewhere Python may drop the interrupt, in a finalizer.
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            work.wait("bucket 3")
        took_s = time.perf_counter() - start_s
    dist.barrier()
    transport.close()
    return took_s


def test_a_wait_can_be_interrupted(ranks: RankPool) -> None:
    assert ranks.run(2, interrupted_on_rank)[0] < PROMPT_S
