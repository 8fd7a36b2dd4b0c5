"""Tensors of `empty_shared`, buckets of DDP and buffers of FSDP2: used where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fddp
from tests.support.backends import as_default, new_fddp_group
from tests.support.programs import run_python, torchrun
from tests.support.ranks import RankPool

SIZE = 120_000  # by rank: more than is copied when an operation is posted


def _staged(group: Any) -> int:
    return int(group._get_backend(torch.device("cpu")).staged_operations)


def _by_each_collective(group: Any, whole: torch.Tensor) -> None:
    """Collectives on `whole`, which holds ones, and results in ordinary memory."""
    world_size = group.size()
    dist.all_reduce(whole, group=group)
    assert bool(whole.eq(world_size).all())
    dist.all_reduce(whole.view(2, -1)[1], dist.ReduceOp.MAX, group)
    part = torch.empty(whole.numel() // world_size)
    dist.reduce_scatter_tensor(part, whole, dist.ReduceOp.AVG, group)
    assert bool(part.eq(world_size).all())
    dist.all_gather_into_tensor(whole, part + group.rank(), group)
    expected = torch.arange(world_size).add(world_size).repeat_interleave(part.numel())
    assert torch.equal(whole, expected.float())
    dist.reduce(whole, dst=world_size - 1, group=group)
    dist.broadcast(whole, src=world_size - 1, group=group)
    assert torch.equal(whole, expected.float() * world_size)
    target = torch.empty_like(whole)
    dist.all_to_all_single(target, whole, group=group)
    assert bool(target.eq(world_size * (world_size + group.rank())).all())


def _used_in_place(rank: int, world_size: int) -> None:
    group = new_fddp_group()
    shared = fddp.empty_shared(world_size, SIZE, dtype=torch.float32, group=group)
    assert shared.is_contiguous()
    assert not shared._is_view()
    _by_each_collective(group, shared.fill_(1.0).view(-1))
    assert _staged(group) == 0
    _by_each_collective(group, torch.ones(world_size * SIZE))
    # The ranks other than the source have nothing to copy in a broadcast.
    assert _staged(group) == (7 if rank == world_size - 1 else 6)
    dist.destroy_process_group(group)


def test_collectives_use_shared_tensors_where_they_are(ranks: RankPool) -> None:
    ranks.run(2, _used_in_place)
    ranks.run(3, _used_in_place)


def _of_any_shape(rank: int, world_size: int) -> None:
    group = new_fddp_group()
    for size in [(), (0,), (3, 0, 2), (5,), (2, 3)]:
        for tensor in (
            fddp.empty_shared(*size, group=group),
            fddp.empty_shared(list(size), group=group),
            fddp.empty_shared(torch.Size(size), device="cpu", dtype=torch.bfloat16, group=group),
        ):
            assert tensor.shape == size
            dist.all_reduce(tensor.fill_(1.0), group=group)
            assert bool(tensor.eq(world_size).all())
    assert fddp.empty_shared(1, group=group).dtype == torch.get_default_dtype()
    # A rank may allocate alone, and as a parameter.
    if rank == 0:
        weight = torch.nn.Parameter(fddp.empty_shared(3, group=group).fill_(2.0))
        weight.square().sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [4.0] * 3
    kept = fddp.empty_shared(1000, 7, group=group).fill_(float(rank))
    dist.destroy_process_group(group)
    assert bool(kept.eq(rank).all())
    with pytest.raises(ValueError, match="not init"):
        fddp.empty_shared(3, group=group)
    del kept


def test_shapes_dtypes_and_lifetime(ranks: RankPool) -> None:
    ranks.run(2, _of_any_shape)


def _refused(rank: int, world_size: int) -> None:
    group = new_fddp_group()
    with pytest.raises(ValueError, match=r"a size must not be negative, got \(-1,\)"):
        fddp.empty_shared(-1, group=group)
    with pytest.raises(ValueError, match=r"got \(-2, -3\)"):
        fddp.empty_shared((-2, -3), group=group)
    with pytest.raises(ValueError, match="shared memory is on the CPU, got device 'meta'"):
        fddp.empty_shared(3, device="meta", group=group)
    with pytest.raises(ValueError, match="does not have the backend"):
        fddp.empty_shared(3)  # the default group of the pool has gloo
    with pytest.raises(TypeError):
        fddp.empty_shared(3.5, group=group)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="addressable"):
        fddp.empty_shared(2**62, group=group)
    other = dist.new_group([0], backend="fddp")
    if rank == 1:
        with pytest.raises(ValueError, match=r"[Ii]nvalid process group"):
            fddp.empty_shared(3, group=other)
    else:  # of one rank, which shares no memory
        assert fddp.empty_shared(3, group=other).shape == (3,)
        dist.destroy_process_group(other)
    dist.destroy_process_group(group)


def test_bad_arguments(ranks: RankPool) -> None:
    ranks.run(2, _refused)


def test_without_a_group() -> None:
    run = run_python("-c", "import fddp; fddp.empty_shared(3)", code=1)
    assert "ValueError: Default process group has not been initialized" in run.stderr


def _fully_sharded(rank: int, world_size: int, shared: bool) -> int:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
    for module in (model[0], model):
        fully_shard(module)
        module.set_allocate_memory_from_process_group_for_comm(shared)  # type: ignore[operator]
    before = _staged(dist.group.WORLD)
    for _ in range(2):
        model(torch.ones(2, 300)).sum().backward()
    return _staged(dist.group.WORLD) - before


@pytest.mark.parametrize("shared", [False, True])
def test_buffers_of_fsdp(ranks: RankPool, tmp_path: Path, shared: bool) -> None:
    for staged in ranks.run(2, as_default, str(tmp_path), _fully_sharded, shared):
        assert (staged == 0) == shared


_DDP = """
import os, sys, torch, torch.distributed as dist
import fddp
dist.init_process_group(sys.argv[1])
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
before = backend.staged_operations
for _ in range(3):
    model(torch.full((1, 300), rank + 1.0)).sum().backward()
os.write(1, f"staged {backend.staged_operations - before}\\n".encode())  # at once
dist.destroy_process_group()
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("backend", "disabled"),
    [("fddp", "0"), pytest.param("cpu:fddp", "1", marks=pytest.mark.nightly)],
)
def test_buckets_of_ddp(tmp_path: Path, backend: str, disabled: str) -> None:
    script = tmp_path / "ddp.py"
    script.write_text(_DDP)
    run = torchrun(str(script), backend, env={"DDP_DISABLE_COMM_MEM": disabled})
    staged = {"0": 0, "1": 3}[disabled]
    assert run.stdout.count(f"staged {staged}") == 2, run.stderr
    assert "No backend of type" not in run.stderr  # torch's warning where it knows no default
