"""Countable costs of construction: all-gathers, and keys in the store.

`docs/guide/transports.md` extrapolates them to 10,000 ranks.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
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
REQUESTS = ("set", "add", "compare_set", "append", "get")


class Counts(NamedTuple):
    """Of the construction of a `GradSync` on one rank."""

    transport: str
    gathered: list[int]  # bytes of each all-gather
    requests: int  # to the store, without those of the backend and polls
    keys_per_check: int  # at most
    keys_left: int  # in the store, of all ranks, once all have constructed theirs
    more_keys_left: int  # the same of some that were closed since


def _constructed(rank: int, world_size: int, transport: Any) -> Counts:
    store = dist.distributed_c10d._get_default_store()

    def keys() -> int:
        dist.barrier()
        count = store.num_keys()
        dist.barrier()
        return count

    tree = {"w": torch.zeros(4)}
    dist.barrier()
    before = keys()
    with ExitStack() as patches:

        def watched(owner: type, name: str) -> mock.Mock:
            spy = mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))
            return patches.enter_context(spy)

        issue = watched(Communicator, "issue")
        polls = watched(BoundedStore, "check")
        requests = [watched(BoundedStore, name) for name in REQUESTS]
        sync = fddp.GradSync(tree, transport=transport)
    with sync:
        first = keys()
        for _ in range(3):
            with fddp.GradSync(tree, transport=transport) as again:
                again(tree)
            dist.barrier()
        second = keys()
        return Counts(
            sync.transport,
            [call.args[1].tensor.nbytes for call in issue.call_args_list],
            sum(request.call_count for request in requests),
            max(len(call.args[1]) for call in polls.call_args_list),
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
        assert counts.gathered == [MESSAGE_BYTES * world_size] * gathers
        # Polls wait for other ranks, so their number is that of a clock; each asks for one key.
        assert counts.keys_per_check == 1
        assert 0 < counts.requests <= 8
        # Two counters a rank, and the list of the processes of a host.
        assert counts.keys_left <= 2 * world_size + 1
        assert counts.more_keys_left <= 0


@pytest.mark.slow
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
            assert len(found.views) == world_size - 1

    fddp.loopback(world_size, run)
    # No more descriptors are sent at once than the system lets a user have under way.
    rounds = host_discovery._rounds([tuple(range(world_size))])
    assert set(gathers.values()) == {5 + rounds}
    assert rounds == -(-(world_size - 1) // (512 // world_size))
