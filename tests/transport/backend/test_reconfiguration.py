"""Groups of the backend "fddp" whose ranks change.

The backend is called itself, because torch before 2.14 lacks the calls that reach it.
`test_fault_tolerance.py` goes through these calls.
"""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fddp.errors import DesyncError, FddpError, SyncTimeoutError
from fddp.transport.backend import backend_choice, reconfiguration
from fddp.transport.backend.choice import noted_choice
from fddp.transport.backend.reconfiguration import reconfigurable_backend
from fddp.transport.backend.store_exchange import StoreExchange
from tests.support.polling import LONG_S, PROMPT_S
from tests.support.process_resources import growth, resources
from tests.support.ranks import RankPool, run_fresh, split_into_hosts

if TYPE_CHECKING:
    from collections.abc import Sequence

HOSTS = {"shm": [[0, 1, 2]], "two hosts": [[0, 1], [2]], "gloo": [[0], [1], [2]]}


class Member:
    """A rank of the job, with a reconfigurable group and the handles of all ranks."""

    def __init__(self, number: int, world_size: int, timeout_s: float = LONG_S) -> None:
        self.number = number
        self.store: dist.Store = distributed_c10d._get_default_store()
        self.backend: Any = reconfigurable_backend(
            self.store, "tests", number, world_size, timeout_s
        )
        self.store.set(f"handle/{number}", self.backend.handle)
        self.handles = [self.store.get(f"handle/{other}").decode() for other in range(world_size)]
        self._meetings = 0

    def reopen(self, uuid: int, numbers: Sequence[int], timeout_s: float = LONG_S) -> None:
        """Open the group for the ranks with these numbers."""
        self.backend.reopen(uuid, [self.handles[number] for number in numbers], timeout_s)

    def sum(self) -> float:
        """The sum of the numbers of the ranks of the group, and of 10 for each."""
        value = torch.tensor([10.0 + self.number])
        self.backend.allreduce([value]).wait()
        return value.item()

    def meet(self) -> None:
        """Wait for all ranks of the job."""
        self._meetings += 1
        self.store.set(f"met/{self._meetings}/{self.number}", "")
        for other in range(len(self.handles)):
            self.store.get(f"met/{self._meetings}/{other}")


# Ranks and results


def generated(rank: int, world_size: int, hosts: str, seed: int) -> list[str]:
    chance = random.Random(seed)
    member = Member(rank, world_size)
    assert (member.backend.rank(), member.backend.size()) == (rank, world_size)
    ways: list[str] = []
    with split_into_hosts([[*host] for host in HOSTS[hosts]]):
        for uuid in range(12):
            numbers = chance.sample(range(world_size), chance.randint(1, world_size))
            if rank in numbers:
                # `connect_to_leader` splits by rank of the group, not by number of the job.
                member.reopen(uuid, numbers)
                opened = member.backend.opened
                assert opened is not None
                assert (opened.rank(), opened.size()) == (numbers.index(rank), len(numbers))
                assert member.sum() == 10 * len(numbers) + sum(numbers), numbers
                choice = noted_choice("tests")
                assert choice is not None
                ways.append(choice.name)
            if chance.random() < 0.5:
                member.meet()
    member.meet()
    return ways


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("seed", range(2))
def test_ranks_are_those_of_the_handles(ranks: RankPool, hosts: str, seed: int) -> None:
    ways = ranks.run(3, generated, hosts, seed)
    found = {way for of_rank in ways for way in of_rank}
    assert found == ({"shm"} if hosts == "shm" else {"shm", "gloo"}), "alone, memory is used"


def mapped_once(rank: int, world_size: int) -> list[int]:
    member = Member(rank, world_size)
    calls = []
    discover = reconfiguration.discover_hosts

    def counted(exchange: Any) -> Any:
        calls.append(exchange.world_size)
        return discover(exchange)

    with mock.patch.object(reconfiguration, "discover_hosts", counted):
        for uuid, numbers in enumerate([(0, 1, 2), (2, 1, 0), (1, 0), (0, 1), (1, 2, 0), (2, 0)]):
            if rank in numbers:
                member.reopen(uuid, numbers)
                assert member.sum() == 10 * len(numbers) + sum(numbers)
            member.meet()
    return calls


def test_memory_is_mapped_again_only_for_ranks_that_were_away(ranks: RankPool) -> None:
    """The fifth call brings rank 2 back, whose memory the others have let go of."""
    assert ranks.run(3, mapped_once) == [[3, 3]] * 3


def held(rank: int, world_size: int) -> tuple[int, int, int]:
    member = Member(rank, world_size)
    for uuid in range(3):
        member.reopen(uuid, range(world_size))
    before = resources()
    for uuid in range(3, 40):
        member.reopen(uuid, range(world_size))
        member.sum()
    return growth(before)


def test_groups_opened_before_are_released(ranks: RankPool) -> None:
    assert ranks.run(2, held) == [(0, 0, 0)] * 2


