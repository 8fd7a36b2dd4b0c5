"""Which ranks are there: told through the key-value store of a process group.

Two questions are answered here, neither of which a backend answers by itself: did every rank open
its side of a transport, and, once an operation has failed, who is still alive.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: how an operation ended on the rank that reports: no answer in time, a broken connection, the end
#: of other ranks that it saw, or the news of any of these from another rank
Verdict = Literal["timeout", "broken", "dead", "told"]


class Report(NamedTuple):
    """What a rank that met a failure tells the others."""

    verdict: Verdict
    ranks: tuple[int, ...]  # who took part in the operation that failed; of "dead", those who are


class RollCall:
    """Presence of the ranks of one transport.

    The n-th transport that a rank opens on a group meets the n-th of every other rank. The count
    is kept in the store, for each rank its own, so that no process-wide state can come apart.

    [Note: openings end alike] A rank that waits in vain gives up, and one that comes late must not
    take that rank for present. Each opening therefore ends in one atomic write, "go" or "stop",
    which everyone abides by; an opening that was stopped is skipped by those who come after. So
    ranks that failed to meet meet at their next attempt.

    Attributes:
        store: a part of the group's store that belongs to this transport alone.
    """

    store: dist.Store

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._group_store = store
        self._rank = rank
        self._world_size = world_size

    def open(self, timeout_s: float) -> tuple[int, ...]:
        """Wait for every rank to open; the ranks that did not come in time, none if all are there.

        [Note: openings end alike]
        """
        deadline_s = time.perf_counter() + timeout_s
        while True:
            count = self._group_store.add(f"fddp/opened/{self._rank}", 1)
            self.store = dist.PrefixStore(f"fddp/{count}", self._group_store)
            if self.store.check(["outcome"]):
                continue
            self.store.set(f"here/{self._rank}", "")
            absent = self._absent("here", deadline_s)
            outcome = self.store.compare_set("outcome", "", "stop" if absent else "go")
            if outcome == b"go":
                return ()
            if absent:
                return absent

    def failed(self) -> bool:
        """Whether some rank has reported a failure; False where the store does not answer."""
        try:
            return self.store.check(["failed"])
        except RuntimeError:
            return False

    def report(self, report: Report) -> None:
        """Tell the others that an operation failed here; that this rank lives."""
        self.store.set(f"report/{self._rank}", json.dumps(report))
        if report.verdict == "dead":
            self.store.set("dead", "")
        self.store.set("failed", "")

    def reports(self, grace_s: float) -> dict[int, Report]:
        """What the ranks that reported tell, waiting at most `grace_s` for all of them.

        Nobody is waited for once a rank has told who is dead.
        """
        deadline_s = time.perf_counter() + grace_s
        silent = self._absent("report", deadline_s, lambda: self._all_set(["dead"]))
        return {rank: self._read(rank) for rank in range(self._world_size) if rank not in silent}

    def _read(self, rank: int) -> Report:
        verdict, ranks = json.loads(self.store.get(f"report/{rank}"))
        return Report(cast("Verdict", verdict), tuple(ranks))

    def _absent(
        self, name: str, deadline_s: float, enough: Callable[[], bool] = lambda: False
    ) -> tuple[int, ...]:
        """The ranks that have not set their `name` key by `deadline_s`, or when it is `enough`."""
        keys = {rank: f"{name}/{rank}" for rank in range(self._world_size)}
        pause_s = 0.0005
        # Not `store.wait`: some stores time it in whole seconds, some bar other users meanwhile.
        while not self._all_set(keys.values()):
            if time.perf_counter() > deadline_s or enough():
                return tuple(rank for rank, key in keys.items() if not self._all_set([key]))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        return ()

    def _all_set(self, keys: Iterable[str]) -> bool:
        return self.store.check(list(keys))
