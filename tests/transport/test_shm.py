"""Promises of shared memory beyond the contract of `Transport` (test_contract.py).

Functions named `*_on_rank` run on ranks, which are processes, as `fn(rank, world_size, *args)`.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fddp
from fddp.core.schedule.topology import Topology
from fddp.errors import ClosedError, DesyncError, FddpError, PlanMismatchError
from fddp.transport import open_transport
from fddp.transport.c10d.transport import C10dTransport
from fddp.transport.selection import choose
from fddp.transport.shm import host_discovery
from fddp.transport.shm import transport as shm
from tests.support.chunks import AXES, SQUARE, own_chunk, part, total
from tests.support.polling import soon
from tests.support.process_resources import (
    Resources,
    arena_mappings,
    open_file_count,
    open_files,
    resources,
)
from tests.support.ranks import split_into_hosts

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fddp.transport import Transport
    from tests.support.ranks import RankPool

ALL_SHARE = "all {} ranks share the memory of a host"
APART = "the ranks are on 2 hosts or parts of them (0-1, 2-3)"

# Which transport


def chosen_on_rank(rank: int, world_size: int) -> None:
    for wanted in ("auto", "shm"):
        with open_transport(name=wanted, timeout_s=20) as transport:  # type: ignore[arg-type]
            assert transport.name == "shm"
            assert transport.reason == ALL_SHARE.format(world_size)
            assert transport.timeout_s == 20
    with open_transport(name="c10d", timeout_s=20) as transport:
        assert (transport.name, transport.reason) == ("c10d", "it was requested")
    with open_transport(dist.new_group([rank], use_local_synchronization=True)) as transport:
        assert transport.name == "c10d"
        assert transport.reason == "the group has only one rank"


def test_ranks_of_one_host_share_memory(ranks: RankPool) -> None:
    ranks.run(2, chosen_on_rank)


def alone_on_rank(rank: int, world_size: int) -> None:
    with open_transport(name="shm") as transport:
        assert transport.name == "shm"
        value = transport.empty(3, torch.float32, torch.device("cpu")).fill_(2.0)
        transport.all_reduce(value, average=True).wait("nothing")
        assert value.tolist() == [2.0, 2.0, 2.0]
        assert transport.exchange(b"alone") == [b"alone"]


def test_one_rank_may_ask_for_shared_memory(ranks: RankPool) -> None:
    ranks.run(1, alone_on_rank)


def logged_on_rank(rank: int, world_size: int) -> tuple[list[str], Any]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fddp")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with fddp.GradSync({"w": torch.zeros(3)}, timeout_s=20) as sync:
            assert sync.transport == "shm"
            for _ in range(2):
                _, info = sync({"w": torch.ones(3)}, with_info=True)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return records, info


def test_choice_of_transport_is_logged_once(ranks: RankPool) -> None:
    for rank, (records, info) in enumerate(ranks.run(2, logged_on_rank)):
        reason = ALL_SHARE.format(2)
        assert records == [f"rank {rank} of 2: transport shm, because {reason}"]
        assert (info.transport, info.transport_reason) == ("shm", reason)


def disagreeing_on_rank(rank: int, world_size: int) -> None:
    wanted = ["auto", "c10d", "auto"][rank]
    text = "transport is auto on rank 0 and c10d on rank 1; pass the same transport on every rank"
    with pytest.raises(PlanMismatchError, match=text):
        open_transport(name=wanted)  # type: ignore[arg-type]
    with pytest.raises(PlanMismatchError, match=text):
        fddp.GradSync({"w": torch.zeros(3)}, transport=wanted)  # type: ignore[arg-type]


def test_different_transport_arguments_are_refused(ranks: RankPool) -> None:
    ranks.run(3, disagreeing_on_rank)


def in_rounds_on_rank(rank: int, world_size: int) -> None:
    """As on a host of many ranks, where not all descriptors may be on their way at once."""
    for on_the_way in (1, 16, 40):
        with (
            mock.patch.object(host_discovery, "_MAX_FDS_IN_FLIGHT", on_the_way),
            mock.patch.object(host_discovery, "_RANKS_PER_MESSAGE", 3),
            open_transport(name="shm", timeout_s=20) as transport,
        ):
            tensor = part(rank, 5, torch.float32)
            transport.all_reduce(tensor).wait("the sum")
            assert torch.equal(tensor, total((0, 1, 2, 3), 5, torch.float32))


def test_descriptors_may_be_exchanged_in_several_messages(ranks: RankPool) -> None:
    ranks.run(4, in_rounds_on_rank)


# Hosts, as the test says


def divided_on_rank(rank: int, world_size: int) -> None:
    with split_into_hosts([(0, 1), (2, 3)]), open_transport(timeout_s=20) as transport:
        assert (transport.name, transport.reason) == ("c10d", APART)
        ordinary = transport.empty(5, torch.float32, torch.device("cpu"))
        transport.open_subgroups(SQUARE, AXES)
        assert transport.name == "shm+c10d"
        assert transport.reason == f"{APART}; shm within a host, c10d across"
        shared = transport.empty(5, torch.float32, torch.device("cpu"))
        assert not is_shared(ordinary)
        assert is_shared(shared)
        for axes in [(), *AXES]:
            group = SQUARE.group(axes or SQUARE.names, rank)
            for tensor in (ordinary, shared):
                tensor.copy_(part(rank, 5, torch.float32))
                transport.all_reduce(tensor, axes=axes).wait("the sum")
                assert torch.equal(tensor, total(group, 5, torch.float32))
        unavailable = r"'shm' is not available on rank \d: the ranks are on 2"
        with pytest.raises(ValueError, match=unavailable):
            open_transport(name="shm")


def is_shared(tensor: Tensor) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= tensor.data_ptr() < int(end, 16):
            return "memfd:" in line
    raise AssertionError("memory that is not mapped")


def test_groups_within_a_host_share_memory_where_all_ranks_do_not(ranks: RankPool) -> None:
    ranks.run(4, divided_on_rank)


def interleaved_hosts_on_rank(rank: int, world_size: int) -> None:
    with split_into_hosts([(0, 2), (1,), (3,)]), open_transport(timeout_s=20) as transport:
        transport.open_subgroups(SQUARE, AXES)
        assert transport.name == "shm+c10d"
        assert "on 3 hosts or parts of them (0+2, 1, 3); shm within" in transport.reason
        for axes in AXES:
            tensor = part(rank, 5, torch.float32)
            transport.all_reduce(tensor, axes=axes).wait("the sum")
            assert torch.equal(tensor, total(SQUARE.group(axes, rank), 5, torch.float32))
    with split_into_hosts([(0, 3), (1, 2)]), open_transport(timeout_s=20) as transport:
        transport.open_subgroups(SQUARE, AXES)
        assert transport.name == "c10d", "no axis lies within a host"


def test_hosts_may_have_any_ranks(ranks: RankPool) -> None:
    ranks.run(4, interleaved_hosts_on_rank)


def hierarchical_on_rank(rank: int, world_size: int) -> Any:
    params = {"w": torch.zeros(50, 30), "b": torch.zeros(7)}
    grads = {
        name: torch.randn(p.shape, generator=torch.Generator().manual_seed(rank))
        for name, p in params.items()
    }
    mesh = Topology(host=2, local=2)
    with (
        split_into_hosts([(0, 1), (2, 3)]),
        fddp.GradSync(params, mesh=mesh, algorithm="hierarchical") as mixed,
    ):
        assert mixed.transport == "shm+c10d"
        within = mixed(grads)
    with fddp.GradSync(params, mesh=mesh, algorithm="hierarchical") as sync:
        assert sync.transport == "shm"
        shared = sync(grads)
    with fddp.GradSync(params, transport="c10d") as flat:
        return within, shared, flat(grads)


def test_hierarchical_schedules_over_both(ranks: RankPool) -> None:
    for within, shared, flat in ranks.run(4, hierarchical_on_rank):
        for name in flat:
            assert torch.allclose(within[name], flat[name], atol=1e-6)
            assert torch.allclose(shared[name], flat[name], atol=1e-6)


# Obstacles on one rank


def obstacle_on_rank(rank: int, world_size: int, method: str, at: int) -> tuple[str, str]:
    def fails(*_: Any) -> None:
        raise OSError(24, f"no more files for {method}")

    before = open_file_count()
    where = (
        host_discovery._HostDiscovery
        if hasattr(host_discovery._HostDiscovery, method)
        else shm.ShmTransport
    )
    with mock.patch.object(where, method, fails if rank == at else getattr(where, method)):
        with open_transport(timeout_s=20) as transport:
            outcome = transport.name, transport.reason
            tensor = part(rank, 5, torch.float32)
            transport.all_reduce(tensor).wait("the sum")
            assert torch.equal(tensor, total((0, 1, 2), 5, torch.float32))
        with pytest.raises(
            ValueError, match=f"'shm' is not available .* no more files for {method}"
        ):
            open_transport(name="shm", timeout_s=20)
    dist.barrier()
    assert soon(lambda: open_file_count() <= before), "gloo closes its own in the background"
    return outcome


@pytest.mark.parametrize(
    ("method", "at"),
    [
        ("open_listener", 0),
        ("open_listener", 2),
        ("connect_to_leader", 1),
        ("send", 0),
        ("send", 1),
        ("distribute_fds", 0),
        ("map_all", 2),
        ("check", 1),
        ("_make_control_block", 0),
        ("_join", 2),
    ],
)
def test_obstacle_on_one_rank_is_reported_on_all(ranks: RankPool, method: str, at: int) -> None:
    answers = ranks.run(3, obstacle_on_rank, method, at)
    assert len(set(answers)) == 1
    name, reason = answers[0]
    # A rank that connects to no listener is no member of a host, and blocks no other rank.
    assert name == "c10d"
    assert f"rank {at}: [Errno 24] no more files for {method}" in reason


def out_of_files_on_rank(rank: int, world_size: int) -> list[str]:
    """Rank 1 may open ever fewer files, beginning with as many as it takes."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    names = []
    for free in range(12, -1, -1):
        c10d = C10dTransport(dist.group.WORLD, 20)
        before = open_file_count()
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free(free), limits[1]))
        try:
            transport = choose(c10d, "auto")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        names.append(transport.name)
        if transport.name == "c10d":
            assert "rank 1: " in transport.reason
        if isinstance(transport, C10dTransport):  # ranks 0 and 2 may still share memory
            assert open_file_count() == before
        tensor = part(rank, 5, torch.float32)
        transport.all_reduce(tensor).wait("the sum")
        assert torch.equal(tensor, total((0, 1, 2), 5, torch.float32))
        transport.close()
    return names


