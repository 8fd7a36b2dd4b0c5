"""Failures of ranks over the backend "fddp": an error on every survivor, which names the rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist

import fddp
from tests.support.backends import new_fddp_group
from tests.support.polling import LONG_S, PROMPT_S
from tests.support.ranks import RankPool, run_fresh

_TIMEOUT_S = 3.0
_KILLED = -signal.SIGKILL


def _call(kind: str, group: dist.ProcessGroup, size: int) -> None:
    """A call that needs rank 1."""
    tensor = torch.ones(size)
    if kind == "all_reduce":
        dist.all_reduce(tensor, group=group)
    elif kind == "async":
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.get_future().wait()
    elif kind == "barrier":
        dist.barrier(group)
    elif kind == "all_to_all":
        dist.all_to_all([torch.ones(size)] * 3, [tensor] * 3, group)
    elif kind == "recv":
        dist.recv(tensor, group=group, group_src=1)
    else:
        dist.send(tensor, group=group, group_dst=1)


_CALLS = [
    *(("all_reduce", size) for size in (1, 500_000)),
    ("async", 500_000),
    ("barrier", 0),
    ("all_to_all", 10),
    ("recv", 10),
    ("send", 500_000),
]


def _with_a_lost_rank(rank: int, world_size: int, kind: str, size: int) -> tuple[str, float]:
    group = new_fddp_group(LONG_S)
    dist.barrier(group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin_s = time.perf_counter()
    with pytest.raises(RuntimeError) as caught:
        _call(kind, group, size)
    return str(caught.value), time.perf_counter() - begin_s


@pytest.mark.parametrize(("kind", "size"), _CALLS)
def test_a_killed_rank_is_named(kind: str, size: int) -> None:
    survivors = run_fresh(3, _with_a_lost_rank, kind, size)
    assert survivors.pop(1).exitcode == _KILLED
    for outcome in survivors:
        text, waited_s = outcome.result
        assert "rank 1 left the group, or its process has ended" in text
        assert waited_s < PROMPT_S


def _with_a_late_rank(rank: int, world_size: int, kind: str, size: int) -> str:
    group = new_fddp_group(_TIMEOUT_S)
    dist.barrier(group)
    if rank == 1:
        dist.barrier()  # until the others have given up
    with pytest.raises(RuntimeError) as caught:
        _call(kind, group, size)
    if rank != 1:
        dist.barrier()
    dist.destroy_process_group(group)
    return str(caught.value)


_LATE = f"rank 1 did not take part within the timeout of {_TIMEOUT_S:.0f} s"


@pytest.mark.parametrize(("kind", "size"), [_CALLS[0], _CALLS[1]])
def test_a_late_rank_is_named_on_every_rank(kind: str, size: int, ranks: RankPool) -> None:
    for text in ranks.run(3, _with_a_late_rank, kind, size):
        assert _LATE in text


def _with_a_late_message(rank: int, world_size: int, kind: str, size: int) -> list[str]:
    group = new_fddp_group(_TIMEOUT_S)
    dist.barrier(group)
    texts = []
    for _ in range(2):
        if rank != 1:
            with pytest.raises(RuntimeError) as caught:
                _call(kind, group, size)
            texts.append(str(caught.value))
        dist.barrier()
    other = torch.full((3,), float(rank))
    if rank == 0:
        dist.send(other, group=group, group_dst=2)
    if rank == 2:
        dist.recv(other, group=group, group_src=0)
        assert other.tolist() == [0.0] * 3
    dist.all_reduce(total := torch.ones(size), group=group)
    assert bool(total.eq(world_size).all())
    dist.destroy_process_group(group)
    return texts


_SHARED = {
    "all_reduce": lambda x, group: dist.all_reduce(x, group=group, async_op=True),
    "broadcast": lambda x, group: dist.broadcast(x, group_src=1, group=group, async_op=True),
    "all_gather": lambda x, group: dist.all_gather_into_tensor(
        x, x[: len(x) // 3].clone(), group=group, async_op=True
    ),
    "all_to_all": lambda x, group: dist.all_to_all_single(x, x.clone(), group=group, async_op=True),
}


def _writing_late(rank: int, world_size: int, kind: str) -> bool:
    """Rank 1 calls what the others have given up, after these have overwritten their tensors."""
    group = new_fddp_group(1.0)
    tensors = [fddp.empty_shared(size, group=group).fill_(rank) for size in (3, 30_000, 600_000)]
    dist.barrier(group)
    if rank == 1:
        dist.barrier()
    works = [_SHARED[kind](tensor, group) for tensor in tensors]
    for work in works:
        with suppress(RuntimeError) if rank == 1 else pytest.raises(RuntimeError, match="rank 1"):
            work.wait()
    for tensor in tensors:
        tensor.fill_(7.0)
    if rank != 1:
        dist.barrier()
    dist.barrier()
    dist.destroy_process_group(group)
    return all(bool(tensor.eq(7.0).all()) for tensor in tensors)


@pytest.mark.parametrize("kind", _SHARED)
def test_a_late_rank_writes_into_no_shared_tensors(kind: str, ranks: RankPool) -> None:
    assert ranks.run(3, _writing_late, kind) == [True] * 3


@pytest.mark.parametrize(("kind", "size"), [_CALLS[5], _CALLS[6]])
def test_a_late_message_fails_alone(kind: str, size: int, ranks: RankPool) -> None:
    for rank, texts in enumerate(ranks.run(3, _with_a_late_message, kind, size)):
        assert len(texts) == (0 if rank == 1 else 2)
        assert all(_LATE in text for text in texts)


def _with_a_mismatch(rank: int, world_size: int) -> list[str]:
    group = new_fddp_group()
    texts = []
    for size, first, others in [(3, 3, 4), (5, 200_000, 100_000)]:
        tensor = torch.ones(first if rank == 0 else others)
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(tensor, group=group)
        texts.append(str(caught.value))
        assert bool(tensor.eq(1).all())
        # The group can still be used.
        total = torch.ones(size)
        dist.all_reduce(total, group=group)
        assert total[0] == world_size
    call = dist.all_reduce if rank == 0 else partial(dist.broadcast, src=0)
    with pytest.raises(RuntimeError) as caught:
        call(torch.ones(2, dtype=torch.int64), group=group)
    texts.append(str(caught.value))
    sent = [1, 1] if rank == 0 else [0, 1]
    with pytest.raises(RuntimeError) as caught:
        dist.all_to_all_single(torch.ones(2), torch.ones(sum(sent)), [1, 1], sent, group)
    texts.append(str(caught.value))
    dist.destroy_process_group(group)
    return texts


def test_differing_calls_are_named_and_leave_the_group_usable(ranks: RankPool) -> None:
    for texts in ranks.run(2, _with_a_mismatch):
        few, many, kinds, sizes = texts
        assert (
            "the ranks called different operations: rank 0 all_reduce (sum) of Float, 12 bytes, "
            "rank 1 all_reduce (sum) of Float, 16 bytes"
        ) in few
        assert "800000 bytes" in many
        assert "rank 1 broadcast of Long, 16 bytes" in kinds
        assert "the sizes that ranks send differ" in sizes


def _closed(rank: int, world_size: int) -> str:
    group = new_fddp_group()
    pending, awaited = (
        dist.irecv(torch.ones(3), group=group, group_src=1 - rank, tag=tag) for tag in range(2)
    )
    texts: list[str] = []

    def wait() -> None:
        with pytest.raises(RuntimeError) as caught:
            awaited.wait()
        texts.append(str(caught.value))

    thread = threading.Thread(target=wait)
    thread.start()
    reduced = dist.all_reduce(torch.ones(300_000), group=group, async_op=True)
    reduced.wait()
    time.sleep(0.3)  # until the thread waits
    if rank == 0:
        late = dist.all_reduce(torch.ones(300_000), group=group, async_op=True)
        group.abort()
        for work in (pending, late):
            with pytest.raises(RuntimeError, match="the group was closed on this rank"):
                work.wait()
            assert work.is_completed()
        with pytest.raises(RuntimeError, match="the group was closed on this rank"):
            dist.all_reduce(torch.ones(3), group=group)
    else:
        with pytest.raises(RuntimeError, match="rank 0 left the group"):
            pending.wait()
    thread.join(30.0)
    dist.destroy_process_group(group)
    return texts[0]


def test_abort_ends_pending_works_and_wakes_threads_that_wait(ranks: RankPool) -> None:
    first, second = ranks.run(2, _closed)
    assert "the group was closed on this rank" in first
    assert "rank 0 left the group" in second


def _in_any_order(rank: int, world_size: int) -> None:
    groups = [new_fddp_group() for _ in range(4)]
    for group in groups:
        dist.all_reduce(torch.ones(1000), group=group)
    sent = dist.isend(torch.ones(10), group=groups[0], group_dst=(rank + 1) % world_size)
    sent.wait()
    order = groups[1:] if rank == 0 else groups[:0:-1]
    for group in order:
        dist.destroy_process_group(group)
    tensor = torch.zeros(10)
    dist.recv(tensor, group=groups[0], group_src=(rank - 1) % world_size)
    dist.destroy_process_group(groups[0])


def test_groups_are_destroyed_in_any_order(ranks: RankPool) -> None:
    ranks.run(3, _in_any_order)


def _sent_before_the_end(rank: int, world_size: int) -> float:
    """What a rank sends before it ends arrives."""
    group = new_fddp_group()
    if rank == 0:
        dist.send(torch.full((100,), 7.0), group=group, group_dst=1)
        dist.destroy_process_group(group)
        dist.barrier()
        return 0.0
    dist.barrier()
    tensor = torch.zeros(100)
    dist.recv(tensor, group=group, group_src=0)
    dist.destroy_process_group(group)
    return float(tensor.mean())


def test_messages_outlive_their_sender(ranks: RankPool) -> None:
    assert ranks.run(2, _sent_before_the_end)[1] == 7.0


def _forked(rank: int, world_size: int) -> str:
    group = new_fddp_group()
    dist.all_reduce(torch.ones(3), group=group)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        texts = []
        for call in (
            lambda: dist.all_reduce(torch.ones(3), group=group),
            lambda: dist.send(torch.ones(3), group=group, group_dst=1 - rank),
        ):
            try:
                call()
            except (RuntimeError, ValueError) as error:
                texts.append(str(error))
        os.write(write, "; ".join(texts).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    dist.all_reduce(torch.ones(3), group=group)
    dist.destroy_process_group(group)
    return os.read(read, 1000).decode()


def test_a_forked_process_cannot_use_a_group(ranks: RankPool) -> None:
    for text in ranks.run(2, _forked):
        assert text.count("a group cannot be used in a forked process") == 2


def _absent(rank: int, world_size: int) -> str:
    if rank == 1:
        dist.barrier()
        return ""
    with pytest.raises(RuntimeError) as caught:
        new_fddp_group(1.0)
    dist.barrier()
    return str(caught.value)


def test_a_rank_that_does_not_create_the_group_is_named() -> None:
    first, _ = run_fresh(2, _absent)
    assert "1 rank did not take part within timeout=1.0 s: 1" in first.result
