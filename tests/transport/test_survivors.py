"""Agreement of the ranks that are left: one list for all, whatever each knows and when it comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fddp.errors import RankLostError, SyncTimeoutError
from fddp.transport.liveness import survivors
from fddp.transport.liveness.bounded_store import BoundedStore, StoreClientThread
from fddp.transport.liveness.survivors import agree_on_left
from tests.support.examples import examples
from tests.support.polling import LONG_S


def on_threads(ranks: Collection[int], call: Callable[[BoundedStore, int], Any]) -> dict[int, Any]:
    """Results of `call(store, rank)` of some ranks, or the errors that they raised."""
    store = dist.HashStore()
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = call(BoundedStore(store, StoreClientThread()), rank)
        except (RankLostError, SyncTimeoutError) as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@st.composite
def losses(draw: st.DrawFn) -> tuple[int, dict[int, set[int]], dict[int, float]]:
    """A number of ranks, the lost ones each remaining rank knows at first, and when it comes."""
    size = draw(st.integers(2, 5))
    lost = draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    left = [rank for rank in range(size) if rank not in lost]
    known = {rank: draw(st.sets(st.sampled_from(sorted(lost)))) if lost else set() for rank in left}
    delays = {rank: draw(st.sampled_from([0.0, 0.0, 0.003, 0.02])) for rank in left}
    return size, known, delays


@examples(40)
@given(losses())
def test_all_that_are_left_get_the_same_list(
    drawn: tuple[int, dict[int, set[int]], dict[int, float]],
) -> None:
    """Also where each knew of others at first, and learns of the rest later."""
    size, known, delays = drawn
    lost = {rank for rank in range(size) if rank not in known}

    def call(store: BoundedStore, rank: int) -> Any:
        time.sleep(delays[rank])
        looks = iter([known[rank]])
        find_lost = lambda among: {*next(looks, lost)} & {*among}  # noqa: E731
        return agree_on_left(store, rank, range(size), find_lost, LONG_S)

    with mock.patch.object(survivors, "CHECK_INTERVAL_S", 0.005):
        results = on_threads(known, call)
    assert results == dict.fromkeys(known, (tuple(sorted(known)), 1))


def test_a_rank_taken_for_lost_is_told_so_and_others_go_on() -> None:
    def call(store: BoundedStore, rank: int) -> Any:
        if rank == 2:
            time.sleep(0.3)
        lost = {2} if rank == 0 else set()
        return agree_on_left(store, rank, range(3), lambda among: lost & {*among}, LONG_S)

    results = on_threads(range(3), call)
    assert results[0] == results[1] == ((0, 1), 1)
    assert results[2].ranks == (2,)
    assert "rank 2 was taken for lost, and ranks 0, 1 went on without it" in str(results[2])


def test_ranks_that_gave_up_meet_at_their_next_attempt() -> None:
    """Ranks 0 and 1 give up, because 2 is late. Then all call, 2 for the first time."""
    gave_up = threading.Barrier(3)
    errors: dict[int, SyncTimeoutError] = {}

    def call(store: BoundedStore, rank: int) -> Any:
        if rank < 2:
            with pytest.raises(SyncTimeoutError) as caught:
                agree_on_left(store, rank, range(3), lambda among: (), 0.2 + 0.1 * rank)
            errors[rank] = caught.value
        gave_up.wait()
        return agree_on_left(store, rank, range(3), lambda among: (), LONG_S)[0]

    assert on_threads(range(3), call) == dict.fromkeys(range(3), (0, 1, 2))
    assert errors[0].ranks == (2,)
    assert errors[1].ranks == (0, 2)  # 0 has given up before
    assert "of ranks 2 it is not known, and they did not call within timeout_s=0.2" in str(
        errors[0]
    )
