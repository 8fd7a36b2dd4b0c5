"""Agreement of the ranks that are left of a group, through its store.

[Note: one list of ranks left] After a loss each rank knows of its own which ranks are gone, and two
ranks may know of different ones. Each attempt to agree therefore ends in one atomic write, of the
list of ranks that go on or of "stop", which all ranks obey. A rank that comes later and is not in
the list was taken for lost. Attempts are counted in the store, for each rank: one that was stopped
is skipped by the ranks that come late, so that ranks which gave up meet at the next one.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from fddp.core.protocol.messages import decode
from fddp.errors import RankLostError, SyncTimeoutError
from fddp.transport.liveness.membership import CHECK_INTERVAL_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from fddp.transport.liveness.bounded_store import BoundedStore

_STOP = b"stop"
_PAUSE_SHARE, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 0.0005, 0.01  # between two polls
_FIRST_LOOK_S = 0.005  # between the first two looks for lost ranks


def agree_on_left(
    store: BoundedStore,
    own: int,
    members: Collection[int],
    find_lost: Callable[[Collection[int]], Collection[int]],
    timeout_s: float,
) -> tuple[tuple[int, ...], int]:
    """Return the ranks that are left, in ascending order, and the number of this agreement; a
    collective call of theirs.

    Args:
        store: part of a store for these agreements.
        own: number of this rank.
        members: numbers of the ranks that may be left.
        find_lost: returns those of the ranks that it gets that are known to be lost. Called now and
            then during the wait.
        timeout_s: time limit.

    Raises:
        SyncTimeoutError: some ranks neither came in time nor are known to be lost.
        RankLostError: the others went on without this rank.

    Example:
        >>> from fddp.transport.liveness.bounded_store import BoundedStore, StoreClientThread
        >>> import torch.distributed as dist
        >>> store = BoundedStore(dist.HashStore(), StoreClientThread())
        >>> agree_on_left(store, 0, (0, 1, 2), lambda ranks: (1, 2), 5.0)
        ((0,), 1)
    """
    deadline_s = time.perf_counter() + timeout_s
    lost: set[int] = set()
    while True:
        number = store.add(f"attempts/{own}", 1)
        attempt = store.prefixed(str(number))
        absent: set[int] = set()
        if not attempt.check(["outcome"]):
            attempt.set(f"here/{own}", "")
            absent = _await_outcome(attempt, own, set(members), lost, find_lost, deadline_s)
        outcome = attempt.get("outcome")
        if outcome != _STOP:
            left = tuple(decode(outcome, [int]))
            if own in left:
                return left, number
            raise RankLostError(
                f"rank {own} was taken for lost, and ranks {', '.join(map(str, left))} went on "
                f"without it; end this process, and let a new one join them",
                (own,),
            )
        if time.perf_counter() > deadline_s:
            late = tuple(sorted(absent))
            raise SyncTimeoutError(
                f"rank {own} did not find out which ranks are left: of ranks "
                f"{', '.join(map(str, late))} it is not known, and they did not call within "
                f"timeout_s={timeout_s}; call again once they do, or pass a group of the ranks "
                f"that go on",
                late,
            )


def _await_outcome(
    attempt: BoundedStore,
    own: int,
    members: set[int],
    lost: set[int],
    find_lost: Callable[[Collection[int]], Collection[int]],
    deadline_s: float,
) -> set[int]:
    """Wait for the outcome of an attempt, or write it. Adds to `lost`, and returns the ranks that
    did not come and are not lost."""
    next_look_s, begin_s = 0.0, time.perf_counter()
    looks_s = _FIRST_LOOK_S  # a process that was killed may take some time to end
    absent = members - {own}
    while not attempt.check(["outcome"]):
        left, now_s = members - lost, time.perf_counter()
        if attempt.check([f"here/{rank}" for rank in sorted(left)]):
            attempt.compare_set("outcome", "", json.dumps(sorted(left)))
        elif now_s > min(next_look_s, deadline_s):
            absent = {rank for rank in left if not attempt.check([f"here/{rank}"])}
            lost |= {*find_lost(absent)} & absent
            absent -= lost
            if absent and now_s > deadline_s:
                attempt.compare_set("outcome", "", _STOP.decode())
            next_look_s = time.perf_counter() + looks_s
            looks_s = min(2 * looks_s, CHECK_INTERVAL_S)
        else:
            pause_s = max(_PAUSE_SHARE * (now_s - begin_s), _SHORTEST_PAUSE_S)
            time.sleep(min(pause_s, _LONGEST_PAUSE_S))
    return absent
