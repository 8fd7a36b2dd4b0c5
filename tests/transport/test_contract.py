"""The contract of `Transport`, held by every transport.

Functions named `*_on_rank` run on ranks, which are threads or processes, as `fn(group, *args)`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from fddp.core.schedule.sum_tree import SumTree
from fddp.errors import ClosedError, DesyncError, SyncTimeoutError
from fddp.transport import open_transport
from tests.support.chunks import SQUARE
from tests.support.dtypes import MOVED
from tests.support.groups import rank_of
from tests.support.polling import soon
from tests.support.ranks import TRANSPORTS, launch_fixture, launch_over

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from fddp.transport import Group, Transport
    from fddp.transport.base import Work
    from tests.support.ranks import Launch

WORLD_SIZES = [1, 2, 3, 4]
SHAPES = [(5,), (2, 3), (), (0,), (4, 0)]
ALONG: list[tuple[str, ...]] = [(), ("local",)]  # of four ranks
launch = launch_fixture(*TRANSPORTS, "fddp")


def opened(group: Group, timeout_s: float, axes: tuple[str, ...]) -> Transport:
    transport = open_transport(group, timeout_s=timeout_s)
    if axes:
        transport.open_subgroups(SQUARE, [axes])
    return transport


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


def interleaved_on_rank(group: Group) -> None:
    with open_transport(group, timeout_s=20) as one, open_transport(group, timeout_s=20) as two:
        ones = [torch.full((3 + i,), 1.0 + i) for i in range(32)]
        twos = [torch.full((70 + i,), 100.0 + i) for i in range(32)]
        issues: list[tuple[Transport, Tensor]] = [(one, tensor) for tensor in ones]
        # Rank 0 issues all of one transport's operations first, rank 1 last, rank 2 in turn.
        for i, tensor in enumerate(twos):
            issues.insert([len(issues), i, 2 * i][one.rank], (two, tensor))
        works = [transport.all_reduce(tensor) for transport, tensor in issues]
        for work in reversed(works):
            work.wait("one of two transports' operations")
        for i in range(32):
            assert torch.equal(ones[i], torch.full((3 + i,), 3 * (1.0 + i)))
            assert torch.equal(twos[i], torch.full((70 + i,), 3 * (100.0 + i)))


def test_many_operations_of_two_transports_over_one_group_do_not_mix(launch: Launch) -> None:
    launch(3, interleaved_on_rank)


def moves_on_rank(group: Group, dtype: torch.dtype) -> None:
    with open_transport(group, timeout_s=20) as transport:
        everyone = range(transport.world_size)
        for shape in SHAPES:
            mine, *others = (
                torch.full(shape, complex(r, 2) if dtype.is_complex else r).to(dtype)
                for r in (transport.rank, *everyone)
            )
            tensor = mine.clone()
            work = transport.all_gather(tensor)
            work.wait("the gathering")
            assert len(work.results) == transport.world_size
            assert all(map(torch.equal, [tensor, *work.results], [mine, *others]))
            for src in everyone:
                tensor = mine.clone()
                transport.broadcast(tensor, src).wait("the broadcast")
                assert torch.equal(tensor, others[src])


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_every_ranks_tensor_is_gathered_and_broadcast(launch: Launch, dtype: torch.dtype) -> None:
    for world_size in WORLD_SIZES:
        launch(world_size, moves_on_rank, dtype)


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

BAD_TENSORS: list[tuple[Callable[[], Tensor], type[Exception], str]] = [
    (
        lambda: torch.ones(4, 2).t(),
        ValueError,
        r"shape \(2, 4\) has strides \(1, 2\); pass tensor.contiguous\(\)",
    ),
    (lambda: torch.eye(2).to_sparse(), ValueError, "layout torch.sparse_coo.*to_dense"),
    (
        lambda: torch.ones(2, requires_grad=True),
        ValueError,
        r"requires grad.*tensor.detach\(\)",
    ),
    (
        lambda: torch.ones(2, dtype=torch.complex64).conj(),
        ValueError,
        r"lazy conjugate.*resolve_conj\(\)",
    ),
    (
        lambda: torch.ones(2, dtype=torch.bool),
        TypeError,
        "cannot sum torch.bool; convert .*torch.float32",
    ),
]


def bad_tensors_on_rank(group: Group) -> None:
    with open_transport(group, timeout_s=20) as transport:
        for make, kind, text in BAD_TENSORS:
            with pytest.raises(kind, match=f"all_reduce on rank {transport.rank}.*{text}"):
                transport.all_reduce(make())
        total = torch.ones(2)
        transport.all_reduce(total).wait("what follows the mistakes")
        assert total.tolist() == [2.0, 2.0]


def test_bad_tensors_are_named_and_cost_nothing(launch: Launch) -> None:
    launch(2, bad_tensors_on_rank)


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


# Operations that differ


class Differing(NamedTuple):
    """What rank 1 of 3 issues, and its description beside that of the other ranks."""

    start: Callable[[Transport], Work]
    text: str
    others: str = "all_reduce of torch.float32 (3,)"
    start_others: Callable[[Transport], Work] = lambda t: t.all_reduce(torch.ones(3))


DIFFERING = {
    "shape": Differing(
        lambda t: t.all_reduce(torch.ones(1, 3)), "all_reduce of torch.float32 (1, 3)"
    ),
    "small and large": Differing(
        lambda t: t.all_reduce(torch.ones(1_000_000)), "all_reduce of torch.float32 (1000000,)"
    ),
    "dtype": Differing(
        lambda t: t.all_reduce(torch.ones(3, dtype=torch.int32)), "all_reduce of torch.int32 (3,)"
    ),
    "kind": Differing(
        lambda t: t.reduce_scatter(torch.ones(3)), "reduce_scatter of torch.float32 (3,)"
    ),
    "average": Differing(
        lambda t: t.all_reduce(torch.ones(3), average=True),
        "averaging all_reduce of torch.float32 (3,)",
    ),
    "order": Differing(
        lambda t: t.reduce_scatter(torch.ones(3), tree=SumTree.along((3,))),
        f"reduce_scatter along tree {SumTree.along((3,)).digest:016x} of torch.float32 (3,)",
        "reduce_scatter of torch.float32 (3,)",
        lambda t: t.reduce_scatter(torch.ones(3)),
    ),
    "source": Differing(
        lambda t: t.broadcast(torch.ones(3), 1),
        "broadcast from rank 1 of torch.float32 (3,)",
        "broadcast from rank 0 of torch.float32 (3,)",
        lambda t: t.broadcast(torch.ones(3), 0),
    ),
}


def differing_on_rank(group: Group) -> None:
    with open_transport(group, timeout_s=20) as transport:
        for name, case in DIFFERING.items():
            work = (case.start if transport.rank == 1 else case.start_others)(transport)
            for _ in range(2):
                with pytest.raises(
                    DesyncError,
                    match=f"bucket 2 on rank {transport.rank} of 3: ranks met in different "
                    r"operations: (.*); all ranks must issue the same operations in the same order",
                ) as caught:
                    work.wait("bucket 2")
                text = str(caught.value)
                assert f"rank 1 {case.text}" in text, name
                assert any(f"rank {other} {case.others}" in text for other in (0, 2)), name
            value = torch.ones(2)
            transport.all_reduce(value).wait("what follows")
            assert value.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("name", ["shm", "loopback"])
def test_differing_operations_are_raised_on_every_rank(
    request: pytest.FixtureRequest, name: str
) -> None:
    launch_over(name, request)(3, differing_on_rank)


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
        lambda: transport.reduce_scatter(total),
        lambda: transport.all_gather_in_place(total),
        lambda: transport.open_subgroups(SQUARE, [("local",)]),
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


def close_in_flight_on_rank(group: Group, axes: tuple[str, ...]) -> None:
    transport = opened(group, 3.0, axes)
    if transport.rank == 0:
        work = transport.reduce_scatter(torch.ones(4), axes=axes)
        assert not work.done
        transport.close()
        assert work.done
        with pytest.raises(
            ClosedError, match="the orphan on rank 0 of 4: the transport was closed"
        ):
            work.wait("the orphan")
    with open_transport(group, timeout_s=20) as other:
        other.exchange(b"rank 0 is done")
    transport.close()


@pytest.mark.parametrize("axes", ALONG)
def test_closing_abandons_operations_in_flight(launch: Launch, axes: tuple[str, ...]) -> None:
    launch(4, close_in_flight_on_rank, axes)


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


def late_on_rank(group: Group, axes: tuple[str, ...]) -> float | None:
    """The last rank skips an operation; returns how long those who missed it took to say so."""
    transport = opened(group, 1.0, axes)
    rank, late, elapsed_s = transport.rank, transport.world_size - 1, None
    if rank != late:
        misses = not axes or late in SQUARE.group(axes, rank)
        works = [transport.all_reduce(torch.ones(4), axes=axes) for _ in range(1 + misses)]
        if not misses:
            works[0].wait("bucket 3 of step 17")
        else:
            start_s = time.perf_counter()
            for _ in range(2):
                with pytest.raises(SyncTimeoutError) as caught:
                    works[0].wait("bucket 3 of step 17")
                text = str(caught.value)
                assert f"bucket 3 of step 17 on rank {rank} of {transport.world_size}" in text
                assert f"within timeout_s=1.0; no response from rank {late}. All ranks" in text
            elapsed_s = time.perf_counter() - start_s
            assert works[0].done
            assert works[1].done
            with pytest.raises((SyncTimeoutError, ClosedError), match="bucket 4 of step 17"):
                works[1].wait("bucket 4 of step 17")
            with pytest.raises(ClosedError, match="bucket 3 of step 17 failed"):
                transport.all_reduce(torch.ones(1))
    with opened(group, 20, axes) as fresh:  # the group is usable
        total = torch.ones(1)
        fresh.all_reduce(total, axes=axes).wait("the sum of the next attempt")
        assert total.item() == (2 if axes else fresh.world_size)
    transport.close()
    return elapsed_s


@pytest.mark.slow
@pytest.mark.parametrize("axes", ALONG)
def test_a_late_rank_is_named_within_the_timeout(launch: Launch, axes: tuple[str, ...]) -> None:
    elapsed_s = [s for s in launch(4, late_on_rank, axes) if s is not None]
    print(f"late, {launch.name}, along {axes}:", [f"{s:.2f} s" for s in elapsed_s])
    assert len(elapsed_s) == (1 if axes else 3)
    assert all(0.9 < s < 2.5 for s in elapsed_s)


def opening_late_on_rank(group: Group, gave_up: Path) -> None:
    """Rank 0 comes when the others have given up twice; then all meet."""
    rank = rank_of(group)
    if rank == 0:
        assert soon(lambda: len([*gave_up.iterdir()]) == 2)
    else:
        for _ in range(2):
            with pytest.raises(SyncTimeoutError, match=r"opening a .*timeout_s=0.3") as caught:
                open_transport(group, timeout_s=0.3)
            assert "rank 0" in str(caught.value)
        (gave_up / f"rank{rank}").touch()
    with open_transport(group, timeout_s=20) as transport:
        transport.exchange(b"all are there")


@pytest.mark.slow
def test_ranks_that_failed_to_open_meet_later(launch: Launch, tmp_path: Path) -> None:
    launch(3, opening_late_on_rank, tmp_path)