# Operations of the group before


def pending(rank: int, world_size: int, hosts: str) -> None:
    member = Member(rank, world_size)
    with split_into_hosts([[*host] for host in HOSTS[hosts]]):
        member.reopen(1, range(world_size))
        works = []
        if rank == 0:
            works.append(member.backend.allreduce([torch.ones(3)]))
            works.append(member.backend.recv([torch.ones(3)], 1, 0))
        member.meet()
        member.reopen(2, range(world_size))
        for work in works:
            with pytest.raises(RuntimeError):
                work.wait(timedelta(seconds=LONG_S))
        assert member.sum() == 10 * world_size + sum(range(world_size))
    member.meet()


@pytest.mark.parametrize("hosts", ["shm", "gloo"])
def test_pending_operations_end(ranks: RankPool, hosts: str) -> None:
    begin_s = time.perf_counter()
    ranks.run(3, pending, hosts)
    assert time.perf_counter() - begin_s < LONG_S


def dropped(rank: int, world_size: int) -> None:
    """The group has the only reference to a tensor, which its thread releases with the GIL."""
    member = Member(rank, world_size)
    with split_into_hosts([[*host] for host in HOSTS["gloo"]]):
        member.reopen(1, range(world_size))
    store = member.store
    if rank > 0:
        time.sleep(0.3)
    member.backend.allreduce([torch.ones(3)])
    del member
    store.set(f"dropped/{rank}", "")
    for other in range(world_size):
        store.get(f"dropped/{other}")


def test_a_group_may_be_dropped_during_an_operation(ranks: RankPool) -> None:
    ranks.run(2, dropped)


def released(rank: int, world_size: int) -> float:
    member = Member(rank, world_size)
    member.reopen(1, range(world_size))
    begin_s = time.perf_counter()
    if rank > 0:
        with pytest.raises(RuntimeError, match="rank 0 left the group"):
            member.sum()
    member.reopen(2, range(world_size))
    member.sum()
    return time.perf_counter() - begin_s


def test_a_call_releases_ranks_that_wait_in_an_operation(ranks: RankPool) -> None:
    assert max(ranks.run(3, released)) < PROMPT_S


def closed(rank: int, world_size: int) -> None:
    member = Member(rank, world_size)

    def refused() -> None:
        with pytest.raises(dist.DistBackendError, match=r"is not open.*call it with a new uuid"):
            member.sum()

    refused()
    member.reopen(1, range(world_size))
    member.sum()
    member.backend.abort()
    refused()
    assert not member.backend.supports_tensor_alloc(torch.device("cpu"))
    member.reopen(2, range(world_size))
    assert member.sum() == 10 * world_size + sum(range(world_size))
    member.meet()
    member.backend.shutdown()


def test_a_group_that_is_not_open_refuses_operations(ranks: RankPool) -> None:
    ranks.run(2, closed)


# Errors


