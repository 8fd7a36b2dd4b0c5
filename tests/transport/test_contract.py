"""The contract of `Transport`, held by every transport.

Functions named `*_on_rank` run on ranks, which are threads or processes, as `fn(group, *args)`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fddp.errors import ClosedError, SyncTimeoutError
from fddp.transport import open_transport
from tests.support.dtypes import MOVED, SUMMED
from tests.support.groups import rank_of
from tests.support.ranks import TRANSPORTS, launch_fixture

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fddp.transport import Group, Transport
    from tests.support.ranks import Launch

WORLD_SIZES = [1, 2, 3, 4]
SHAPES = [(5,), (2, 3), (), (0,), (4, 0)]
launch = launch_fixture(*TRANSPORTS, "fddp")


def filled(shape: tuple[int, ...], value: complex, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, value if dtype.is_complex else value.real).to(dtype)


# all_reduce


def sum_on_rank(group: Group, dtype: torch.dtype) -> None:
    with open_transport(group, timeout_s=20) as transport:
        size = transport.world_size
        expected = complex(size * (size + 1) / 2, size)
        for shape in SHAPES:
            tensor = filled(shape, complex(transport.rank + 1, 1), dtype)
            where = tensor.data_ptr()
            work = transport.all_reduce(tensor)
            work.wait("the sum")
            assert torch.equal(tensor, filled(shape, expected, dtype))
            assert tensor.data_ptr() == where
            assert work.results == []


@pytest.mark.parametrize("dtype", SUMMED, ids=str)
def test_all_reduce_sums_in_place(launch: Launch, dtype: torch.dtype) -> None:
    for world_size in WORLD_SIZES:
        launch(world_size, sum_on_rank, dtype)


def same_bits_on_rank(group: Group) -> Tensor:
    with open_transport(group, timeout_s=20) as transport:
        generator = torch.Generator().manual_seed(transport.rank)
        tensor = torch.randn(10_001, generator=generator)
        transport.all_reduce(tensor).wait("the sum")
        return tensor


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_ranks_get_the_same_bits(launch: Launch, world_size: int) -> None:
    first, *others = launch(world_size, same_bits_on_rank)
    assert all(torch.equal(first, other) for other in others)


def many_in_flight_on_rank(group: Group) -> None:
    with open_transport(group, timeout_s=20) as transport:
        tensors = [torch.full((100 + i,), float(i)) for i in range(64)]
        works = [transport.all_reduce(tensor) for tensor in tensors]
        for work in reversed(works):
            work.wait("one of many")
        for i, tensor in enumerate(tensors):
            assert torch.equal(tensor, torch.full((100 + i,), float(i) * transport.world_size))


def test_many_operations_in_flight(launch: Launch) -> None:
    launch(3, many_in_flight_on_rank)


def interleaved_on_rank(group: Group) -> None:
    with open_transport(group, timeout_s=20) as one, open_transport(group, timeout_s=20) as two:
        ones = [torch.full((3,), 1.0 + i) for i in range(8)]
        twos = [torch.full((7,), 100.0 + i) for i in range(8)]
        issues: list[tuple[Transport, Tensor]] = [(one, tensor) for tensor in ones]
        # Rank 0 issues all of one transport's operations first, rank 1 last, rank 2 in turn.
        for i, tensor in enumerate(twos):
            issues.insert([len(issues), i, 2 * i][one.rank], (two, tensor))
        works = [transport.all_reduce(tensor) for transport, tensor in issues]
        for work in works:
            work.wait("one of two transports' operations")
        for i in range(8):
            assert torch.equal(ones[i], torch.full((3,), 3 * (1.0 + i)))
            assert torch.equal(twos[i], torch.full((7,), 3 * (100.0 + i)))


def test_transports_over_one_group_do_not_mix(launch: Launch) -> None:
    launch(3, interleaved_on_rank)


# The other operations


def gather_on_rank(group: Group, dtype: torch.dtype) -> None:
    with open_transport(group, timeout_s=20) as transport:
        for shape in SHAPES:
            tensor = filled(shape, complex(transport.rank, 2), dtype)
            work = transport.all_gather(tensor)
            work.wait("the gathering")
            assert len(work.results) == transport.world_size
            for rank, row in enumerate(work.results):
                assert torch.equal(row, filled(shape, complex(rank, 2), dtype))
            assert torch.equal(tensor, filled(shape, complex(transport.rank, 2), dtype))


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_all_gather_brings_every_ranks_tensor(launch: Launch, dtype: torch.dtype) -> None:
    for world_size in WORLD_SIZES:
        launch(world_size, gather_on_rank, dtype)


def all_to_all_on_rank(group: Group, dtype: torch.dtype) -> None:
    with open_transport(group, timeout_s=20) as transport:
        n = transport.world_size
        for length in (0, 1, 5, 30_000):  # the last one does not fit into a copied operation

            def chunk(source: int, target: int, length: int = length) -> Tensor:
                return filled((length,), complex(1 + source + 2 * target, 2), dtype)

            buffer = torch.cat([chunk(transport.rank, other) for other in range(n)])
            where = buffer.data_ptr()
            work = transport.all_to_all_in_place(buffer, record_time=True)
            work.wait("the all-to-all")
            expected = torch.cat([chunk(other, transport.rank) for other in range(n)])
            assert torch.equal(buffer, expected)
            assert buffer.data_ptr() == where
            assert work.results == []
            assert work.done_s is not None


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_all_to_all_sends_each_rank_its_chunk(launch: Launch, dtype: torch.dtype) -> None:
    for world_size in WORLD_SIZES:
        launch(world_size, all_to_all_on_rank, dtype)


def broadcast_on_rank(group: Group, dtype: torch.dtype) -> None:
    with open_transport(group, timeout_s=20) as transport:
        for src in range(transport.world_size):
            for shape in SHAPES:
                tensor = filled(shape, complex(transport.rank, 2), dtype)
                transport.broadcast(tensor, src).wait("the broadcast")
                assert torch.equal(tensor, filled(shape, complex(src, 2), dtype))


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_broadcast_brings_the_sources_tensor(launch: Launch, dtype: torch.dtype) -> None:
    for world_size in WORLD_SIZES:
        launch(world_size, broadcast_on_rank, dtype)


def exchange_on_rank(group: Group) -> None:
    with open_transport(group, timeout_s=20) as transport:
        for factor in (0, 1, 1000):
            payload = bytes([transport.rank]) * (transport.rank * factor)
            outcome = transport.exchange(payload)
            assert outcome == [bytes([r]) * (r * factor) for r in range(transport.world_size)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_exchange_of_any_lengths(launch: Launch, world_size: int) -> None:
    launch(world_size, exchange_on_rank)


def stamps_on_rank(group: Group) -> None:
    with open_transport(group, timeout_s=20) as transport:
        start_s = time.perf_counter()
        works = [
            transport.all_reduce(torch.ones(3), record_time=True),
            transport.all_gather(torch.ones(3), record_time=True),
            transport.broadcast(torch.ones(3), 0, record_time=True),
        ]
        for work in works:
            work.wait("a stamped operation")
            assert work.done_s is not None
            assert start_s < work.done_s < time.perf_counter()
        plain = transport.all_reduce(torch.ones(3))
        plain.wait("an operation without a stamp")
        assert plain.done_s is None


def test_stamps_are_taken_when_asked_for(launch: Launch) -> None:
    launch(2, stamps_on_rank)


# Bad input

BAD_TENSORS: dict[str, tuple[Callable[[], Tensor], type[Exception], str]] = {
    "strided": (
        lambda: torch.ones(4, 2).t(),
        ValueError,
        r"shape \(2, 4\) has strides \(1, 2\); pass tensor.contiguous\(\)",
    ),
    "sparse": (lambda: torch.eye(2).to_sparse(), ValueError, "layout torch.sparse_coo.*to_dense"),
    "differentiable": (
        lambda: torch.ones(2, requires_grad=True),
        ValueError,
        r"requires grad.*tensor.detach\(\)",
    ),
    "conjugate": (
        lambda: torch.ones(2, dtype=torch.complex64).conj(),
        ValueError,
        r"lazy conjugate.*resolve_conj\(\)",
    ),
    "boolean": (
        lambda: torch.ones(2, dtype=torch.bool),
        TypeError,
        "cannot sum torch.bool; convert .*torch.float32",
    ),
}


def bad_tensor_on_rank(group: Group, case: str) -> None:
    make, kind, text = BAD_TENSORS[case]
    with open_transport(group, timeout_s=20) as transport:
        with pytest.raises(kind, match=f"all_reduce on rank {transport.rank}.*{text}"):
            transport.all_reduce(make())
        total = torch.ones(2)
        transport.all_reduce(total).wait("what follows the mistake")
        assert total.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors_are_named_and_cost_nothing(launch: Launch, case: str) -> None:
    launch(2, bad_tensor_on_rank, case)


def bad_arguments_on_rank(group: Group, right: str, wrong: Any) -> None:
    with open_transport(group, right, timeout_s=20) as transport:  # type: ignore[arg-type]
        assert transport.name == right
        for src in (-1, 2):
            with pytest.raises(ValueError, match=f"src={src} is not a rank.*from 0 to 1"):
                transport.broadcast(torch.ones(1), src)
    with pytest.raises(ValueError, match=f"'{wrong}' cannot run on a .*Group; pass .*'{right}'"):
        open_transport(group, wrong)
    with pytest.raises(ValueError, match="timeout_s=0 must be above 0"):
        open_transport(group, timeout_s=0)


def test_bad_arguments_are_named(launch: Launch) -> None:
    wrong = {"c10d": "loopback", "shm": "loopback", "loopback": "c10d"}[launch.name]
    launch(2, bad_arguments_on_rank, launch.name, wrong)


# Closing


def close_on_rank(group: Group) -> None:
    transport = open_transport(group, timeout_s=20)
    total = torch.ones(1)
    work = transport.all_reduce(total)
    work.wait("the last operation")
    transport.close()
    transport.close()
    work.wait("the last operation")
    assert total.item() == transport.world_size
    uses: list[Callable[[], object]] = [
        lambda: transport.all_reduce(total),
        lambda: transport.all_gather(total),
        lambda: transport.all_to_all_in_place(total),
        lambda: transport.broadcast(total, 0),
        lambda: transport.exchange(b"more"),
    ]
    for use in uses:
        with pytest.raises(
            ClosedError, match=r"is closed \(close\(\) was called\); create its user"
        ):
            use()


@pytest.mark.parametrize("world_size", [1, 2])
def test_use_after_close_is_an_error(launch: Launch, world_size: int) -> None:
    launch(world_size, close_on_rank)


def close_in_flight_on_rank(group: Group) -> None:
    transport = open_transport(group, timeout_s=3)
    if transport.rank == 0:
        work = transport.all_reduce(torch.ones(1))
        transport.close()
        with pytest.raises(
            ClosedError, match="the orphan on rank 0 of 2: the transport was closed"
        ):
            work.wait("the orphan")
    with open_transport(group, timeout_s=20) as other:
        other.exchange(b"rank 0 is done")
    transport.close()


def test_closing_abandons_operations_in_flight(launch: Launch) -> None:
    launch(2, close_in_flight_on_rank)


def close_abandoned_on_rank(group: Group) -> None:
    with open_transport(group, timeout_s=20) as transport:
        closed: list[int] = []
        transport.on_abandoned(lambda: closed.append(transport.rank))
        assert transport.abandoned == []
        transport.close_abandoned_in_interrupted_step()  # there was none
        transport.close_abandoned(["another"])
        assert closed == []
        transport.close_abandoned([transport.status.key])
        assert closed == [transport.rank]
        transport.all_reduce(torch.ones(1)).wait("a sum after it")


@pytest.mark.parametrize("world_size", [1, 2])
def test_abandoned_transports_are_closed_by_key(launch: Launch, world_size: int) -> None:
    launch(world_size, close_abandoned_on_rank)


# Ranks that do not come


def late_on_rank(group: Group) -> float | None:
    """The last rank skips an operation; returns how long the others took to say so."""
    transport = open_transport(group, timeout_s=1.0)
    late = transport.world_size - 1
    elapsed_s = None
    if transport.rank != late:
        works = [transport.all_reduce(torch.ones(4)) for _ in range(3)]
        start_s = time.perf_counter()
        for _ in range(2):
            with pytest.raises(SyncTimeoutError) as caught:
                works[0].wait("bucket 3 of step 17")
            assert f"bucket 3 of step 17 on rank {transport.rank} of" in str(caught.value)
            assert f"within timeout_s=1.0; no response from rank {late}. All ranks" in str(
                caught.value
            )
        elapsed_s = time.perf_counter() - start_s
        with pytest.raises((SyncTimeoutError, ClosedError), match="bucket 4 of step 17"):
            works[1].wait("bucket 4 of step 17")
        with pytest.raises(ClosedError, match="bucket 3 of step 17 failed"):
            transport.all_reduce(torch.ones(1))
    with open_transport(group, timeout_s=20) as fresh:  # the group is usable
        total = torch.ones(1)
        fresh.all_reduce(total).wait("the sum of the next attempt")
        assert total.item() == fresh.world_size
    transport.close()
    return elapsed_s


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_late_rank_is_named_within_the_timeout(launch: Launch, world_size: int) -> None:
    *elapsed_s, _ = launch(world_size, late_on_rank)
    print(f"late, {launch.name}, {world_size} ranks:", [f"{s:.2f} s" for s in elapsed_s])
    assert all(0.9 < s < 2.5 for s in elapsed_s)


def opening_late_on_rank(group: Group) -> None:
    """Rank 0 comes when the others have given up twice; then all meet."""
    rank = rank_of(group)
    if rank == 0:
        time.sleep(1.5)
    else:
        for _ in range(2):
            with pytest.raises(SyncTimeoutError, match=r"opening a .*timeout_s=0.3") as caught:
                open_transport(group, timeout_s=0.3)
            assert "rank 0" in str(caught.value)
    with open_transport(group, timeout_s=20) as transport:
        transport.exchange(b"all are there")


def test_ranks_that_failed_to_open_meet_later(launch: Launch) -> None:
    launch(3, opening_late_on_rank)
