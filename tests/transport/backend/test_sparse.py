"""All-reduces of sparse tensors: results, order beside other operations, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.backends import new_fddp_group
from tests.support.ranks import RankPool


def _sparse(rank: int, rows: int, count: int, dtype: torch.dtype, width: int = 3) -> torch.Tensor:
    """Rows `rank`, `rank + 1`, ... and one of them twice."""
    indices = torch.tensor([[(rank + i) % rows for i in range(count)] + [rank % rows]])
    values = (torch.arange((count + 1) * width).reshape(-1, width) % 5 + rank).to(dtype)
    return torch.sparse_coo_tensor(indices, values, (rows, width))


def _sums(rank: int, world_size: int) -> None:
    group = new_fddp_group()
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int8):
        for rows, count in [(8, 0), (50, 20), (60_000, 50_000)]:
            all_ranks = [_sparse(r, rows, count * r, dtype) for r in range(world_size)]
            expected = sum(tensor.to_dense() for tensor in all_ranks)
            own = all_ranks[rank].clone()
            works = [dist.all_reduce(own, group=group, async_op=True)]
            # The operations that follow do not wait for the caller's.
            dense = torch.full((30_000,), float(rank))
            works.append(dist.all_reduce(dense, group=group, async_op=True))
            future = works[0].get_future()
            assert torch.equal(future.wait()[0].to_dense(), expected)
            assert torch.equal(own.to_dense(), expected)
            assert own.is_coalesced()
            works[1].wait()
            assert bool(dense.eq(world_size * (world_size - 1) / 2).all())
    average = _sparse(rank, 20, 10, torch.float32)
    total = sum(_sparse(r, 20, 10, torch.float32).to_dense() for r in range(world_size))
    dist.all_reduce(average, dist.ReduceOp.AVG, group)
    torch.testing.assert_close(average.to_dense(), total / world_size)
    # Several dimensions of each kind, and none that are dense.
    for shape, sparse_dim in [((4, 5, 2, 3), 2), ((7,), 1)]:
        tensor = torch.ones(shape).to_sparse(sparse_dim)
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor.to_dense(), torch.full(shape, float(world_size)))
    dist.destroy_process_group(group)


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_and_averages(world_size: int, ranks: RankPool) -> None:
    ranks.run(world_size, _sums)


def _without_waiting(rank: int, world_size: int) -> bool:
    """The call returns before the other rank has made it."""
    group = new_fddp_group()
    tensor = _sparse(rank, 50, 20, torch.float32)
    if rank == 1:
        dist.recv(torch.empty(1), group=group, group_src=0)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    pending = not work.is_completed()
    if rank == 0:
        dist.send(torch.ones(1), group=group, group_dst=1)
    work.wait()
    dist.destroy_process_group(group)
    return pending


def test_the_call_does_not_wait(ranks: RankPool) -> None:
    assert ranks.run(2, _without_waiting)[0]


def _twice_in_flight(rank: int, world_size: int) -> None:
    group = new_fddp_group()
    for count in (3, 20_000):
        tensors = [_sparse(r, 30_000, count, torch.float32) for r in range(world_size)]
        own = tensors[rank].clone()
        works = [dist.all_reduce(own, group=group, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        total = sum(tensor.to_dense() for tensor in tensors)
        assert torch.equal(own.to_dense(), total * world_size**2)
    dist.destroy_process_group(group)


def test_calls_in_flight_on_one_tensor_follow_each_other(ranks: RankPool) -> None:
    ranks.run(2, _twice_in_flight)


def _errors(rank: int, world_size: int) -> None:
    group = new_fddp_group()

    def refused(tensor: torch.Tensor, message: str, op: Any = dist.ReduceOp.SUM) -> None:
        with pytest.raises(RuntimeError, match=message):
            dist.all_reduce(tensor, op, group)

    refused(_sparse(rank, 9, 3, torch.float32), "summed and averaged", dist.ReduceOp.MAX)
    refused(_sparse(rank, 9 + rank, 3, torch.float32), "sparse tensors of different shapes")
    refused(_sparse(rank, 9, 3, torch.float32, width=3 + rank), "of different shapes")
    dtype = (torch.float32, torch.float64)[rank]
    refused(_sparse(rank, 9, 3, dtype), "the ranks called different operations")
    kept = _sparse(rank, 9, 3, torch.float32)
    dist.all_reduce(kept, group=group)  # the group can still be used
    dist.destroy_process_group(group)


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_cannot_be_added(ranks: RankPool) -> None:
    ranks.run(2, _errors)
