"""Many `GradSync`s of a group: what they share, and that they do not wait for each other.

Functions named `*_on_rank` run on ranks, which are processes, as `fn(rank, world_size, *args)`.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fddp
from fddp.errors import FddpError
from fddp.transport import selection
from fddp.transport.liveness.bounded_store import StoreClientThread
from fddp.transport.liveness.membership import Membership
from tests.support.polling import LONG_S, PROMPT_S, soon
from tests.support.process_resources import open_file_count, resources

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.ranks import RankPool

LEAVES = {"w": torch.ones(4)}
# More than a rank copies for the others when it starts a sum: it takes part in the work.
LARGE = {"w": torch.ones(300_000)}
MOST_PROGRESS_THREADS = 16  # of a process, over shared memory
MANY = MOST_PROGRESS_THREADS + 4


def opened(stack: ExitStack, count: int, transport: Any, leaves: Any = LEAVES) -> list[Any]:
    return [
        stack.enter_context(fddp.GradSync(leaves, transport=transport, timeout_s=LONG_S))
        for _ in range(count)
    ]


def native_threads() -> Counter[str]:
    """Return the threads of this process by name, without those that issue requests to a store."""
    names = Counter[str]()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            names[(task / "comm").read_text().strip()] += 1
    return names - Counter({"python": names["python"]})


# Resources


def resources_on_rank(rank: int, world_size: int, transport: Any) -> tuple[Counter[str], int, int]:
    """Threads and files of 17 further synchronisers, and progress threads of all 20."""
    with ExitStack() as stack:
        syncs = opened(stack, 3, transport)
        dist.barrier()
        threads, files = native_threads(), open_file_count()
        syncs += opened(stack, 17, transport)
        dist.barrier()
        more_threads, more_files = native_threads() - threads, open_file_count() - files
        for sync in syncs:
            assert sync.transport == transport
            assert torch.equal(
                sync({"w": torch.full((4,), float(rank))})["w"], torch.full((4,), 0.5)
            )
        return more_threads, more_files, native_threads()["fddp-shm"]


@pytest.mark.parametrize(
    ("transport", "threads", "files"),
    [("shm", Counter(), 17), ("c10d", Counter({"pt_gloo_runloop": 2 * 17}), 17)],
)
def test_a_further_synchroniser_takes_one_descriptor(
    ranks: RankPool, transport: str, threads: Counter[str], files: int
) -> None:
    """That of its memory, or of its connection to the other rank. The threads are those with which
    gloo executes the operations of a communicator in their order."""
    for more_threads, more_files, progress in ranks.run(2, resources_on_rank, transport):
        assert more_threads == threads
        # The thread that answers queries of other ranks opens its connection in its first second.
        assert more_files - files in (0, 1)
        assert progress <= MOST_PROGRESS_THREADS


# Orders


def start_in_reverse_on_rank(rank: int, world_size: int, transport: Any) -> None:
    """Start a step of each synchroniser, and wait for all, in opposite orders on the ranks."""
    with ExitStack() as stack:
        syncs = opened(stack, MANY, transport, LARGE)[:: 1 if rank == 0 else -1]
        for handle in [sync.start(LARGE) for sync in syncs]:
            assert torch.equal(handle.wait()["w"], LARGE["w"])


def rank_that_only_starts_on_rank(rank: int, world_size: int, transport: Any) -> None:
    """Rank 0 starts all steps, and waits for none of them before rank 1 has finished all, one after
    the other, beginning with the last."""
    store = dist.distributed_c10d._get_default_store()
    with ExitStack() as stack:
        syncs = opened(stack, MANY, transport, LARGE)
        if rank == 0:
            handles = [sync.start(LARGE) for sync in syncs]
            assert soon(lambda: store.check(["rank 1 has finished"]))
            for handle in handles:
                handle.wait()
        else:
            for sync in reversed(syncs):
                sync(LARGE)
            store.set("rank 1 has finished", "")


def use_in_threads_on_rank(rank: int, world_size: int, transport: Any) -> None:
    """A thread for each synchroniser takes steps, and is not held up by others, which begin in the
    opposite order on the other rank."""
    with ExitStack() as stack:
        syncs = opened(stack, 6, transport, LARGE)
        sums: dict[int, float] = {}

        def steps(place: int) -> None:
            for _ in range(5):
                total = syncs[place](LARGE)["w"].sum().item()
            sums[place] = total

        threads = [threading.Thread(target=steps, args=(place,)) for place in range(len(syncs))]
        for thread in threads[:: 1 if rank == 0 else -1]:
            thread.start()
        for thread in threads:
            thread.join(PROMPT_S)
        assert sums == dict.fromkeys(range(len(syncs)), 300_000.0)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize(
    "use", [start_in_reverse_on_rank, rank_that_only_starts_on_rank, use_in_threads_on_rank]
)
def test_ranks_may_use_synchronisers_in_different_orders(
    ranks: RankPool, use: Callable[..., None], transport: str
) -> None:
    ranks.run(2, use, transport)


# Failures


def one_ends_on_rank(rank: int, world_size: int, transport: Any) -> str:
    """Rank 1 closes the second of three synchronisers, which rank 0 uses once more."""
    store = dist.distributed_c10d._get_default_store()
    with ExitStack() as stack:
        first, second, third = opened(stack, 3, transport, LARGE)
        waiting = first.start(LARGE) if rank == 0 else None  # in flight on rank 0 meanwhile
        error = ""
        if rank == 0:
            try:
                second(LARGE)
            except FddpError as lost:
                error = f"{type(lost).__name__}: {lost}"
            store.set("rank 0 has lost one", "")
        else:
            second.close()
            assert soon(lambda: store.check(["rank 0 has lost one"]))
            waiting = first.start(LARGE)
        assert waiting is not None
        assert torch.equal(waiting.wait()["w"], LARGE["w"])
        for sync in (third, first, *opened(stack, 1, transport, LARGE)):
            assert torch.equal(sync(LARGE)["w"], LARGE["w"])
        return error


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_one_that_fails_ends_no_other(ranks: RankPool, transport: str) -> None:
    error, none = ranks.run(2, one_ends_on_rank, transport)
    assert "RankLostError" in error
    assert "rank 1" in error
    assert none == ""


# Openings


def different_kept_on_rank(rank: int, world_size: int) -> list[bool]:
    """What rank 1 has kept of an opening differs from what rank 0 has, or it has nothing."""
    reused = []

    def opens() -> fddp.GradSync:
        sync = fddp.GradSync(LEAVES, timeout_s=LONG_S)
        assert sync.transport == "shm"
        assert torch.equal(sync(LEAVES)["w"], LEAVES["w"])
        reused.append(sync._engine.transport._membership.all_kept)
        return sync

    with ExitStack() as stack:
        stack.enter_context(opens())
        stack.enter_context(opens())
        # Interrupted on rank 1 after its last exchange over the communicator: rank 0 keeps that.
        interrupted = KeyboardInterrupt() if rank == 1 else None
        choose = selection._use_memory

        def use_memory(*args: Any) -> None:
            choose(*args)
            if interrupted is not None:
                raise interrupted

        with (
            mock.patch.object(selection, "_use_memory", use_memory),
            pytest.raises((KeyboardInterrupt, FddpError)),
        ):
            fddp.GradSync(LEAVES, timeout_s=LONG_S)
        stack.enter_context(opens())
        opens().close()
        opens().close()  # others are open, for which the communicator is kept
    # All are closed on rank 1, and one remains open on rank 0.
    with ExitStack() as stack:
        kept = opens()
        if rank == 1:
            kept.close()
        dist.barrier()
        stack.enter_context(opens())
        stack.enter_context(opens())
        kept.close()
    return reused


def test_openings_of_ranks_that_have_kept_different_communicators(ranks: RankPool) -> None:
    expected = [False, True, False, True, True, False, False, True]
    assert ranks.run(2, different_kept_on_rank) == [expected] * 2


@pytest.mark.parametrize(
    ("first", "last", "same"), [(2, 2, True), (2, 3, False), (0, 2, False), (2, 0, False)]
)
def test_what_ranks_have_kept_is_compared(first: int, last: int, same: bool) -> None:
    store, client = dist.HashStore(), StoreClientThread()
    early, late = [Membership(store, rank, 2, client) for rank in range(2)]
    waiting = threading.Thread(target=early.open, args=(LONG_S,), kwargs={"kept": first})
    waiting.start()
    assert soon(lambda: store.check(["fddp/1/arrived"]))
    late.open(LONG_S, kept=last)
    waiting.join()
    client.end()
    assert early.all_kept == late.all_kept == same


def nothing_is_left_on_rank(rank: int, world_size: int) -> None:
    fddp.GradSync(LEAVES, transport="c10d").close()  # loads what stays loaded
    dist.barrier()
    before = resources()
    syncs = [fddp.GradSync(LEAVES) for _ in range(3)]
    for sync in syncs[:2]:
        sync.close()
    del sync, syncs  # the last one is collected
    assert soon(lambda: all(now <= then for now, then in zip(resources(), before, strict=True)))


def test_nothing_is_left_of_the_last_one(ranks: RankPool) -> None:
    ranks.run(2, nothing_is_left_on_rank)
