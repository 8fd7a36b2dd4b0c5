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
from tests.support.polling import soon
from tests.support.process_resources import (
    arena_mappings,
    is_shared,
    open_file_count,
)

if TYPE_CHECKING:
    from tests.support.ranks import RankPool


def closed_on_rank(rank: int, world_size: int) -> None:
    gc.collect()  # an error that an earlier test kept refers to its transport
    before = arena_mappings()
    transport = open_transport(timeout_s=20)
    kept = transport.empty(100, torch.float32, torch.device("cpu")).fill_(1.0)
    transport.all_reduce(kept).wait("the sum")
    transport.close()
    kept = kept[10:20]
    assert kept.tolist() == [2.0] * 10, "memory outlives the transport, also by a view of it"
    with pytest.raises(ClosedError, match=r"this shm transport is closed \(close\(\) was called\)"):
        transport.all_reduce(kept)
    assert not is_shared(transport.empty(3, torch.float32, torch.device("cpu")))
    gone = weakref.ref(transport)
    gc.disable()
    del transport, kept
    assert gone() is None
    # A thread may still be about to release an operation, or memory of an earlier test.
    assert soon(lambda: arena_mappings() <= before), (
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