def lowest_free(number: int) -> int:
    """A limit under which so many files can be opened."""
    used = open_files()
    free = [file for file in range(max(used) + number + 2) if file not in used]
    return free[number]


def test_a_rank_may_run_out_of_files_at_any_moment(ranks: RankPool) -> None:
    """Files are also lost in the middle of what is received."""
    first, *others = ranks.run(3, out_of_files_on_rank)
    print(first)
    assert all(names == first for names in others)
    assert first[0] == "shm"
    assert first[-1] == "c10d"
    assert first == sorted(first, reverse=True), "less never does where more did not"


def unproved_on_rank(rank: int, world_size: int) -> str:
    """Rank 1 maps other memory than the others'."""

    class Elsewhere:
        def write(self, offset: int, data: bytes) -> None:
            pass

    view = (lambda fd, span: Elsewhere()) if rank == 1 else host_discovery.view_arena
    with mock.patch.object(host_discovery, "view_arena", view), open_transport() as transport:
        assert transport.name == "c10d"
        return transport.reason


def test_memory_must_be_proved_to_be_the_same(ranks: RankPool) -> None:
    for reason in ranks.run(3, unproved_on_rank):
        assert "rank 0: this rank's memory lacks the data that rank 1 wrote into it" in reason


def full_on_rank(rank: int, world_size: int) -> None:
    with open_transport(timeout_s=20) as transport:
        # More than is available, always; yet the kernel refuses no such mapping. Of all memory it
        # does where there is no swap, but for what malloc happens to have left over.
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - (1 << 20)
        cpu = torch.device("cpu")
        too_much = transport.empty(memory, torch.uint8, cpu)  # untouched, so that it costs nothing
        assert not is_shared(too_much[:1])
        del too_much
        shared = transport.empty(10, torch.float32, cpu) if rank == 0 else torch.empty(10)
        shared.copy_(part(rank, 10, torch.float32))
        transport.all_reduce(shared).wait("the sum of shared and ordinary memory")
        assert torch.equal(shared, total((0, 1), 10, torch.float32))
        meta = transport.empty(10, torch.float32, torch.device("meta"))
        assert meta.device.type == "meta"


