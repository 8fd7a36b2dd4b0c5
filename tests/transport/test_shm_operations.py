"""Operations over shared memory, the life of their results, and resources.

Functions named `*_on_rank` run on ranks, which are processes, as `fn(rank, world_size, *args)`.
"""

from __future__ import annotations

import gc
import os
import weakref
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

import fddp
from fddp.errors import ClosedError
from fddp.transport import open_transport
from tests.support.chunks import own_chunk, part, total
from tests.support.process_resources import (
    arena_mappings,
    is_shared,
    open_file_count,
)

if TYPE_CHECKING:
    from tests.support.ranks import RankPool

NUMELS = [0, 1, 3, 1000, 40_000, 3_000_000]


def memories_on_rank(rank: int, world_size: int, which: str) -> None:
    """Tensors in shared memory on some ranks, at odd places of it, and in ordinary memory."""
    everyone = tuple(range(world_size))
    with open_transport(timeout_s=30) as transport:
        for numel in NUMELS:
            padded = -(-numel // world_size) * world_size
            inside = which == "all" or (which == "some" and rank % 2)
            memory = (
                transport.empty(padded + 3, torch.float32, torch.device("cpu"))
                if inside
                else torch.empty(padded + 3)
            )
            assert is_shared(memory) == bool(inside)
            memory.fill_(-1.0)
            tensor = memory[1 : padded + 1]
            mine, summed = part(rank, padded, tensor.dtype), total(everyone, padded, tensor.dtype)

            tensor.copy_(mine)
            transport.all_reduce(tensor, wait_soon=bool(numel % 2)).wait("the sum")
            assert torch.equal(tensor, summed)
            tensor.copy_(mine)
            transport.reduce_scatter(tensor).wait("the shards")
            chunk = own_chunk(tensor, everyone, rank)
            assert torch.equal(chunk, own_chunk(summed, everyone, rank))
            transport.all_gather_in_place(tensor).wait("the whole")
            assert torch.equal(tensor, summed)
            tensor.copy_(mine)
            transport.broadcast(tensor, world_size - 1).wait("the last rank's")
            assert torch.equal(tensor, part(world_size - 1, padded, tensor.dtype))
            assert memory[0] == -1
            assert memory[padded + 1 :].tolist() == [-1.0, -1.0]


@pytest.mark.parametrize(("world_size", "which"), [(2, "all"), (3, "some"), (4, "none")])
def test_tensors_may_be_at_any_address(ranks: RankPool, world_size: int, which: str) -> None:
    ranks.run(world_size, memories_on_rank, which)


def closed_on_rank(rank: int, world_size: int) -> None:
    gc.collect()  # an error that an earlier test kept refers to its transport
    before = arena_mappings()
    transport = open_transport(timeout_s=20)
    kept = transport.empty(100, torch.float32, torch.device("cpu")).fill_(1.0)
    transport.all_reduce(kept).wait("the sum")
    transport.close()
    assert kept.tolist() == [2.0] * 100, "memory outlives the transport"
    with pytest.raises(ClosedError, match=r"this shm transport is closed \(close\(\) was called\)"):
        transport.all_reduce(kept)
    assert not is_shared(transport.empty(3, torch.float32, torch.device("cpu")))
    gone = weakref.ref(transport)
    gc.disable()
    del transport, kept
    assert gone() is None
    assert arena_mappings() == before, (
        "memory goes with its last user, not with the next garbage collection"
    )
    gc.enable()
    dist.barrier()


def test_results_outlive_the_transport(ranks: RankPool) -> None:
    ranks.run(2, closed_on_rank)


def kept_on_rank(rank: int, world_size: int) -> None:
    """A small result that outlives its transport keeps neither files nor much memory."""
    transport = open_transport(timeout_s=20)
    cpu = torch.device("cpu")
    file = os.dup(transport._memory._arena.fd)  # type: ignore[attr-defined]
    large, small = (transport.empty(n, torch.float32, cpu).fill_(1.0) for n in (8_000_000, 4))
    transport.all_reduce(large).wait("the sum")
    transport.all_reduce(small).wait("the sum")
    full = os.fstat(file).st_blocks * 512
    assert full > 32e6
    before = open_file_count()
    del large
    transport.close()
    assert open_file_count() < before
    left = os.fstat(file).st_blocks * 512
    print(f"{full} bytes of shared memory before, {left} after")
    assert left < 20e6
    assert small.tolist() == [2.0] * 4
    os.close(file)
    dist.barrier()


def test_a_small_result_keeps_little(ranks: RankPool) -> None:
    ranks.run(2, kept_on_rank)


def averaged_on_rank(rank: int, world_size: int) -> None:
    """A fork reads what was there when it was made."""
    means = fddp.averaging.average({"w": torch.full((1000,), float(rank)), "n": torch.tensor(3)})
    assert means["w"].tolist() == [0.5] * 1000
    assert not is_shared(means["w"])


def test_averages_of_parameters_are_not_shared(ranks: RankPool) -> None:
    ranks.run(2, averaged_on_rank)
