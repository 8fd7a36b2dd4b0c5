"""Choice of shared memory: by hosts, around obstacles, reported alike on all ranks.

Functions named `*_on_rank` run on ranks, which are processes, as `fn(rank, world_size, *args)`.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fddp
from fddp.errors import PlanMismatchError
from fddp.native import extension
from fddp.transport import open_transport
from fddp.transport.c10d.transport import C10dTransport
from fddp.transport.selection import choose
from fddp.transport.shm import host_discovery, opening
from tests.support.chunks import AXES, SQUARE, part, total
from tests.support.polling import soon
from tests.support.process_resources import (
    is_shared,
    open_file_count,
    open_files,
)
from tests.support.ranks import split_into_hosts

if TYPE_CHECKING:
    from pathlib import Path

    from fddp.transport import Transport
    from tests.support.ranks import RankPool

ALL_SHARE = "all {} ranks share the memory of a host"
APART = "the ranks are on 2 hosts or parts of them (0-1, 2-3)"

# Choice of transport


def chosen_on_rank(rank: int, world_size: int) -> None:
    for wanted in ("auto", "shm"):
        with open_transport(name=wanted, timeout_s=20) as transport:  # type: ignore[arg-type]
            assert transport.name == "shm"
            assert transport.reason == ALL_SHARE.format(world_size)
            assert transport.timeout_s == 20
    with open_transport(name="c10d", timeout_s=20) as transport:
        assert (transport.name, transport.reason) == ("c10d", "it was requested")
    alone = dist.new_group([rank], use_local_synchronization=True)
    with open_transport(alone) as transport:
        assert transport.name == "c10d"
        assert transport.reason == "the group has only one rank"
    with open_transport(alone, "shm") as transport:
        assert transport.name == "shm"
        value = transport.empty(3, torch.float32, torch.device("cpu")).fill_(2.0)
        transport.all_reduce(value, average=True).wait("nothing")
        assert value.tolist() == [2.0, 2.0, 2.0]
        assert transport.exchange(b"alone") == [b"alone"]


def test_ranks_of_one_host_share_memory(ranks: RankPool) -> None:
    ranks.run(2, chosen_on_rank)


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
            mock.patch.object(host_discovery, "MOST_DESCRIPTORS", 3),
            open_transport(name="shm", timeout_s=20) as transport,
        ):
            tensor = part(rank, 5, torch.float32)
            transport.all_reduce(tensor).wait("the sum")
            assert torch.equal(tensor, total((0, 1, 2, 3), 5, torch.float32))


def test_descriptors_may_be_exchanged_in_several_messages(ranks: RankPool) -> None:
    ranks.run(4, in_rounds_on_rank)


# Ranks split into hosts


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
        check_sums(transport, [(), *AXES], [ordinary, shared])
        unavailable = r"'shm' is not available on rank \d: the ranks are on 2"
        with pytest.raises(ValueError, match=unavailable):
            open_transport(name="shm")
    with split_into_hosts([(0, 2), (1,), (3,)]), open_transport(timeout_s=20) as transport:
        transport.open_subgroups(SQUARE, AXES)
        assert transport.name == "shm+c10d"
        assert "on 3 hosts or parts of them (0+2, 1, 3); shm within" in transport.reason
        check_sums(transport, AXES, [torch.empty(5)])
    with split_into_hosts([(0, 3), (1, 2)]), open_transport(timeout_s=20) as transport:
        transport.open_subgroups(SQUARE, AXES)
        assert transport.name == "c10d", "no axis lies within a host"


def check_sums(transport: Transport, groups: list[Any], tensors: list[torch.Tensor]) -> None:
    for axes in groups:
        members = SQUARE.group(axes or SQUARE.names, transport.rank)
        for tensor in tensors:
            tensor.copy_(part(transport.rank, 5, torch.float32))
            transport.all_reduce(tensor, axes=axes).wait("the sum")
            assert torch.equal(tensor, total(members, 5, torch.float32))


def opened_late(rank: int, world_size: int, name: str, path: Path) -> bool:
    """True if rank 1, the last to connect, had done so when this rank's call returned."""
    with open_transport(name=name, timeout_s=20) as transport:
        connect = transport._connect

        def connect_late(groups: Any) -> None:
            connect(groups)
            if rank == 1:
                time.sleep(0.2)
                path.touch()

        with mock.patch.object(transport, "_connect", connect_late):
            transport.open_subgroups(SQUARE, AXES)
        return path.exists()


@pytest.mark.parametrize("name", ["c10d", "shm"])
def test_groups_are_open_on_all_ranks_once_they_are_on_one(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    assert all(ranks.run(4, opened_late, name, tmp_path / "opened"))


def test_groups_within_a_host_share_memory_where_all_ranks_do_not(ranks: RankPool) -> None:
    ranks.run(4, divided_on_rank)


# Obstacles on one rank


def obstacle_on_rank(rank: int, world_size: int, method: str, at: int) -> tuple[str, str]:
    def fails(*_: Any) -> None:
        raise OSError(24, f"no more files for {method}")

    before = open_file_count()
    where = (
        host_discovery._HostDiscovery if hasattr(host_discovery._HostDiscovery, method) else opening
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
            used = open_files()
            unused = [file for file in range(max(used) + free + 2) if file not in used]
            resource.setrlimit(resource.RLIMIT_NOFILE, (unused[free], limits[1]))
        try:
            transport = choose(c10d, "auto")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        names.append(transport.name)
        if transport.name == "c10d":
            assert "rank 1: " in transport.reason
        if transport._memory is None:  # else ranks 0 and 2 share memory
            assert soon(lambda: open_file_count() <= before)  # noqa: B023
        tensor = part(rank, 5, torch.float32)
        transport.all_reduce(tensor).wait("the sum")
        assert torch.equal(tensor, total((0, 1, 2), 5, torch.float32))
        transport.close()
    return names


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

    view = (lambda fd, span: Elsewhere()) if rank == 1 else extension.compiled.ShmView
    with mock.patch.object(extension.compiled, "ShmView", view), open_transport() as transport:
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


@pytest.mark.parametrize("text", [b"auto", b"auto\nx\n0\ny", b"\xff\nx\n0\n0"])
def test_a_malformed_opening_names_its_sender(text: bytes) -> None:
    c10d = mock.Mock(history=(0, 0))
    c10d.exchange.return_value = [b"auto\nGradSync\n0\n0", text]
    with pytest.raises(fddp.DesyncError, match="rank 1 sent a malformed 'opening' message"):
        choose(c10d, "auto", "GradSync")
    c10d.end_opening.assert_called_once()
