"""An operation that all ranks have called completes, whatever a rank does next."""

from __future__ import annotations

import os
import random
import signal
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fddp
from tests.support.backends import as_default, new_fddp_group
from tests.support.ranks import RankPool, run_fresh

SIZES = (3, 20_000, 300_000)  # copied, staged, and staged in segments
GROUPS = 40


def all_reduce(x: Tensor, group: Any) -> Tensor:
    dist.all_reduce(x, group=group)
    return x


def broadcast(x: Tensor, group: Any) -> Tensor:
    dist.broadcast(x, group_src=0, group=group)
    return x * dist.get_world_size(group)


def all_gather(x: Tensor, group: Any) -> Tensor:
    rows = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, x, group)
    return sum(rows, torch.zeros_like(x))


def all_to_all(x: Tensor, group: Any) -> Tensor:
    rows = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_to_all(rows, [x] * len(rows), group)
    return sum(rows, torch.zeros_like(x))


def not_awaited(x: Tensor, group: Any) -> Tensor:
    """The last rank leaves it in flight."""
    work = dist.all_reduce(x, group=group, async_op=True)
    dist.barrier()  # all have called it
    if dist.get_rank(group) + 1 < dist.get_world_size(group):
        work.wait()
        return x
    return torch.full_like(x, dist.get_world_size(group))


CALLS: tuple[Callable[[Tensor, Any], Tensor], ...] = (
    all_reduce,
    broadcast,
    all_gather,
    all_to_all,
    not_awaited,
)


def receives(group: Any, peer: int) -> list[Any]:
    return [dist.irecv(torch.ones(3), group=group, group_src=peer, tag=tag) for tag in range(9)]


def receives_from_any(group: Any, peer: int) -> list[Any]:
    return [dist.irecv(torch.ones(3), group=group, tag=1)]


def half_sent(group: Any, peer: int) -> list[Any]:
    return [dist.isend(torch.ones(500_000), group=group, group_dst=peer)]


def nothing(group: Any, peer: int) -> list[Any]:
    return []


PENDING = (receives, receives_from_any, half_sent, nothing)