def test_memory_that_cannot_be_reserved_is_ordinary(ranks: RankPool) -> None:
    ranks.run(2, full_on_rank)


# Operations

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


def pairs_on_rank(rank: int, world_size: int) -> None:
    """Overlapping groups of torch, several transports on each, all in use at a time."""
    pairs = [dist.new_group([i, i + 1]) for i in range(world_size - 1)]
    mine = [(i, pair) for i, pair in enumerate(pairs) if rank in (i, i + 1)]
    opened = [(i, open_transport(pair, timeout_s=20)) for i, pair in mine for _ in range(2)]
    tensors = [torch.full((1000,), float(rank)) for _ in opened]
    works = [t.all_reduce(tensor) for (_, t), tensor in zip(opened, tensors, strict=True)]
    for (i, transport), tensor, work in zip(opened, tensors, works, strict=True):
        work.wait("the sum of a pair")
        assert transport.name == "shm"
        assert torch.equal(tensor, torch.full((1000,), 2.0 * i + 1))
        transport.close()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "local"))
    with open_transport(mesh["host"], timeout_s=20) as transport:
        assert transport.name == "shm"
        value = torch.tensor([float(rank)])
        transport.all_reduce(value).wait("the sum of a column")
        assert value.item() == 2 * (rank % 2) + 2


