"""Promises of c10d beyond the contract of `Transport` (tests/transport/test_contract.py).

Functions named `*_on_rank` run on ranks, which are processes, as `fn(rank, world_size, *args)`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from fddp.core.schedule.topology import Topology
from fddp.errors import FddpError, SyncTimeoutError
from fddp.transport import open_transport
from fddp.transport.c10d.gloo import _MAX_EXCHANGED_BYTES
from tests.support.chunks import AXES, SQUARE
from tests.support.polling import soon
from tests.support.process_resources import Resources, growth, resources
from tests.support.ranks import run_fresh

if TYPE_CHECKING:
    from fddp.transport import Group, Transport
    from tests.support.ranks import RankPool


def open_c10d(group: Group | None = None, timeout_s: float | None = None) -> Transport:
    return open_transport(group, "c10d", timeout_s)


# Ranks that die


def fails_with_much_pending_on_rank(rank: int, world_size: int) -> None:
    transport = open_c10d(timeout_s=30)
    transport.exchange(b"all are there")
    if rank == 1:
        os._exit(7)
    works = [transport.all_reduce(torch.ones(10)) for _ in range(8)]
    works[0].wait("bucket 0")


def test_a_survivors_process_ends_in_order() -> None:
    """Operations left pending in the backend must not hold up, or break, the end of a process."""
    first, second = run_fresh(2, fails_with_much_pending_on_rank)
    assert second.exitcode == 7
    assert first.error is not None
    assert "RankLostError" in first.error
    assert first.exitcode == 0


# Groups


def subgroups_on_rank(rank: int, world_size: int, name: Any) -> None:
    pairs = [dist.new_group([i, i + 1]) for i in range(world_size - 1)]
    mine = [(i, pair) for i, pair in enumerate(pairs) if rank in (i, i + 1)]
    # The pairs overlap, and all transports of a rank are in use at a time.
    opened = [(i, open_transport(pair, name, 20)) for i, pair in mine for _ in range(2)]
    tensors = [torch.full((1000,), float(rank)) for _ in opened]
    works = [t.all_reduce(tensor) for (_, t), tensor in zip(opened, tensors, strict=True)]
    for (i, transport), tensor, work in zip(opened, tensors, works, strict=True):
        work.wait("the sum of a pair")
        assert (transport.name, transport.world_size) == (name, 2)
        assert torch.equal(tensor, torch.full((1000,), 2.0 * i + 1))
        transport.close()
    for i, pair in enumerate(pairs):
        if rank not in (i, i + 1):
            with pytest.raises(ValueError, match=f"rank {rank} is no member of the group"):
                open_transport(pair, name)
    if rank >= world_size - 2:
        last = open_transport(pairs[-1], name, 0.5)
        if rank == world_size - 2:
            with pytest.raises(
                SyncTimeoutError, match=rf"no response from rank 1 \(global {rank + 1}\)"
            ):
                last.all_reduce(torch.ones(1)).wait("bucket 0")
    if world_size == 4:  # a dimension of a mesh is a group
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "local"))
        with open_transport(mesh["local"], name, 20) as transport:
            total = torch.tensor([float(rank)])
            transport.all_reduce(total).wait("the sum of a host")
            assert total.item() == {0: 1.0, 1: 5.0}[rank // 2]
    dist.barrier()


@pytest.mark.parametrize("name", ["c10d", "shm"])
def test_transports_over_overlapping_subgroups(ranks: RankPool, name: str) -> None:
    for world_size in (3, 4):
        ranks.run(world_size, subgroups_on_rank, name)


def test_a_missing_group_error_names_the_remedies() -> None:
    with pytest.raises(FddpError, match=r"torchrun.*init_process_group.*fddp\.loopback"):
        open_c10d()


def other_backend_on_rank(rank: int, world_size: int) -> None:
    def make_gloo(store: Any, rank: int, world_size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)

    dist.Backend.register_backend("elsewhere", make_gloo, devices=["cpu"])
    group = dist.new_group(backend="cpu:elsewhere")
    with open_c10d(group, timeout_s=20) as transport:
        sum_ = torch.ones(3)
        transport.all_reduce(sum_).wait("the sum")
        assert sum_.tolist() == [world_size] * 3
        assert transport.exchange(b"x") == [b"x"] * world_size
        transport.open_subgroups(SQUARE, AXES)
        buffer = torch.arange(4.0) + rank
        transport.reduce_scatter(buffer, axes=("local",), average=True).wait("the shards")
        transport.all_gather_in_place(buffer, axes=("local",)).wait("the whole")
        assert buffer.tolist() == [rank // 2 * 2 + i + 0.5 for i in range(4)]
    dist.barrier()


def test_backends_that_fddp_does_not_know_go_through_new_group() -> None:
    for outcome in run_fresh(4, other_backend_on_rank):
        assert outcome.error is None, outcome.error


def timeout_on_rank(rank: int, world_size: int) -> None:
    with open_c10d() as transport:
        assert transport.timeout_s == 60.0
        assert transport.control_device == torch.device("cpu")
        with pytest.raises(ValueError, match=r"is on meta and the group serves \['cpu'"):
            transport.all_reduce(torch.ones(2, device="meta"))


def test_the_groups_timeout_is_the_default(ranks: RankPool) -> None:
    ranks.run(2, timeout_on_rank)


# Resources


def open_and_close_on_rank(rank: int, world_size: int, name: Any) -> Resources:
    """Return what is held after nine cycles beyond the first; mappings beyond none."""
    earlier = resources().mappings  # of groups whose communicators other tests have opened

    def cycle() -> None:
        with open_transport(name=name, timeout_s=20) as transport:
            transport.open_subgroups(SQUARE, AXES)
            tensors = [transport.empty(n, torch.float32, torch.device("cpu")) for n in (4, 10**6)]
            works = [transport.all_reduce(tensor) for tensor in tensors]
            transport.reduce_scatter(torch.ones(10**6), axes=("host",)).wait("the shards")
            for work in works:
                work.wait("the sum")
            dist.barrier()  # others may still be connecting
        dist.barrier()

    cycle()
    before = resources()._replace(mappings=earlier)
    for _ in range(9):
        cycle()
    return growth(before)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts through Linux's /proc")
@pytest.mark.parametrize("name", ["c10d", "shm"])
def test_closing_frees_all(ranks: RankPool, name: str) -> None:
    for beyond in ranks.run(4, open_and_close_on_rank, name):
        assert not any(beyond), beyond


def divide_again_on_rank(rank: int, world_size: int) -> None:
    with open_c10d(timeout_s=20) as transport:
        transport.open_subgroups(Topology(rack=1, world=4), [("rack",), ("world",)])
        whole = resources()
        transport.open_subgroups(SQUARE, AXES)
        dist.barrier()  # others may still be connecting
        before = resources()
        # Each group has threads of its own. Files include connections that are made later.
        assert growth(whole, within_s=0.0).threads > 0
        transport.open_subgroups(
            Topology(node=2, device=2), [("device",), ("node",), ("node", "device")]
        )
        assert soon(lambda: resources().threads <= before.threads)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts through Linux's /proc")
def test_groups_that_are_open_are_used_again(ranks: RankPool) -> None:
    ranks.run(4, divide_again_on_rank)


# Two ranks exchange small tensors


def sums_on_rank(rank: int, world_size: int) -> list[tuple[str, bool]]:
    """Sums of a transport against those of torch's own group, bit by bit."""
    transport, found = open_c10d(), []
    limit = _MAX_EXCHANGED_BYTES
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int32):
        for nbytes in (dtype.itemsize, 24, limit - 8, limit, limit + 8):
            mine = torch.arange(nbytes // dtype.itemsize).add(1 + rank).to(dtype)
            mine = mine / 3 if dtype.is_floating_point else mine
            for average in {False, dtype.is_floating_point}:
                ours, theirs = mine.clone(), mine.clone()
                transport.all_reduce(ours, average=average).wait("it")
                dist.all_reduce(theirs)
                expected = theirs / world_size if average else theirs
                found.append((f"{dtype} {nbytes} {average}", torch.equal(ours, expected)))
    return found


def test_small_sums_of_two_ranks_have_the_bits_of_torchs(ranks: RankPool) -> None:
    for found in ranks.run(2, sums_on_rank):
        assert len(found) == 40
        assert [case for case, is_equal in found if not is_equal] == []
