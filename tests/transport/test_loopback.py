"""Promises of loopback beyond the contract of `Transport` (test_contract.py)."""

from __future__ import annotations

import contextvars
import threading

import pytest
import torch

from fddp.errors import DesyncError, RankLostError, SyncTimeoutError
from fddp.transport import LoopbackGroup, loopback, open_transport
from tests.support.chunks import AXES, SQUARE


def test_results_come_in_rank_order() -> None:
    ended = [threading.Event() for _ in range(4)]
    ended[3].set()

    def last_first(group: LoopbackGroup, unit: str) -> str:
        assert ended[group.rank + 1].wait(60.0)
        ended[group.rank].set()
        return f"{group.rank} of {group.size} {unit}"

    assert loopback(3, last_first, "ranks") == ["0 of 3 ranks", "1 of 3 ranks", "2 of 3 ranks"]


def test_a_group_needs_a_rank() -> None:
    with pytest.raises(ValueError, match="world_size=0: a loopback group needs at least one rank"):
        loopback(0, lambda group: None)


def test_threads_see_the_callers_context() -> None:
    setting = contextvars.ContextVar("setting", default="unset")
    setting.set("the caller's")
    assert loopback(2, lambda group: setting.get()) == ["the caller's"] * 2


def test_no_threads_remain() -> None:
    before = threading.active_count()
    loopback(4, lambda group: open_transport(group).close())
    assert threading.active_count() <= before


def test_sums_run_in_rank_order() -> None:
    parts = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    issued = [threading.Event() for _ in range(4)]
    previous = {0: 1, 3: 0, 2: 3}  # ranks come in the order 1, 0, 3, 2

    def total(group: LoopbackGroup) -> torch.Tensor:
        transport = open_transport(group)
        mine = parts[group.rank].clone()
        assert group.rank == 1 or issued[previous[group.rank]].wait(60.0)
        work = transport.all_reduce(mine)
        issued[group.rank].set()
        work.wait("the sum")
        return mine

    assert all(torch.equal(result, expected) for result in loopback(4, total))


def test_the_first_ranks_own_exception_is_raised() -> None:
    seen: dict[int, RankLostError] = {}

    def fails_on_one(group: LoopbackGroup) -> None:
        transport = open_transport(group)
        if group.rank == 1:
            raise KeyError("boom")
        pending = transport.all_reduce(torch.ones(1))
        with pytest.raises(RankLostError) as caught:
            pending.wait("bucket 2 of step 5")
        seen[group.rank] = caught.value
        with pytest.raises(RankLostError):  # a later opening meets the same
            open_transport(group)
        raise caught.value

    with pytest.raises(KeyError, match="boom") as raised:
        loopback(3, fails_on_one)
    assert raised.value.__notes__ == ["raised on rank 1 of 3 of a loopback group"]  # type: ignore[attr-defined]
    for rank in (0, 2):
        assert seen[rank].ranks == (1,)
        assert str(seen[rank]) == (
            f"bucket 2 of step 5 on rank {rank} of 3: lost rank 1 raised KeyError('boom'); "
            "fix that rank's own error first"
        )


def test_a_rank_that_closes_its_transport_is_lost_to_that_one_only() -> None:
    """One that returns is lost to all."""

    def closes_one(group: LoopbackGroup) -> None:
        one, two = open_transport(group), open_transport(group)
        if group.rank == 1:
            one.close()
        else:
            with pytest.raises(RankLostError, match=r"lost rank 1 left its transport \(close\(\)"):
                one.all_reduce(torch.ones(1)).wait("the sum")
        two.exchange(b"still here")
        if group.rank == 0:
            two.all_reduce(torch.ones(1)).wait("the second epoch")

    with pytest.raises(
        RankLostError, match="the second epoch on rank 0 of 2: lost rank 1 returned"
    ):
        loopback(2, closes_one)


def test_an_operation_does_not_block_its_issuer() -> None:
    issued = threading.Event()

    def asynchronous(group: LoopbackGroup) -> bool:
        transport = open_transport(group)
        came = group.rank == 0 or issued.wait(60.0)
        work = transport.all_reduce(torch.ones(1))
        issued.set()
        work.wait("the sum")
        return came

    assert loopback(2, asynchronous) == [True, True]


def test_mismatched_operations_of_a_group_are_raised_on_its_ranks() -> None:
    def mismatched(group: LoopbackGroup) -> None:
        transport, rank = open_transport(group), group.rank
        transport.open_subgroups(SQUARE, AXES)
        buffer = torch.ones(4)
        work = transport.reduce_scatter(buffer, axes=("local",), average=rank == 3)
        if rank < 2:
            work.wait("bucket 0")
        else:
            with pytest.raises(DesyncError, match=f"bucket 0 on rank {rank} of 4: ranks met"):
                work.wait("bucket 0")
            assert work.done
            with pytest.raises(DesyncError, match=r"rank 3 averaging reduce_scatter of .* \(4,\)"):
                work.wait("bucket 0")
            assert buffer.tolist() == [1.0] * 4
        assert transport.exchange(b"usable") == [b"usable"] * 4

    loopback(4, mismatched)


def test_a_rank_that_leaves_is_lost_to_those_who_wait_for_it() -> None:
    def leaves(group: LoopbackGroup) -> None:
        transport, rank = open_transport(group), group.rank
        transport.open_subgroups(SQUARE, AXES)
        if rank == 3:
            transport.close()
            return
        axes = [("local",), ("host",), ("local",)][rank]
        with pytest.raises(RankLostError, match="bucket 1") as caught:
            transport.all_reduce(torch.ones(1), axes=axes).wait("bucket 1")
        assert caught.value.ranks == (1 if rank == 0 else 3,)

    loopback(4, leaves)


def test_a_rank_that_waits_itself_is_not_named() -> None:
    """Rank 0 waits for rank 2, which waits for rank 3."""
    has_failed = threading.Event()

    def run(group: LoopbackGroup) -> tuple[int, ...]:
        transport = open_transport(group, timeout_s=0.3 if group.rank == 0 else 30.0)
        transport.open_subgroups(SQUARE, AXES)
        if group.rank == 2:
            work = transport.all_reduce(torch.ones(1), axes=("local",))
            with pytest.raises(RankLostError):
                work.wait("a sum within the host")
        elif group.rank == 0:
            work = transport.all_reduce(torch.ones(1), axes=("host",))
            with pytest.raises(SyncTimeoutError) as caught:
                work.wait("a sum across hosts")
            has_failed.set()
            return caught.value.ranks
        has_failed.wait(30.0)
        return ()

    assert loopback(4, run)[0] == (3,)
