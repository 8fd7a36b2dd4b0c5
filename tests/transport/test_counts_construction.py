"""Countable costs of construction: all-gathers, and keys in the store.

`docs/guide/transports.md` extrapolates them to 10,000 ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fddp
from fddp.transport.c10d.communicator import Communicator
from fddp.transport.liveness.bounded_store import BoundedStore
from fddp.transport.loopback import LoopbackTransport
from fddp.transport.shm import host_discovery
from tests.support.ranks import RankPool

MESSAGE_BYTES = 1024  # of one rank in an all-gather of a short text
REQUESTS = ("set", "add", "compare_set", "append", "get", "check")


class Counts(NamedTuple):
    """Of the construction of a `GradSync` on one rank."""

    transport: str
    gathers: int
    gathered_bytes: int  # received
    requests: Counter[str]  # to the store, without those of the backend
    keys_per_check: int  # at most
    keys_left: int  # in the store, of all ranks, once all have constructed theirs
    more_keys_left: int  # the same of a second construction


@contextmanager
def _requests(requests: Counter[str], checked: list[int]) -> Iterator[None]:
    with ExitStack() as patches:
        for name in REQUESTS:
            request = getattr(BoundedStore, name)

            def note(
                self: BoundedStore,
                keys: Any,
                *rest: Any,
                _name: str = name,
                _request: Any = request,
            ) -> Any:
                requests[_name] += 1
                checked.append(len(keys) if _name == "check" else 0)
                return _request(self, keys, *rest)

            patches.enter_context(mock.patch.object(BoundedStore, name, note))
        yield


def _constructed(rank: int, world_size: int, transport: Any) -> Counts:
    store = dist.distributed_c10d._get_default_store()
    gathered: list[int] = []
    requests: Counter[str] = Counter()
    checked: list[int] = []
    issue = Communicator.issue

    def note(self: Communicator, operation: Any) -> Any:
        gathered.append(operation.tensor.nbytes)
        return issue(self, operation)

    def keys() -> int:
        dist.barrier()
        count = store.num_keys()
        dist.barrier()
        return count

    tree = {"w": torch.zeros(4)}
    dist.barrier()
    before = keys()
    with mock.patch.object(Communicator, "issue", note), _requests(requests, checked):
        sync = fddp.GradSync(tree, transport=transport)
    with sync:
        first = keys()
        with fddp.GradSync(tree, transport=transport):
            second = keys()
        name = sync.transport
    return Counts(
        name,
        len(gathered),
        sum(gathered),
        requests,
        max(checked),
        first - before,
        second - first,
    )


@pytest.mark.parametrize(("transport", "gathers"), [("c10d", 3), ("shm", 9)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_construction_on_any_number_of_ranks(
    ranks: RankPool, world_size: int, transport: str, gathers: int
) -> None:
    for counts in ranks.run(world_size, _constructed, transport):
        assert counts.transport == transport
        assert counts.gathers == gathers
        assert counts.gathered_bytes == gathers * MESSAGE_BYTES * world_size
        # Polls wait for other ranks, so their number is that of a clock; each asks for one key.
        del counts.requests["check"]
        assert counts.keys_per_check == 1
        assert counts.requests.total() <= 8
        # Two counters a rank, and the list of the processes of a host.
        assert counts.keys_left <= 2 * world_size + 1
        assert counts.more_keys_left <= 0


@pytest.mark.parametrize("world_size", [2, 16, 17, 64])
def test_ranks_find_their_host_in_rounds_of_descriptors(world_size: int) -> None:
    gathers: Counter[int] = Counter()

    def run(group: Any) -> None:
        with LoopbackTransport(group) as transport:
            gather = transport.all_gather

            def counted(tensor: torch.Tensor, **how: Any) -> Any:
                gathers[group.rank] += 1
                assert tensor.nbytes == MESSAGE_BYTES
                return gather(tensor, **how)

            with mock.patch.object(transport, "all_gather", counted):
                found = host_discovery.discover_hosts(transport)
            assert len(found.views) == len(found.processes) == world_size - 1
            found.close()

    fddp.loopback(world_size, run)
    # No more descriptors are sent at once than the system lets a user have under way.
    rounds = host_discovery._rounds([tuple(range(world_size))])
    assert set(gathers.values()) == {5 + rounds}
    assert rounds == -(-(world_size - 1) // (256 // world_size))
