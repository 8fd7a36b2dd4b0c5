"""Operations over shared memory, the life of their results, and resources.

Functions named `*_on_rank` run on ranks, which are processes, as `fn(rank, world_size, *args)`.
"""

from __future__ import annotations

import gc
import os
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import fddp
from fddp.errors import ClosedError, DesyncError, FddpError
from fddp.transport import open_transport
from tests.support.chunks import own_chunk, part, total
from tests.support.process_resources import (
    arena_mappings,
    is_shared,
    open_file_count,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from fddp.transport import Transport
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


@pytest.mark.parametrize("which", ["all", "some", "none"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_tensors_may_be_at_any_address(ranks: RankPool, world_size: int, which: str) -> None:
    ranks.run(world_size, memories_on_rank, which)


MISMATCHES: dict[str, tuple[Callable[[Transport], Any], str]] = {
    "size": (
        lambda t: t.all_reduce(torch.ones(3 + t.rank // 2)),
        r"rank 0 all_reduce of torch.float32 \(3,\), rank 2 all_reduce of torch.float32 \(4,\)",
    ),
    "shape": (
        lambda t: t.all_reduce(torch.ones(2, 3) if t.rank else torch.ones(6)),
        r"rank 0 all_reduce of torch.float32 \(6,\), rank 1 all_reduce of torch.float32 \(2, 3\)",
    ),
    "large size": (
        lambda t: t.all_reduce(torch.ones(1_000_000 + t.rank // 2)),
        r"rank 0 .* \(1000000,\), rank 2 .* \(1000001,\)",
    ),
    "small and large": (
        lambda t: t.all_reduce(torch.ones(1_000_000 if t.rank == 1 else 1)),
        r"rank 0 .* \(1,\), rank 1 .* \(1000000,\)",
    ),
    "dtype": (
        lambda t: t.all_reduce(torch.ones(3, dtype=[torch.float32, torch.int32][t.rank % 2])),
        r"rank 0 .* torch.float32 \(3,\), rank 1 .* torch.int32 \(3,\)",
    ),
    "kind": (
        lambda t: t.all_reduce(torch.ones(3)) if t.rank else t.reduce_scatter(torch.ones(3)),
        r"rank 0 reduce_scatter of .*, rank 1 all_reduce of .*",
    ),
    "average": (
        lambda t: t.all_reduce(torch.ones(3), average=t.rank == 0),
        r"rank 0 averaging all_reduce of .*, rank 1 all_reduce of .*",
    ),
    "order": (
        lambda t: t.reduce_scatter(torch.ones(3), ordered=t.rank == 0),
        r"rank 0 reduce_scatter in order 3 of .*, rank 1 reduce_scatter of .*",
    ),
    "source": (
        lambda t: t.broadcast(torch.ones(3), min(t.rank, 1)),
        r"rank 0 broadcast from rank 0 of .*, rank 1 broadcast from rank 1 of .*",
    ),
}


def mismatched_on_rank(rank: int, world_size: int) -> None:
    with open_transport(timeout_s=20) as transport:
        for start, text in MISMATCHES.values():
            work = start(transport)
            for _ in range(2):
                with pytest.raises(
                    DesyncError,
                    match=f"bucket 2 on rank {rank} of 3: ranks met in different operations: "
                    f"{text}; all ranks must issue the same operations in the same order",
                ):
                    work.wait("bucket 2")
            value = torch.ones(2)
            transport.all_reduce(value).wait("what follows")
            assert value.tolist() == [3.0, 3.0]


def test_mismatched_operations_are_raised_on_every_rank(ranks: RankPool) -> None:
    ranks.run(3, mismatched_on_rank)


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


def forked_on_rank(rank: int, world_size: int) -> None:
    """A forked process uses its copy of a transport without effect on its parent."""
    cpu = torch.device("cpu")
    with open_transport(timeout_s=20) as transport:
        freed = transport.empty(3_000_000, torch.float32, cpu).fill_(1.0)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.read(read, 1)
                wild = [transport.empty(n, torch.float32, cpu).fill_(-1.0) for n in (4, 3_000_000)]
                with pytest.raises((ValueError, FddpError)):
                    transport.all_reduce(wild[0])
                transport.close()
                code = 0
            finally:
                os._exit(code)
        del freed  # which the child's list of blocks does not show
        values = [transport.empty(n, torch.float32, cpu).fill_(7.0) for n in (4, 3_000_000)]
        os.write(write, b"now")
        assert os.waitpid(child, 0)[1] == 0
        for value in values:
            assert bool((value == 7.0).all())
            transport.all_reduce(value).wait("the sum")
            assert bool((value == 14.0).all())
        os.close(read)
        os.close(write)


def test_a_fork_does_not_affect_its_parent(ranks: RankPool) -> None:
    ranks.run(2, forked_on_rank)


def averaged_on_rank(rank: int, world_size: int) -> None:
    """A fork reads what was there when it was made."""
    means = fddp.averaging.average({"w": torch.full((1000,), float(rank)), "n": torch.tensor(3)})
    assert means["w"].tolist() == [0.5] * 1000
    assert not is_shared(means["w"])


def test_averages_of_parameters_are_not_shared(ranks: RankPool) -> None:
    ranks.run(2, averaged_on_rank)
