"""Messages over the backend "fddp": order, tags, sizes, and sends before receives."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.backends import check_equal, new_fddp_group, values
from tests.support.ranks import RankPool


def _from_any(rank: int, world_size: int) -> None:
    group = new_fddp_group()
    if rank == 0:
        seen = []
        for _ in range(2 * (world_size - 1)):
            tensor = torch.empty(50_000)
            source = dist.recv(tensor, group=group)
            check_equal([tensor], [torch.full((50_000,), float(source))])
            seen.append(source)
        assert sorted(seen) == sorted([*range(1, world_size)] * 2)
    else:
        for _ in range(2):
            dist.send(torch.full((50_000,), float(rank)), group=group, group_dst=0)
    dist.destroy_process_group(group)


def test_receive_from_any_rank(ranks: RankPool) -> None:
    ranks.run(3, _from_any)


def _at_random(rank: int, world_size: int, seed: int) -> None:
    """Messages of random sizes and tags, received in another order, among collectives."""
    group = new_fddp_group()
    rng = random.Random(seed)
    messages = [
        (source, other, rng.randrange(3), rng.choice([0, 1, 5000, 90_000, 500_000]))
        for source, other in (rng.sample(range(world_size), 2) for _ in range(60))
    ]
    sends, receives = [], []
    for number, (source, other, tag, size) in enumerate(messages):
        if source == rank:
            tensor = values(number, size, torch.float32)
            sends.append(dist.isend(tensor, group=group, tag=tag, group_dst=other))
        if other == rank:
            tensor = torch.empty(size)
            work = dist.irecv(tensor, group=group, tag=tag, group_src=source)
            receives.append((number, tensor, work))
        if number % 10 == 0:
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            assert total == world_size
    random.Random(rank).shuffle(receives)
    for number, tensor, work in receives:
        work.wait()
        check_equal([tensor], [values(number, tensor.numel(), torch.float32)])
    for work in sends:
        work.wait()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("seed", range(4))
def test_random_messages(seed: int, ranks: RankPool) -> None:
    ranks.run(3, _at_random, seed)


def _without_waits(rank: int, world_size: int) -> None:
    """A large message progresses while the sender does something else."""
    group = new_fddp_group()
    if rank == 0:
        work = dist.isend(torch.ones(4_000_000), group=group, group_dst=1)
        ended = threading.Event()
        while not work.is_completed() and not ended.wait(0.01):
            pass
    else:
        tensor = torch.zeros(4_000_000)
        dist.irecv(tensor, group=group, group_src=0).wait()
        assert bool(tensor.eq(1).all())
    dist.barrier(group)
    dist.destroy_process_group(group)


def test_messages_progress_without_waits(ranks: RankPool) -> None:
    ranks.run(2, _without_waits)


def _sizes_differ(rank: int, world_size: int) -> None:
    group = new_fddp_group()
    if rank == 0:
        dist.send(torch.ones(3), group=group, group_dst=1)
        dist.send(torch.ones(2), group=group, group_dst=1)
    else:
        with pytest.raises(RuntimeError, match="rank 0 sent 12 bytes, and the tensor to receive"):
            dist.recv(torch.ones(5), group=group, group_src=0)
        dist.recv(torch.zeros(2), group=group, group_src=0)
    dist.destroy_process_group(group)


def test_a_receive_of_another_size_is_an_error(ranks: RankPool) -> None:
    ranks.run(2, _sizes_differ)


def _thread_sleeps() -> int:
    """Number of times that the thread of messages has gone to sleep."""
    sleeps = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            if (task / "comm").read_text() == "fddp-messages\n":
                status = (task / "status").read_text()
                sleeps += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return sleeps


def _there_and_back(rank: int, world_size: int) -> None:
    group = new_fddp_group()
    tensor = torch.zeros(1)
    calls = [dist.send, dist.recv] if rank == 0 else [dist.recv, dist.send]
    before, begin_s = _thread_sleeps(), time.perf_counter()
    for _ in range(5000):
        for call in calls:
            call(tensor, 1 - rank, group)
    naps = (time.perf_counter() - begin_s) / 200e-6
    sleeps = _thread_sleeps() - before
    print(f"{sleeps} sleeps, {naps:.0f} naps")
    assert sleeps < 2 * naps + 500
    dist.destroy_process_group(group)


def test_receives_that_are_awaited_leave_the_thread_asleep(ranks: RankPool) -> None:
    """It looks for others every 200 us, instead of being woken by each."""
    ranks.run(2, _there_and_back)