def test_several_groups_at_once(ranks: RankPool) -> None:
    ranks.run(4, pairs_on_rank)


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
    file = os.dup(transport._arena.fd)  # type: ignore[attr-defined]
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


# Resources


def opened_and_closed_on_rank(rank: int, world_size: int) -> tuple[Resources, Resources]:
    earlier = resources().mappings  # of groups whose communicators other tests have opened

    def cycle() -> None:
        with open_transport(timeout_s=20) as transport:
            transport.open_subgroups(SQUARE, AXES)
            tensors = [transport.empty(n, torch.float32, torch.device("cpu")) for n in (4, 10**6)]
            works = [transport.all_reduce(tensor) for tensor in tensors]
            transport.all_reduce(torch.ones(10**6), axes=("host",)).wait("the sum")
            for work in works:
                work.wait("the sum")

    cycle()
    dist.barrier()
    before = after = resources()
    for _ in range(8):
        cycle()
    dist.barrier()
    deadline_s = time.perf_counter() + 60
    while any(b > a for a, b in zip(before, after, strict=True)) or after.mappings > earlier:
        after = resources()
        if time.perf_counter() > deadline_s:
            break
        time.sleep(0.05)  # threads end a moment after they were asked to
    return before, after._replace(mappings=after.mappings - earlier)


def test_closing_frees_all(ranks: RankPool) -> None:
    for before, after in ranks.run(4, opened_and_closed_on_rank):
        print(f"{before} before, {after} after")
        assert after.threads <= before.threads
        assert after.files <= before.files
        assert after.mappings <= 0


def abandoned_on_rank(rank: int, world_size: int) -> int:
    """As where a constructor raises behind the opening of its transport."""
    earlier = resources().mappings
    transport = open_transport(timeout_s=20)
    transport.exchange(b"all are there")
    dist.barrier()
    del transport
    return resources().mappings - earlier


def test_an_unclosed_transport_is_freed_with_its_owner(ranks: RankPool) -> None:
    assert ranks.run(2, abandoned_on_rank) == [0, 0]
