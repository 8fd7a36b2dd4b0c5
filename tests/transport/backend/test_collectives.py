"""Collectives over the backend "fddp" give what they give over gloo, to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.support.backends import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    NUMBERS,
    SIZES,
    check_equal,
    new_fddp_group,
    values,
)
from tests.support.ranks import RankPool

Group = dist.ProcessGroup
Case = Callable[[Group, bool], list[torch.Tensor]]
SUM, OP = dist.ReduceOp.SUM, dist.ReduceOp

_REDUCTIONS = [
    *((op, dtype) for op in (OP.SUM, OP.PRODUCT, OP.MIN, OP.MAX) for dtype in NUMBERS),
    *((op, dtype) for op in (OP.BAND, OP.BOR, OP.BXOR) for dtype in INTEGERS),
    *((OP.AVG, dtype) for dtype in FLOATS),
    *((OP.SUM, dtype) for dtype in COMPLEX),
]


def _finished(work: Any, asynchronous: bool) -> None:
    assert (work is not None) == asynchronous
    if asynchronous:
        work.wait()


def _all_reduce(op: Any, dtype: torch.dtype, size: int, group: Group, later: bool) -> Any:
    tensor = values(group.rank(), size, dtype)
    _finished(dist.all_reduce(tensor, op, group, later), later)
    return [tensor]


def _all_reduce_coalesced(dtype: torch.dtype, size: int, group: Group, later: bool) -> Any:
    tensors = [values(group.rank(), n, dtype, n) for n in (size, 3, 0)]
    options = c10d.AllreduceCoalescedOptions()
    group.allreduce_coalesced(tensors, options).wait()
    return tensors


def _reduce(op: Any, dtype: torch.dtype, size: int, group: Group, later: bool) -> Any:
    tensor, root = values(group.rank(), size, dtype), group.size() - 1
    _finished(dist.reduce(tensor, group=group, op=op, async_op=later, group_dst=root), later)
    return [tensor] if group.rank() == root else []


def _broadcast(dtype: torch.dtype, size: int, group: Group, later: bool) -> Any:
    tensor = values(group.rank(), size, dtype)
    _finished(dist.broadcast(tensor, group=group, async_op=later, group_src=1), later)
    return [tensor]


def _all_gather(dtype: torch.dtype, size: int, group: Group, later: bool) -> Any:
    outputs = [torch.empty(size, dtype=dtype) for _ in range(group.size())]
    own = values(group.rank(), size, dtype)
    _finished(dist.all_gather(outputs, own, group, later), later)
    return outputs


def _all_gather_single(dtype: torch.dtype, size: int, group: Group, later: bool) -> Any:
    output = torch.empty(size * group.size(), dtype=dtype)
    own = values(group.rank(), size, dtype)
    work = group._allgather_base(output, own, c10d.AllgatherOptions())
    work.wait()
    return [output, own]


def _gather(dtype: torch.dtype, size: int, group: Group, later: bool) -> Any:
    own, is_root = values(group.rank(), size, dtype), group.rank() == 0
    outputs = [torch.empty_like(own) for _ in range(group.size())] if is_root else None
    _finished(dist.gather(own, outputs, group=group, async_op=later, group_dst=0), later)
    return outputs or []


def _scatter(dtype: torch.dtype, size: int, group: Group, later: bool) -> Any:
    output, is_root = torch.empty(size, dtype=dtype), group.rank() == 1
    inputs = [values(rank, size, dtype) for rank in range(group.size())] if is_root else None
    _finished(dist.scatter(output, inputs, group=group, async_op=later, group_src=1), later)
    return [output]


def _reduce_scatter(op: Any, dtype: torch.dtype, size: int, group: Group, later: bool) -> Any:
    output = torch.empty(size, dtype=dtype)
    inputs = [values(group.rank(), size, dtype, seed) for seed in range(group.size())]
    _finished(dist.reduce_scatter(output, inputs, op, group, later), later)
    return [output, *inputs]


def _reduce_scatter_single(
    op: Any, dtype: torch.dtype, size: int, group: Group, later: bool
) -> Any:
    output, given = torch.empty(size, dtype=dtype), values(group.rank(), size * group.size(), dtype)
    options = c10d.ReduceScatterOptions()
    options.reduceOp = op
    group._reduce_scatter_base(output, given, options).wait()
    return [output, given]


def _all_to_all_single(dtype: torch.dtype, size: int, group: Group, later: bool) -> Any:
    given = values(group.rank(), size * group.size(), dtype)
    output = torch.empty_like(given)
    _finished(dist.all_to_all_single(output, given, group=group, async_op=later), later)
    return [output]


_CASES: list[tuple[str, list[Any]]] = [
    ("all_reduce", [partial(_all_reduce, op, dtype) for op, dtype in _REDUCTIONS]),
    ("reduce", [partial(_reduce, op, dtype) for op, dtype in _REDUCTIONS[::3]]),
    ("all_reduce_coalesced", [partial(_all_reduce_coalesced, dtype) for dtype in FLOATS]),
    (
        "reduce_scatter",
        [
            partial(case, op, dtype)
            for case in (_reduce_scatter, _reduce_scatter_single)
            for op, dtype in _REDUCTIONS[::3]
            if not dtype.is_complex
        ],
    ),
    *(
        (case.__name__[1:], [partial(case, dtype) for dtype in (*NUMBERS[::2], COMPLEX[0])])
        for case in (_broadcast, _all_gather)
    ),
    *(
        (case.__name__[1:], [partial(case, dtype) for dtype in NUMBERS[::2]])
        for case in (
            _all_gather_single,
            _gather,
            _scatter,
            _all_to_all_single,
        )
    ),
]


def _beside_gloo(rank: int, world_size: int, cases: list[Any]) -> None:
    group, gloo = new_fddp_group(), dist.group.WORLD
    assert gloo is not None
    for case, size, later in itertools.product(cases, SIZES, (False, True)):
        check_equal(case(size, group, later), case(size, gloo, later))
    dist.destroy_process_group(group)


@pytest.mark.parametrize(("name", "cases"), _CASES, ids=[name for name, _ in _CASES])
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.nightly), 3])
@pytest.mark.filterwarnings("ignore")
def test_results_are_those_of_gloo(
    world_size: int, name: str, cases: list[Any], ranks: RankPool
) -> None:
    ranks.run(world_size, _beside_gloo, cases)


def _beyond_gloo(rank: int, world_size: int) -> None:
    group = new_fddp_group()
    # Sizes that differ between ranks (those of other collectives: test_properties.py).
    output = torch.zeros(rank + 1)
    dist.reduce_scatter(output, [torch.ones(other + 1) for other in range(world_size)], group=group)
    check_equal([output], [torch.full((rank + 1,), float(world_size))])
    # A factor for each rank.
    scaled = torch.ones(5)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(rank + 1.0), group)
    check_equal([scaled], [torch.full((5,), world_size * (world_size + 1) / 2)])
    # Truth values.
    truth = torch.tensor([rank == 0, True, False])
    dist.all_reduce(truth, group=group)
    check_equal([truth], [torch.tensor([True, True, False])])
    dist.all_reduce(truth, OP.MIN, group)
    # Memory that is not contiguous.
    rows = torch.arange(12.0).reshape(3, 4)
    dist.all_reduce(rows.t()[::2], group=group)
    expected = torch.arange(12.0).reshape(3, 4)
    expected[:, ::2] *= world_size
    check_equal([rows], [expected])
    # A NaN of any rank.
    numbers = torch.tensor([float("nan") if rank == 1 else 1.0, 2.0])
    dist.all_reduce(numbers, OP.MIN, group)
    assert numbers[0].isnan()
    assert numbers[1] == 2.0
    dist.destroy_process_group(group)


@pytest.mark.parametrize("world_size", [2, 3])
def test_more_than_gloo(world_size: int, ranks: RankPool) -> None:
    ranks.run(world_size, _beyond_gloo)


def _all_to_all_of_parts(rank: int, world_size: int) -> None:
    group = new_fddp_group()
    refused: list[tuple[list[int], str]] = [
        ([1, 2], "do not add up to the first dimension"),
        ([5, -1], "invalid split size -1"),
        ([4], "expected one split size for each of the 2 ranks, got 1"),
    ]
    for sizes, text in refused:
        for splits in ((sizes, [2, 2]), ([2, 2], sizes)):
            with pytest.raises(RuntimeError, match=text):
                dist.all_to_all_single(torch.ones(4), torch.ones(4), *splits, group)
    with pytest.raises(RuntimeError, match="into 2 equal parts"):
        dist.all_to_all_single(torch.ones(3), torch.ones(3), group=group)
    # Rows that are not contiguous.
    first, second = [(torch.arange(15.0).reshape(5, 3) * (r + 2)).t() for r in range(2)]
    received = torch.zeros(6, 5)[::2]
    splits = [1, 2] if rank else [2, 1]
    dist.all_to_all_single(received, second if rank else first, splits, splits, group)
    rows = (first[2:], second[1:]) if rank else (first[:2], second[:1])
    check_equal([received], [torch.cat(rows)])
    dist.all_to_all_single(torch.zeros(0, 5), torch.zeros(0, 5), group=group)
    dist.destroy_process_group(group)


def test_all_to_all_of_parts(ranks: RankPool) -> None:
    ranks.run(2, _all_to_all_of_parts)


def _in_group_of_one(rank: int, world_size: int) -> None:
    groups = [dist.new_group([other], backend="fddp") for other in range(world_size)]
    tensor = torch.arange(3.0)
    dist.all_reduce(tensor, group=groups[rank])
    outputs = [torch.zeros(3)]
    dist.all_gather(outputs, tensor, groups[rank])
    output = torch.zeros(3)
    dist.reduce_scatter(output, [tensor], group=groups[rank])
    received = torch.zeros(3)
    dist.all_to_all_single(received, tensor, group=groups[rank])
    sparse = tensor.to_sparse()
    dist.all_reduce(sparse, group=groups[rank])
    dist.barrier(groups[rank])
    check_equal([tensor, output, received, sparse.to_dense(), *outputs], [torch.arange(3.0)] * 5)


def test_groups_of_one_rank(ranks: RankPool) -> None:
    ranks.run(2, _in_group_of_one)


def _works(rank: int, world_size: int) -> None:
    group = new_fddp_group()
    # Futures complete without a wait, in the order of issue.
    order: list[int] = []
    tensors = [torch.full((size,), 1.0) for size in (1, 200_000, 3, 0)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    futures = [
        work.get_future().then(lambda future, i=i: (order.append(i), future.value())[1])
        for i, work in enumerate(works)
    ]
    for future, tensor in zip(futures, tensors, strict=True):
        check_equal(future.wait(), [torch.full_like(tensor, float(world_size))])
    assert order == [0, 1, 2, 3]
    assert all(work.is_completed() for work in works)
    # A future of completed work, and repeated waits.
    assert works[0].get_future().done()
    assert works[0].wait()
    assert works[0].wait()
    dist.destroy_process_group(group)


def test_works_and_futures(ranks: RankPool) -> None:
    ranks.run(2, _works)


def _in_inference_mode(rank: int, world_size: int) -> None:
    group = new_fddp_group()
    rows = torch.sparse_coo_tensor(torch.arange(3)[None], torch.ones(3, 4), (3, 4))
    for own in (torch.ones(6, 4).t(), rows):
        for ends in ("in the mode", "outside", "future"):
            with torch.inference_mode():
                tensor = own.clone()
                work = dist.all_reduce(tensor, group=group, async_op=True)
                if ends == "in the mode":
                    work.wait()
            work.get_future().wait() if ends == "future" else work.wait()
            assert tensor.is_inference()
            with torch.inference_mode():
                assert (tensor.to_dense() == world_size).all()


def test_inference_tensors_are_written_wherever_the_work_ends(ranks: RankPool) -> None:
    ranks.run(2, _in_inference_mode)
