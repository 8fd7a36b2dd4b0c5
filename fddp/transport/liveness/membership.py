"""Which ranks are there: told through the key-value store of a process group.

Two questions are answered here, neither of which a backend answers by itself: did every rank open
its side of a transport, and, once an operation has failed, who is still alive.
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

from fddp.transport.liveness.bounded_store import (
    ANSWER_S,
    GLANCE_S,
    BoundedStore,
    StoreClientThread,
)
from fddp.transport.liveness.interrupts import PeerFailureError
from fddp.transport.liveness.user_code import ignore_backend_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

#: how an operation ended on the rank that reports: no answer in time, a broken connection, the end
#: of other ranks that it saw, or the news of any of these from another rank
Verdict = Literal["timeout", "broken", "dead", "told"]


_MOST_CHARS = 2000  # of what another rank tells
_CHECK_INTERVAL_S = 0.25  # how often a rank looks at what the others do while it waits for them


class Report(NamedTuple):
    """What a rank that met a failure tells the others."""

    verdict: Verdict
    ranks: tuple[int, ...]  # who took part in the operation that failed; of "dead", those who are
    place: int = -1  # how many operations of these ranks came before it
    operation: str = ""


class Membership:
    """Presence of the ranks of one transport.

    The n-th transport that a rank opens on a group meets the n-th of every other rank. The count
    is kept in the store, for each rank its own, so that no process-wide state can come apart.

    [Note: openings end alike] A rank that waits in vain gives up, and one that comes late must not
    take that rank for present. Each opening therefore ends in one atomic write, "go" or "stop",
    which everyone abides by; an opening that was stopped is skipped by those who come after. So
    ranks that failed to meet meet at their next attempt.

    Attributes:
        store: a part of the group's store that belongs to this transport alone.
        count: number of the opening, the same on all ranks.
    """

    store: BoundedStore
    count: int

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, client: StoreClientThread | None = None
    ) -> None:
        self._group_store = BoundedStore(store, client or StoreClientThread())
        self.store, self.count = (
            self._group_store.prefixed("fddp/0"),
            0,
        )  # of none: openings begin at 1
        self._rank = rank
        self._world_size = world_size

    def open(
        self,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
        on_count: Callable[[int], None] = lambda count: None,
    ) -> tuple[int, ...]:
        """Wait for every rank to open; the ranks that did not come in time, none if all are there.

        [Note: openings end alike]

        Args:
            timeout_s: the longest to wait.
            check: called now and then meanwhile; what it raises ends the opening on all ranks.
            on_count: called with the number of the opening, before others can see this rank in it.

        Raises:
            SilentError: the store did not answer in that time.
            ToldError: the opening was interrupted on another rank.
        """
        deadline_s = time.perf_counter() + timeout_s

        def in_time(store: BoundedStore) -> BoundedStore:
            return store.within(max(deadline_s - time.perf_counter(), GLANCE_S))

        while True:
            count = in_time(self._group_store).add(f"fddp/opened/{self._rank}", 1)
            self.store, self.count = self._group_store.prefixed(f"fddp/{count}"), count
            if in_time(self.store).check(["outcome"]):
                continue
            on_count(count)
            in_time(self.store).set(f"here/{self._rank}", "")
            stopped: BaseException | None = None
            try:
                absent = self._absent(
                    "here", deadline_s, check=partial(self._check_while_opening, check)
                )
            except BaseException as error:
                absent, stopped = (), error
            ends = absent or stopped is not None
            outcome = in_time(self.store).compare_set("outcome", "", "stop" if ends else "go")
            if outcome == b"go":
                return ()
            if stopped is not None:
                raise stopped
            if absent:
                return absent

    def _check_while_opening(self, check: Callable[[], None]) -> None:
        check()
        if self.failed():
            raise PeerFailureError("another rank reported a failure")

    def forget(self, addresses: Sequence[str]) -> None:
        """All ranks have opened, and are connected: what this one put there for it goes, because a
        store forgets nothing by itself.

        Args:
            addresses: keys of this transport's part that others found this rank by.
        """
        keys = [f"here/{self._rank}", *addresses, *(["outcome"] if self._rank == 0 else [])]
        with ignore_backend_errors(NotImplementedError):
            self.store.within(GLANCE_S).delete(keys)

    def number(self, name: str, timeout_s: float) -> int:
        """How many transports over the group were given this name before, and this one: the same
        on all ranks, which name theirs in one order.

        Args:
            name: what it is for.
            timeout_s: what the store gets to answer.
        """
        return self._group_store.within(timeout_s).add(f"fddp/named/{name}/{self._rank}", 1)

    def publish_step_failure(self, step: int, text: str) -> None:
        """Tell ranks that are in the loss function of a step that it fails on all of them."""
        with ignore_backend_errors():
            text_of_failure = json.dumps([step, f"rank {self._rank} failed: {text}"])
            self.store.set("alarm", text_of_failure)

    def read_step_failure(self, step: int) -> str | None:
        """Which rank failed in this step, and how, if that was told."""
        with ignore_backend_errors(ValueError, TypeError):  # no store, or no alarm in it
            if self.store.within(GLANCE_S).check(["alarm"]):
                failed, text = json.loads(self.store.get("alarm"))
                return str(text) if failed == step else None
        return None

    def publish_mismatch(self, text: str) -> None:
        """Tell ranks for which it shows only later that they met in different operations."""
        with ignore_backend_errors(ValueError):
            self.store.set("parted", text)

    def mismatch(self) -> str:
        """What was told of that; empty if nothing was."""
        with ignore_backend_errors(ValueError):
            if self.store.check(["parted"]):
                return self.store.get("parted").decode(errors="replace")[:_MOST_CHARS]
        return ""

    def failed(self) -> bool:
        """Whether some rank has reported a failure; False where the store does not answer."""
        with ignore_backend_errors():
            return self.store.within(GLANCE_S).check(["failed"])
        return False

    def report(self, report: Report) -> None:
        """Tell the others that an operation failed here; that this rank lives."""
        self.store.set(f"report/{self._rank}", json.dumps(report))
        if report.verdict == "dead":
            self.store.set("dead", "")
        self.store.set("failed", "")

    def reports(
        self, grace_s: float, ended: Callable[[], tuple[int, ...]] = lambda: ()
    ) -> dict[int, Report]:
        """What the ranks that reported tell, waiting at most `grace_s` for all of them.

        Nobody is waited for once a rank has told who is dead, or has `ended` without a report.
        """
        deadline_s = time.perf_counter() + grace_s

        def enough() -> bool:
            gone = [f"report/{rank}" for rank in ended()]
            return self._all_set(["dead"]) or not all(self._all_set([key]) for key in gone)

        silent = self._absent("report", deadline_s, enough)
        by_rank = {rank: self._read(rank) for rank in range(self._world_size) if rank not in silent}
        return {rank: report for rank, report in by_rank.items() if report is not None}

    def unreported(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Those of these ranks that have reported nothing, or of which the store does not tell: a
        rank that reported has lived to raise an error, and may have ended for it."""
        with ignore_backend_errors():
            return tuple(rank for rank in ranks if not self._all_set([f"report/{rank}"]))
        return ranks

    def _read(self, rank: int) -> Report | None:
        """What a rank reports; None where that makes no sense, as if it had not."""
        try:
            verdict, ranks, place, operation = json.loads(self.store.get(f"report/{rank}"))
        except (ValueError, TypeError, RecursionError):
            return None
        known = verdict in get_args(Verdict) and isinstance(ranks, list)
        known = known and all(type(number) is int for number in (*ranks, place))
        if not known or not isinstance(operation, str):
            return None
        return Report(cast("Verdict", verdict), tuple(ranks), place, operation)

    def _absent(
        self,
        name: str,
        deadline_s: float,
        enough: Callable[[], bool] = lambda: False,
        check: Callable[[], None] = lambda: None,
    ) -> tuple[int, ...]:
        """The ranks that have not set their `name` key by `deadline_s`, or when it is `enough`."""
        next_check_s = time.perf_counter() + _CHECK_INTERVAL_S
        keys = {rank: f"{name}/{rank}" for rank in range(self._world_size)}
        pause_s = 0.0005
        # Not `store.wait`: some stores time it in whole seconds, some bar other users meanwhile.
        while not self._all_set(list(keys.values()), deadline_s):
            if time.perf_counter() > deadline_s or enough():
                return tuple(rank for rank, key in keys.items() if not self._all_set([key]))
            if time.perf_counter() > next_check_s:
                check()
                next_check_s = time.perf_counter() + _CHECK_INTERVAL_S
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        return ()

    def _all_set(self, keys: list[str], deadline_s: float = 0.0) -> bool:
        """Whether these keys are there; the store may answer until then, if that is longer than it
        has anyhow."""
        left_s = deadline_s - time.perf_counter()
        return (self.store.within(left_s) if left_s > ANSWER_S else self.store).check(keys)