def called(chance: random.Random, group: Any) -> list[Any]:
    """Start what stays pending, call an operation, and check its result."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    waits, call, numel = chance.choice(PENDING), chance.choice(CALLS), chance.choice(SIZES)
    pending = waits(group, (rank + 1) % size)
    total = call(torch.ones(numel), group)
    assert bool(total.eq(size).all()), (waits, call, numel, total)
    return pending


def leave_groups(rank: int, world_size: int) -> None:
    chance = random.Random(5)
    for _ in range(GROUPS):
        group = new_fddp_group()
        dist.all_reduce(torch.ones(4), group=group)
        pending = called(chance, group)
        dist.destroy_process_group(group)
        del pending


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_leave_their_groups(ranks: RankPool, world_size: int) -> None:
    ranks.run(world_size, leave_groups)


def end(rank: int, world_size: int, how: str, seed: int) -> None:
    group = new_fddp_group()
    dist.all_reduce(torch.ones(4), group=group)
    pending = called(random.Random(seed), group)
    if rank == world_size - 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit(0)
    del pending


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_rank_ends(how: str) -> None:
    for seed in range(3):
        *others, last = run_fresh(2, end, how, seed)
        assert [other.error for other in others] == [None], seed
        assert last.exitcode == (-signal.SIGKILL if how == "kill" else 0)


# Tensors that share memory


def shared(rank: int, world_size: int) -> None:
    group = new_fddp_group()
    for numel in SIZES:
        for _ in range(5):
            x = torch.ones(numel)
            dist.all_reduce_coalesced([x, x], group=group)
            assert bool(x.eq(2).all()), "each is read before any is written, as by gloo"
            x = torch.ones(numel)
            dist.all_reduce_coalesced([x[:-1], x[1:]], group=group)
            assert bool(x.eq(2).all())
            for view in (lambda x: x, lambda x: x[1:], lambda x: x[::2]):
                x = torch.ones(numel)
                works = [
                    dist.all_reduce(part, group=group, async_op=True) for part in (x, view(x), x)
                ]
                for work in works[::-1]:
                    work.wait()
                assert bool(view(x).eq(8).all()), "a call reads what earlier calls wrote"
            x, rows = torch.ones(numel), torch.empty(2 * numel)
            summed = dist.all_reduce(x, group=group, async_op=True)
            dist.all_gather_single(rows, x, group=group)
            assert bool(rows.eq(2).all())
            summed.wait()
    dist.destroy_process_group(group)


def interleaved(rank: int, world_size: int) -> None:
    """Tensors that share no memory, in ranges that overlap: of one call, and of two threads."""
    group = new_fddp_group()
    x = torch.arange(24.0).view(4, 6)
    dist.all_reduce_coalesced([x.t()[0::2], x.t()[1::2]], group=group)
    assert x.tolist() == (2 * torch.arange(24.0)).view(4, 6).tolist()
    rows = torch.ones(300, 2)

    def sum_column(column: int) -> None:
        for _ in range(20):
            rows[:, column] = 1.0
            dist.all_reduce(rows[:, column], group=group)  # in any order: all are ones
            assert bool(rows[:, column].eq(2).all())

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(sum_column, range(2)))


def in_one_call(rank: int, world_size: int) -> None:
    """Inputs that a call overwrites with what other ranks send."""
    group = new_fddp_group()
    for numel in SIZES:
        for empty in (torch.empty, partial(fddp.empty_shared, group=group)):
            own = torch.full((numel,), float(rank))
            whole = empty(2 * numel)
            slots = list(whole.chunk(2))
            slots[1 - rank].copy_(own)
            dist.all_gather(slots, slots[1 - rank], group)
            assert [slot[-1].item() for slot in slots] == [0.0, 1.0]
            for row, slot in enumerate(slots):
                slot.fill_(10.0 * rank + row)
            dist.all_to_all(slots, slots, group)
            assert [slot[-1].item() for slot in slots] == [rank, 10.0 + rank]
            for row, slot in enumerate(slots):
                slot.fill_(10.0 * rank + row)
            dist.all_to_all_single(whole, whole, group=group)
            assert [slot[-1].item() for slot in slots] == [rank, 10.0 + rank]
            whole.fill_(1.0)
            dist.reduce_scatter_tensor(slots[1 - rank], whole, group=group)
            assert slots[1 - rank].eq(2).all()


@pytest.mark.parametrize("calls", [shared, interleaved, in_one_call])
def test_calls_whose_tensors_share_memory(
    ranks: RankPool, calls: Callable[[int, int], None]
) -> None:
    ranks.run(2, calls)


def tensors_are_freed(rank: int, world_size: int) -> bool:
    group = new_fddp_group()
    tensor = torch.ones(300_000)
    freed = weakref.ref(tensor.untyped_storage())
    dist.all_reduce(tensor, group=group)
    memory = weakref.finalize(tensor, lambda: None)
    del tensor
    return freed() is None or not memory.alive


def test_a_finished_call_keeps_no_tensor(ranks: RankPool) -> None:
    assert ranks.run(2, tensors_are_freed) == [True, True]


def left_outboxes(rank: int, world_size: int) -> None:
    """Memory of a group that one rank has left is used again; the other writes nothing there."""
    for _ in range(5):
        group = new_fddp_group()
        word = torch.ones(3)
        if rank == 1:
            dist.send(word, group=group, group_dst=0)
        else:
            dist.recv(word, group=group, group_src=1)
            pending = dist.irecv(word, group=group, group_src=1)
        dist.barrier()
        if rank == 1:
            dist.destroy_process_group(group)
            others = [fddp.empty_shared(70_000, dtype=torch.float32).zero_() for _ in range(4)]
        dist.barrier()
        if rank == 0:
            with pytest.raises(RuntimeError, match="rank 1 left the group"):
                pending.wait()
        dist.barrier()
        if rank == 1:
            assert all(bool(other.eq(0).all()) for other in others)
        else:
            dist.destroy_process_group(group)


def test_memory_of_messages_is_used_again(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, as_default, str(tmp_path), left_outboxes)
