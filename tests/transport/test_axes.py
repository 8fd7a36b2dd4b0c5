"""The contract of `Transport` along the axes of a topology, held by every transport.

Functions named `*_on_rank` run on ranks, which are threads or processes, as `fn(group, *args)`.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import pytest
import torch

from fddp.core.schedule.topology import Topology
from fddp.errors import PlanMismatchError
from fddp.transport import loopback, open_transport
from tests.support.chunks import AXES, SQUARE, own_chunk, part, total
from tests.support.dtypes import MOVED, SUMMED
from tests.support.ranks import TRANSPORTS, launch_fixture

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fddp.transport import Group, Transport
    from tests.support.ranks import Launch

SHAPES = [(5,), (2, 3), (), (0,), (4, 0)]
LENGTHS = [0, 1, 7]  # of a chunk
AVERAGED = [dtype for dtype in SUMMED if dtype.is_floating_point or dtype.is_complex]


launch = launch_fixture(*TRANSPORTS, "fddp")


# Numbers


def sums_on_rank(group: Group, topology: Topology) -> None:
    with open_transport(group, timeout_s=20) as transport:
        names, rank = topology.names, transport.rank
        transport.open_subgroups(topology, [(name,) for name in names])
        for axes in [(), names, *((name,) for name in names)]:
            ranks = topology.group(axes or names, rank)
            for dtype in SUMMED:
                for shape in SHAPES:
                    tensor = part(rank, math.prod(shape), dtype).reshape(shape)
                    where = tensor.data_ptr()
                    work = transport.all_reduce(tensor, axes=axes)
                    work.wait("the sum")
                    assert tensor.shape == shape
                    assert torch.equal(tensor.flatten(), total(ranks, tensor.numel(), dtype))
                    assert tensor.data_ptr() == where
                    assert work.results == []
                for length in LENGTHS:
                    numel = length * len(ranks)
                    buffer = part(rank, numel, dtype)
                    transport.reduce_scatter(buffer, axes=axes).wait("the shards")
                    expected = own_chunk(total(ranks, numel, dtype), ranks, rank)
                    assert torch.equal(own_chunk(buffer, ranks, rank), expected), (axes, dtype)


@pytest.mark.parametrize(
    "topology",
    [SQUARE, Topology(host=1, local=3), Topology(world=2), Topology(world=1)],
    ids=str,
)
def test_sums_run_along_axes(launch: Launch, topology: Topology) -> None:
    launch(topology.world_size, sums_on_rank, topology)


@pytest.mark.parametrize(
    "topology", [Topology(host=2, local=4), Topology(a=2, b=2, c=2), Topology(world=5)], ids=str
)
def test_sums_run_along_axes_of_larger_worlds(topology: Topology) -> None:
    loopback(topology.world_size, sums_on_rank, topology)


def gathers_on_rank(group: Group, topology: Topology) -> None:
    with open_transport(group, timeout_s=20) as transport:
        names, rank = topology.names, transport.rank
        transport.open_subgroups(topology, [(name,) for name in names])
        for axes in [(), *((name,) for name in names)]:
            ranks = topology.group(axes or names, rank)
            for dtype in MOVED:
                # The last one does not fit into a copied operation.
                for length in [*LENGTHS, 30_000]:
                    chunks = [part(other, length, dtype) for other in ranks]
                    buffers = [torch.zeros(length * len(ranks), dtype=dtype) for _ in range(3)]
                    works = []
                    for buffer in buffers:
                        own_chunk(buffer, ranks, rank).copy_(part(rank, length, dtype))
                        works.append(transport.all_gather_in_place(buffer, axes=axes))
                    for buffer, work in zip(buffers, works, strict=True):
                        work.wait("the whole")
                        assert torch.equal(buffer, torch.cat(chunks)), (axes, dtype)
                        assert work.results == []
                    sent = [part(other, len(ranks) * length, dtype) for other in ranks]
                    buffer = part(rank, len(ranks) * length, dtype)
                    where = buffer.data_ptr()
                    work = transport.all_to_all_in_place(buffer, axes=axes, record_time=True)
                    work.wait("the chunks")
                    chunks = [own_chunk(tensor, ranks, rank) for tensor in sent]
                    assert torch.equal(buffer, torch.cat(chunks)), (axes, dtype)
                    assert buffer.data_ptr() == where
                    assert work.results == []
                    assert work.done_s is not None


@pytest.mark.parametrize("topology", [SQUARE, Topology(host=3, local=1)], ids=str)
def test_gathers_run_along_axes(launch: Launch, topology: Topology) -> None:
    launch(topology.world_size, gathers_on_rank, topology)


def means_on_rank(group: Group) -> None:
    with open_transport(group, timeout_s=20) as transport:
        rank = transport.rank
        transport.open_subgroups(SQUARE, AXES)
        for axes in [(), *AXES]:
            ranks = SQUARE.group(axes or SQUARE.names, rank)
            for dtype in AVERAGED:
                expected = total(ranks, 8, dtype) / len(ranks)
                tensor, buffer = part(rank, 8, dtype), part(rank, 8, dtype)
                transport.all_reduce(tensor, axes=axes, average=True).wait("the mean")
                work = transport.reduce_scatter(buffer, axes=axes, average=True, record_time=True)
                work.wait("its shards")
                assert work.done_s is not None
                assert torch.equal(tensor, expected), (axes, dtype)
                chunk = own_chunk(buffer, ranks, rank)
                assert torch.equal(chunk, own_chunk(expected, ranks, rank)), (axes, dtype)
        for sum_up in (transport.all_reduce, transport.reduce_scatter):
            with pytest.raises(TypeError, match=f"rank {rank} cannot average torch.int32; convert"):
                sum_up(torch.ones(4, dtype=torch.int32), average=True)


def test_means_are_sums_over_the_ranks_that_take_part(launch: Launch) -> None:
    launch(4, means_on_rank)


def neighbours_on_rank(group: Group) -> Tensor:
    """A chain of collectives on a slice: the memory around it stays as it is."""
    with open_transport(group, timeout_s=20) as transport:
        transport.open_subgroups(SQUARE, AXES)
        memory = torch.randn(32, generator=torch.Generator().manual_seed(transport.rank))
        before, buffer = memory.clone(), memory[8:24]
        own = own_chunk(buffer, SQUARE.group(("local",), transport.rank), transport.rank)
        transport.reduce_scatter(buffer, axes=("local",)).wait("the first link")
        transport.all_reduce(own, axes=("host",)).wait("the second link")
        transport.all_gather_in_place(buffer, axes=("local",)).wait("the third link")
        assert torch.equal(memory[:8], before[:8])
        assert torch.equal(memory[24:], before[24:])
        transport.all_reduce(before).wait("the sum")
        assert torch.allclose(buffer, before[8:24], atol=1e-6)
        return buffer.clone()


def test_a_hierarchical_sum_has_the_same_bits_everywhere(launch: Launch) -> None:
    first, *others = launch(4, neighbours_on_rank)
    assert all(torch.equal(first, other) for other in others)


def shards_on_rank(group: Group) -> Tensor:
    with open_transport(group, timeout_s=20) as transport:
        generator = torch.Generator().manual_seed(transport.rank)
        buffer = torch.randn(4000, generator=generator)
        transport.reduce_scatter(buffer).wait("the shards")
        return buffer.tensor_split(4)[transport.rank].clone()


def test_sharded_sums_run_in_rank_order(launch: Launch) -> None:
    parts = [torch.randn(4000, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert torch.equal(torch.cat(launch(4, shards_on_rank)), expected)


# Order


def interleaved_on_rank(group: Group) -> None:
    with open_transport(group, timeout_s=20) as transport:
        rank = transport.rank
        transport.open_subgroups(SQUARE, AXES)
        issues = [(axes, i) for axes in AXES for i in range(6)]
        # By host first, by local first, in turn, in turn from the end of one.
        orders: list[Callable[[tuple[tuple[str, ...], int]], object]] = [
            lambda issue: issue,
            lambda issue: (issue[0] == ("host",), issue[1]),
            lambda issue: (issue[1], issue[0]),
            lambda issue: (issue[1] + 3 * (issue[0] == ("host",)), issue[0]),
        ]
        issues.sort(key=orders[rank])
        buffers = [part(rank, 4 + 2 * i, torch.float32) for _, i in issues]
        works = [
            transport.all_reduce(buffer, axes=axes)
            if i % 2
            else transport.reduce_scatter(buffer, axes=axes)
            for buffer, (axes, i) in zip(buffers, issues, strict=True)
        ]
        for work in reversed(works):
            work.wait("one of many")
        for buffer, (axes, _) in zip(buffers, issues, strict=True):
            ranks = SQUARE.group(axes, rank)
            expected = total(ranks, buffer.numel(), torch.float32)
            assert torch.equal(own_chunk(buffer, ranks, rank), own_chunk(expected, ranks, rank))


def test_groups_of_two_axes_do_not_mix(launch: Launch) -> None:
    launch(4, interleaved_on_rank)


def divided_twice_on_rank(group: Group) -> None:
    with open_transport(group, timeout_s=20) as transport:
        rank = transport.rank
        pending = part(rank, 4, torch.float32)
        transport.open_subgroups(SQUARE, AXES)
        work = transport.all_reduce(pending, axes=("local",))
        # As before, by other names, of another shape.
        for topology in (SQUARE, Topology(node=2, device=2), Topology(row=4, column=1)):
            for name in topology.names:
                transport.open_subgroups(topology, {(name,)})
            for name in topology.names:
                ranks = topology.group((name,), rank)
                tensor = part(rank, 4, torch.float32)
                transport.all_reduce(tensor, axes=(name,)).wait("the sum")
                assert torch.equal(tensor, total(ranks, 4, torch.float32))
        work.wait("what was issued before")
        assert torch.equal(pending, total(SQUARE.group(("local",), rank), 4, torch.float32))
        with pytest.raises(
            ValueError,
            match=rf"all_reduce on rank {rank}: no group along \('local',\) was opened; "
            r"open: \('row',\), \('row', 'column'\), \('column',\); pass these axes to "
            r"open_subgroups",
        ):
            transport.all_reduce(pending, axes=("local",))


def test_a_transport_can_be_divided_anew(launch: Launch) -> None:
    launch(4, divided_twice_on_rank)


# Done


def done_on_rank(group: Group) -> None:
    with (
        open_transport(group, timeout_s=20) as transport,
        open_transport(group, timeout_s=20) as other,
    ):
        transport.open_subgroups(SQUARE, AXES)
        for start in (
            lambda: transport.all_reduce(torch.ones(4), axes=("host",), average=True),
            lambda: transport.reduce_scatter(torch.ones(4), axes=("host",), record_time=True),
            lambda: transport.all_gather_in_place(torch.ones(4), axes=("host",)),
            lambda: transport.all_gather(torch.ones(4)),
        ):
            if transport.rank == 3:
                other.exchange(b"rank 1 has looked")
                work = start()
            else:
                work = start()
                if transport.rank == 1:
                    assert not work.done
                other.exchange(b"rank 1 has looked")
            deadline_s = time.perf_counter() + 60
            while not work.done:
                assert time.perf_counter() < deadline_s
                time.sleep(0.001)
            work.wait("what is done")
            assert work.done


def test_done_does_not_wait(launch: Launch) -> None:
    launch(4, done_on_rank)


def alone_on_rank(group: Group) -> None:
    with open_transport(group, timeout_s=20) as transport:
        transport.open_subgroups(Topology(one=1, all=2), [("one",), ("all",)])
        buffer = part(transport.rank, 5, torch.float32)
        for work in (
            transport.all_reduce(buffer, axes=("one",), average=True, record_time=True),
            transport.reduce_scatter(buffer, axes=("one",), record_time=True),
            transport.all_gather_in_place(buffer, axes=("one",), record_time=True),
        ):
            assert work.done
            work.wait("nothing")
            assert work.done_s is not None
        assert torch.equal(buffer, part(transport.rank, 5, torch.float32))
        plain = transport.all_reduce(buffer, axes=("one",))
        assert plain.done_s is None


def test_a_group_of_one_rank_is_done_at_once(launch: Launch) -> None:
    launch(2, alone_on_rank)


# Mistakes

BAD_CALLS: dict[str, tuple[Callable[[Transport], object], type[Exception], str]] = {
    "undivided": (
        lambda t: t.all_reduce(torch.ones(2), axes=("local",)),
        ValueError,
        r"all_reduce on rank \d: no group along \('local',\) was opened; open: none; pass",
    ),
    "unknown axis": (
        lambda t: t.open_subgroups(SQUARE, [("host",), ("rack",)]),
        ValueError,
        r"open_subgroups on rank \d: \('rack',\) are not distinct axes of "
        r"Topology\(host=2, local=2\); "
        r"choose among \('host', 'local'\)",
    ),
    "world size": (
        lambda t: t.open_subgroups(Topology(host=2, local=4), AXES),
        ValueError,
        r"Topology\(host=2, local=4\) has 8 ranks and the transport 4; pass a topology",
    ),
    "disagreement": (
        lambda t: t.open_subgroups(SQUARE, AXES[: 2 - t.rank // 2]),
        PlanMismatchError,
        r"the mesh is Topology\(host=2, local=2\) divided along \[\('host',\), \('local',\)\] on "
        r"rank 0 and .* along \[\('host',\)\] on rank 2; pass the same",
    ),
    "scatter of a matrix": (
        lambda t: t.reduce_scatter(torch.ones(4, 4)),
        ValueError,
        r"reduce_scatter on rank \d: a buffer of shape \(4, 4\) can't be cut into 4 equal chunks",
    ),
    "scatter of a remainder": (
        lambda t: t.reduce_scatter(torch.ones(6)),
        ValueError,
        r"shape \(6,\) can't be cut into 4 equal chunks; .* padded to a multiple of 4",
    ),
}


def bad_calls_on_rank(group: Group) -> None:
    with open_transport(group, timeout_s=20) as transport:
        for call, kind, text in BAD_CALLS.values():
            with pytest.raises(kind, match=text):
                call(transport)
        transport.open_subgroups(SQUARE, AXES)
        tensor = torch.ones(2)
        transport.all_reduce(tensor, axes=("host",)).wait("what follows the mistakes")
        assert tensor.tolist() == [2.0, 2.0]


def test_mistakes_are_named_and_cost_nothing(launch: Launch) -> None:
    launch(4, bad_calls_on_rank)