def bad_handles(rank: int, world_size: int) -> None:
    member = Member(rank, world_size)
    member.reopen(1, range(world_size))
    own, others = member.backend.handle, [h for h in member.handles if h != member.backend.handle]
    for handles, text in [
        ([], "at least one handle"),
        ([own, own], f"'{own}' was passed twice"),
        (["gloo:0:-1:0:", own], "'gloo:0:-1:0:' is not a handle of the backend \"fddp\""),
        (others, f"none of the 1 handles is this rank's, '{own}'"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            member.backend.reopen(2, handles, LONG_S)
    assert member.sum() == 21, "the group was left as it was"


def test_handles_are_checked_before_anything_ends(ranks: RankPool) -> None:
    ranks.run(2, bad_handles)


def different(rank: int, world_size: int) -> str:
    member = Member(rank, world_size)
    with pytest.raises(DesyncError) as caught:
        member.reopen(1, (0, 1, 2) if rank < 2 else (0, 2, 1))
    member.meet()
    member.reopen(2, range(world_size))
    member.sum()
    return str(caught.value)


def test_ranks_that_pass_different_handles_get_an_error(ranks: RankPool) -> None:
    for text in ranks.run(3, different):
        assert "the digest of the handles is" in text
        assert "pass the same handles in the same order on all ranks" in text


def reused(rank: int, world_size: int) -> None:
    member = Member(rank, world_size)
    member.reopen(1, range(world_size))
    member.meet()
    for numbers in (range(world_size), (1, 0)):
        with pytest.raises(FddpError, match=r"uuid 1 was already used; pass one that was not"):
            member.reopen(1, numbers)
        member.meet()
    member.reopen(2, range(world_size))
    assert member.sum() == 21


def test_a_used_uuid_is_refused_on_all_ranks(ranks: RankPool) -> None:
    ranks.run(2, reused)


def absent(rank: int, world_size: int) -> None:
    member = Member(rank, world_size)
    member.reopen(1, range(world_size))
    member.meet()
    if rank < 2:
        begin_s = time.perf_counter()
        text = r"_reconfigure\(2\) on rank . of 3: 1 rank did not take part.*timeout=0.5 s: 2"
        with pytest.raises(SyncTimeoutError, match=text) as caught:
            member.reopen(2, range(world_size), timeout_s=0.5)
        assert caught.value.ranks == (2,)
        assert time.perf_counter() - begin_s < PROMPT_S
    member.meet()
    member.reopen(3, range(world_size))
    assert member.sum() == 33


def test_an_absent_rank_is_named_in_time(ranks: RankPool) -> None:
    ranks.run(3, absent)


def malformed(rank: int, world_size: int) -> str:
    member = Member(rank, world_size)
    send = StoreExchange.exchange

    def spoiled(self: StoreExchange, payload: bytes) -> list[bytes]:
        return send(self, b"[1, 2" if rank == 1 else payload)

    with (
        mock.patch.object(StoreExchange, "exchange", spoiled),
        pytest.raises(DesyncError) as caught,
    ):
        member.reopen(1, range(world_size))
    return str(caught.value)


def test_a_malformed_message_is_an_error_on_all_ranks(ranks: RankPool) -> None:
    for text in ranks.run(2, malformed):
        assert "rank 1 sent a malformed 'reconfigure' message" in text


# Lost and new ranks


def sum_forever(member: Member) -> None:
    while True:
        member.sum()


def lost_and_replaced(rank: int, world_size: int) -> float:
    """Rank 1 is killed. The others go on, and then with rank 3, which comes late."""
    member = Member(rank, world_size)
    if rank < 3:
        member.reopen(1, range(3))
        member.sum()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank in (0, 2):
        with pytest.raises(RuntimeError, match="rank 1 left the group, or its process has ended"):
            sum_forever(member)
        member.reopen(2, (0, 2))
        assert member.sum() == 22
    member.reopen(3, (3, 2, 0))
    return member.sum()


def test_a_lost_rank_is_replaced() -> None:
    outcomes = run_fresh(4, lost_and_replaced)
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert [outcome.result for outcome in outcomes] == [35.0, None, 35.0, 35.0]


# Through torch

through_torch = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="torch 2.14 has added the interface"
)


def by_torch(rank: int, world_size: int) -> None:
    interface: Any = dist
    store = dist.PrefixStore("by torch", distributed_c10d._get_default_store())
    dist.destroy_process_group()
    interface.init_process_group(
        "fddp", store=store, rank=rank, world_size=world_size, enable_reconfigure=True
    )
    assert interface._supports_reconfigure()
    with pytest.raises(ValueError, match="is not open: call _reconfigure first"):
        backend_choice()
    store.set(f"handle/{rank}", interface._get_reconfigure_handle())
    handles = [store.get(f"handle/{other}").decode() for other in range(world_size)]

    work = interface._reconfigure(1, handles, timeout=timedelta(seconds=LONG_S))
    assert work.wait()
    assert work.is_completed()
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    assert backend_choice().name == "shm"
    for call in (mean_of_ddp, gathered, scattered, sent_around):
        call(rank, world_size)

    interface._reconfigure(2, {*handles}).wait()
    place = sorted(handles).index(handles[rank])
    assert dist.get_rank() == place, "ranks of a set are numbered alike on all ranks"
    gathered(place, world_size)
    dist.destroy_process_group()


def mean_of_ddp(rank: int, world_size: int) -> None:
    module = torch.nn.Linear(2, 1, bias=False)
    ddp = torch.nn.parallel.DistributedDataParallel(module)
    ddp(torch.full((1, 2), float(rank))).sum().backward()
    grad = module.weight.grad
    assert grad is not None
    assert grad.tolist() == [[(world_size - 1) / 2] * 2]


def gathered(rank: int, world_size: int) -> None:
    whole = torch.empty(world_size)
    dist.all_gather_into_tensor(whole, torch.tensor([float(rank)]))
    assert whole.tolist() == [*range(world_size)]
    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": other} for other in range(world_size)]


def scattered(rank: int, world_size: int) -> None:
    own = torch.empty(1)
    dist.reduce_scatter_tensor(own, torch.arange(float(world_size)))
    assert own.item() == rank * world_size
    received = torch.empty(world_size)
    dist.all_to_all_single(received, torch.full((world_size,), float(rank)))
    assert received.tolist() == [*range(world_size)]


def sent_around(rank: int, world_size: int) -> None:
    value = torch.empty(1)
    sent = dist.isend(torch.tensor([float(rank)]), (rank + 1) % world_size)
    dist.recv(value, (rank - 1) % world_size)
    assert sent is not None
    sent.wait()
    assert value.item() == (rank - 1) % world_size


@through_torch
def test_the_interface_of_torch(ranks: RankPool) -> None:
    ranks.run(3, by_torch)
