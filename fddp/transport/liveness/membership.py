"""Membership of a transport, kept in the key-value store of a process group.

It establishes two facts that backends do not provide: whether every rank opened the transport, and,
once an operation has failed, which ranks are still alive.
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import TYPE_CHECKING, get_args

from fddp.core.protocol.messages import AnyOf, Schema, decode
from fddp.transport.liveness.bounded_store import (
    GLANCE_S,
    REQUEST_S,
    BoundedStore,
    StoreClientThread,
)
from fddp.transport.liveness.failure import Report, Verdict
from fddp.transport.liveness.interrupts import PeerFailureError, ignore_backend_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

_MAX_MISMATCH_CHARS = 2000
CHECK_INTERVAL_S = 0.25  # between two checks of the other ranks during a wait
_LONGEST_PAUSE_S = 0.05  # between two polls, if the store can serve all ranks that often
_POLLS_PER_S = 20_000
_REPORT: Schema = (AnyOf(get_args(Verdict)), [int], int, str)


class Membership:
    """Presence of the ranks of one transport.

    The n-th transport that a rank opens on a group is matched with the n-th of every other rank.
    Each rank's count is kept in the store, so that no process-wide state can diverge.

    [Note: openings end alike] A rank whose wait times out gives up, and a late rank must not
    consider it present. Each opening therefore ends in one atomic write, "go" or "stop", which all
    ranks obey. Late ranks skip an opening that was stopped after a time limit, or because they had
    failed a step, and raise where a rank has reported another failure. Ranks that failed to open a
    transport together are thus matched at their next attempt.

    [Note: one key for all ranks] The rank that arrives last sets a key, and the others poll this
    key alone. If each polled the keys of all, the store would look up a number of keys that grows
    with the square of the number of ranks, many times a second: 10^8 for 10,000 ranks.

    Attributes:
        store: part of the group's store for this transport only.
        count: number of the opening, the same on all ranks.
        all_kept: True if all ranks passed the same number of what they have `kept`.
    """

    store: BoundedStore
    count: int
    all_kept = False

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, client: StoreClientThread | None = None
    ) -> None:
        self._group_store = BoundedStore(store, client or StoreClientThread())
        self.store, self.count = self._group_store.prefixed("fddp/0"), 0  # openings begin at 1
        self._rank = rank
        self._world_size = world_size
        self._kept_key = ""

    def open(
        self,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
        on_count: Callable[[int], None] = lambda count: None,
        on_stopped: Callable[[], None] = lambda: None,
        kept: int = 0,
    ) -> tuple[int, ...]:
        """Wait for every rank to open; return the absent ranks, none on success.

        See [Note: openings end alike].

        Args:
            timeout_s: time limit.
            check: called repeatedly during the wait; an exception ends the opening on all ranks.
            on_count: called with the number of the opening before other ranks see this one in it.
            on_stopped: called before an opening is skipped that other ranks have stopped.
            kept: number of what this rank has kept of an earlier opening; 0 for nothing.

        Raises:
            StoreTimeoutError: the store did not answer within the time limit.
            PeerFailureError: the opening was interrupted on another rank.
        """
        deadline_s = time.perf_counter() + timeout_s

        def in_time(store: BoundedStore) -> BoundedStore:
            return store.within(max(deadline_s - time.perf_counter(), GLANCE_S))

        while True:
            count = in_time(self._group_store).add(f"fddp/opened/{self._rank}", 1)
            self.store, self.count = self._group_store.prefixed(f"fddp/{count}"), count
            if in_time(self.store).check(["outcome"]):
                # Ranks that were only notified had learned of a step that failed elsewhere.
                if any(one.verdict != "notified" for one in self.reports(0.0).values()):
                    raise PeerFailureError("another rank reported a failure")
                on_stopped()
                continue
            on_count(count)
            in_time(self.store).set(f"here/{self._rank}", "")
            if kept:
                self._kept_key = f"kept/{kept}"
                in_time(self.store).add(self._kept_key, 1)
            if in_time(self.store).add("arrived", 1) == self._world_size:
                by = in_time(self.store).add(self._kept_key, 0) if kept else 0
                # [Note: one key for all ranks]
                in_time(self.store).set("complete", "kept" if by == self._world_size else "new")
            stopped: BaseException | None = None
            try:
                absent = self._absent(
                    "here", deadline_s, "complete", check=partial(self._check_while_opening, check)
                )
            except BaseException as error:
                absent, stopped = (), error
            ends = absent or stopped is not None
            outcome = in_time(self.store).compare_set("outcome", "", "stop" if ends else "go")
            if stopped is not None:
                raise stopped
            if outcome == b"go":
                self.all_kept = kept > 0 and in_time(self.store).get("complete") == b"kept"
                return ()
            if absent:
                return absent

    def withdraw(self, error: str) -> None:
        """Report that this rank can't take part in the opening, or in the next one if it has begun
        none, so that the others need not wait for it."""
        if self.count == 0:
            self.count = self._group_store.add(f"fddp/opened/{self._rank}", 1)
            self.store = self._group_store.prefixed(f"fddp/{self.count}")
        self.report(Report("failed", (self._rank,), operation=error[:_MAX_MISMATCH_CHARS]))
        self.store.compare_set("outcome", "", "stop")

    def _check_while_opening(self, check: Callable[[], None]) -> None:
        check()
        if self.failed():
            raise PeerFailureError("another rank reported a failure")

    def forget(self, others: Sequence[str]) -> None:
        """Delete this rank's keys of the opening, and `others`, once all ranks are connected."""
        shared = ["outcome", "arrived", "complete"] if self._rank == 0 else []
        own = [key for key in (f"here/{self._rank}", self._kept_key) if key]
        keys = [*own, *others, *shared]
        with ignore_backend_errors(NotImplementedError):
            self.store.within(GLANCE_S).delete(keys)

    def number(self, name: str, timeout_s: float) -> int:
        """Count the transports of the group with this name, including this one.

        The number is the same on all ranks if they name their transports in the same order.
        """
        return self._group_store.within(timeout_s).add(f"fddp/named/{name}/{self._rank}", 1)

    def publish_step_failure(self, step: int, text: str) -> None:
        """Report that a step failed on this rank, for ranks that are in its loss function."""
        with ignore_backend_errors():
            failure = json.dumps([step, f"rank {self._rank} failed: {text}"])
            self.store.set("alarm", failure)

    def read_step_failure(self, step: int) -> str | None:
        with ignore_backend_errors(ValueError):  # the store is gone, or the report is malformed
            if self.store.within(GLANCE_S).check(["alarm"]):
                failed, text = decode(self.store.get("alarm"), (int, str))
                return text if failed == step else None
        return None

    def publish_mismatch(self, text: str) -> None:
        """Publish the different operations of the ranks, for ranks that fail later."""
        with ignore_backend_errors(ValueError):
            self.store.set("parted", text)

    def mismatch(self) -> str:
        with ignore_backend_errors(ValueError):
            if self.store.check(["parted"]):
                return self.store.get("parted").decode(errors="replace")[:_MAX_MISMATCH_CHARS]
        return ""

    def failed(self) -> bool:
        """Return True if some rank has reported a failure; False if the store is silent."""
        with ignore_backend_errors():
            return self.store.within(GLANCE_S).check(["failed"])
        return False

    def report(self, report: Report) -> None:
        """Publish a failure, and thereby that this rank is alive."""
        self.store.set(f"report/{self._rank}", json.dumps(report))
        if report.verdict in ("dead", "failed"):
            self.store.set("dead", "")  # the others need not wait for more reports
        self.store.set("failed", "")

    def reports(
        self, grace_s: float, ended: Callable[[], tuple[int, ...]] = lambda: ()
    ) -> dict[int, Report]:
        """Return the reports by rank, waiting at most `grace_s` for all of them.

        The wait ends early once a rank has reported dead ranks, or has `ended` without a report.
        """
        deadline_s = time.perf_counter() + grace_s

        def enough() -> bool:
            keys = [f"report/{rank}" for rank in ended()]
            return self._all_set(["dead"]) or not all(self._all_set([key]) for key in keys)

        silent = self._absent("report", deadline_s, enough=enough)
        by_rank = {rank: self._read(rank) for rank in range(self._world_size) if rank not in silent}
        return {rank: report for rank, report in by_rank.items() if report is not None}

    def errors(self, ranks: tuple[int, ...]) -> dict[int, str]:
        """Return the errors of their own that `ranks` have reported."""
        with ignore_backend_errors():
            found = {rank: self._read(rank) for rank in ranks if rank not in self.unreported(ranks)}
            return {r: one.operation for r, one in found.items() if one and one.verdict == "failed"}
        return {}

    def unreported(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of `ranks` without a report; all of them if the store is unreachable.

        A rank with a report has raised an error, which may be the reason why it ended.
        """
        with ignore_backend_errors():
            return tuple(rank for rank in ranks if not self._all_set([f"report/{rank}"]))
        return ranks

    def _read(self, rank: int) -> Report | None:
        try:
            verdict, ranks, place, operation = decode(self.store.get(f"report/{rank}"), _REPORT)
        except ValueError:
            return None
        return Report(verdict, tuple(ranks), place, operation)

    def _absent(
        self,
        name: str,
        deadline_s: float,
        complete: str | None = None,
        enough: Callable[[], bool] = lambda: False,
        check: Callable[[], None] = lambda: None,
    ) -> tuple[int, ...]:
        """Return the ranks without a `name` key at `deadline_s`, or as soon as `enough()`. The key
        `complete` is set once all ranks have theirs, if there is such a key."""
        next_check_s = time.perf_counter() + CHECK_INTERVAL_S
        keys = {rank: f"{name}/{rank}" for rank in range(self._world_size)}
        polled = [*keys.values()] if complete is None else [complete]
        pause_s, longest_s = 0.0005, max(_LONGEST_PAUSE_S, self._world_size / _POLLS_PER_S)
        # Not `store.wait`: some stores round its timeout to seconds or block other users.
        while not self._all_set(polled, deadline_s):
            if time.perf_counter() > deadline_s or enough():
                return tuple(rank for rank, key in keys.items() if not self._all_set([key]))
            if time.perf_counter() > next_check_s:
                check()
                next_check_s = time.perf_counter() + CHECK_INTERVAL_S
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        return ()

    def _all_set(self, keys: list[str], deadline_s: float = 0.0) -> bool:
        """Return True if all keys are set. Extends the time limit to `deadline_s` if later."""
        left_s = deadline_s - time.perf_counter()
        return (self.store.within(left_s) if left_s > REQUEST_S else self.store).check(keys)
