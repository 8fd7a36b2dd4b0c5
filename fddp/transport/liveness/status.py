"""Status of each rank (current wait, last operation), reported in errors of other ranks.

[Note: rank status] A waiting rank does not know what the other ranks do instead. Each rank records
its current wait and its last finished operation on each transport, as references to existing
strings. Nothing is published unless requested. A rank publishes a query once its operation has
failed. A thread of every rank polls for queries and answers them, also while the rank computes. A
rank that closes a transport because of a failure publishes its status for the others, whose
operations may fail later. The error then includes the status of the ranks, on any transport of the
job.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from fddp.telemetry.call_site import own_lines
from fddp.transport.liveness.processes import Process

MAX_RANKS_SHOWN = 16  # per error, so that ten thousand ranks may fail at the same time
_STEP_FAILURE_S = 1.0  # within which all ranks notice a failed step; they check every 0.25 s


class RankStatus(NamedTuple):
    """Status of one rank.

    Attributes:
        waits: operations that it waits for.
        last: operation that it finished or abandoned last; empty if there was none.
        at: current line of its main thread, and its callers.
        transports: keys of its open transports.
        awaits: keys of the transports of `waits`.
    """

    waits: tuple[str, ...] = ()
    last: str = ""
    at: str = ""
    transports: tuple[str, ...] = ()
    awaits: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Format the status, to follow the rank's name.

        >>> str(RankStatus(("bucket 0 of step 9 of GradSync #2",), at="train.py:8 in main"))
        'waiting for bucket 0 of step 9 of GradSync #2'
        >>> str(RankStatus((), "bucket 0 of step 8 of GradSync #2", "data.py:3 in load"))
        'at data.py:3 in load, after bucket 0 of step 8 of GradSync #2'
        """
        if self.waits:
            return f"waiting for {' and for '.join(self.waits)}"
        where = f"at {self.at}, " if self.at else ""
        return f"{where}{f'after {self.last}' if self.last else 'with nothing finished yet'}"


def format_statuses(statuses: Mapping[str, RankStatus | None]) -> str:
    """Format the statuses of ranks, grouped by status. None stands for a rank without an answer.

    >>> waits = RankStatus(("a sum",))
    >>> format_statuses({"rank 0": waits, "rank 1": None, "rank 2": waits})
    'rank 0, rank 2: waiting for a sum; rank 1: no answer'
    """
    names: dict[str, list[str]] = {}
    for name, status in statuses.items():
        text = "no answer" if status is None else str(status)
        names.setdefault(text, []).append(name)
    return "; ".join(f"{', '.join(ranks)}: {text}" for text, ranks in names.items())


class PendingWait(NamedTuple):
    """A long wait of a thread."""

    what: str
    thread: int


class TransportStatus:
    """Status of one rank on one transport.

    Attributes:
        label: name of the transport in error texts ("GradSync #1"); may be empty.
        key: identifier of the transport, the same on all its ranks and unique in the job.
        waits: current wait, once it takes long.
        done: operation that was finished last.
        in_step: number of the step in whose loss function this rank is, or None.
        read_step_failure: returns the reported failure of a step, or None.
        close: closes the transport if a rank abandoned it within a call; None if not supported.
    """

    __slots__ = (
        "__weakref__",
        "board",
        "close",
        "done",
        "in_step",
        "key",
        "label",
        "read_step_failure",
        "waits"
    )  # fmt: skip

    def __init__(self, board: StatusBoard, key: str) -> None:
        self.board = board
        self.label = ""
        self.key = key
        self.waits: PendingWait | None = None
        self.done = ""
        self.in_step: int | None = None
        self.read_step_failure: Callable[[int], str | None] = lambda step: None
        self.close: Callable[[], None] | None = None

    def begin(self, what: str) -> None:
        """Record that this rank is blocked on `what`."""
        if self.waits is None:
            self.waits = PendingWait(what, threading.get_ident())

    def finish(self, what: str) -> None:
        self.done = what
        self.board.last = self
        if self.waits is not None:
            self.waits = None

    def fail(self, what: str) -> None:
        self.board.gave_up = f"giving up {self.named(what)}"
        self.waits = None
        if self.close is not None:
            self.board.abandoned[self.key] = self
            self.board.publish_abandoned(self.key)

    def named(self, what: str) -> str:
        return f"{what} of {self.label}" if self.label else what


class StatusBoard:
    """Statuses of one rank on all its transports.

    The base class has no other ranks to communicate with.

    Attributes:
        last: status of the transport on which an operation was finished last.
        gave_up: the last failed operation; cleared when a transport is opened.
        abandoned: statuses by key of transports that a failure has closed here, and that other
            ranks may consider open.
        processes: by rank, processes that have proved to run on this host.
        interrupted_s: time of the last interrupted step, by `time.perf_counter`. None once the
            transports that other ranks abandoned in it are closed.
    """

    def __init__(self) -> None:
        self._statuses: weakref.WeakSet[TransportStatus] = weakref.WeakSet()
        self.last: TransportStatus | None = None
        self.gave_up = ""
        self.abandoned: dict[str, TransportStatus] = {}
        self.processes: dict[int, Process] = {}
        self.interrupted_s: float | None = None

    @property
    def open_statuses(self) -> list[TransportStatus]:
        """Statuses of open transports; other threads may open and close transports meanwhile."""
        while True:
            try:
                return list(self._statuses)
            except RuntimeError as error:
                if "changed size" not in str(error):
                    raise

    def open(self, key: str) -> TransportStatus:
        status = TransportStatus(self, key)
        self._statuses.add(status)
        self.gave_up = ""
        return status

    def leave(self, status: TransportStatus) -> None:
        """Remove the status of a transport that was closed or collected."""
        self._statuses.discard(status)
        if self.last is status and not self.gave_up:
            self.gave_up = status.named(status.done)
        if self.last is status:
            self.last = None

    def own_status(self, main_thread: int | None = None) -> RankStatus:
        """Return the current status of this rank, with the current line of `main_thread`; None for
        the process's main thread."""
        waits, awaits = [], []
        statuses = self.open_statuses
        for status in statuses:
            wait = status.waits
            if wait is not None:
                waits.append(f"{status.named(wait.what)}{_called(wait.what, line_of(wait.thread))}")
                awaits.append(status.key)
        last = self.last
        done = last.named(last.done) if last is not None and last.done else ""
        ident = threading.main_thread().ident if main_thread is None else main_thread
        keys = tuple(status.key for status in statuses)
        at = line_of(ident)
        return RankStatus(tuple(sorted(waits)), self.gave_up or done, at, keys, tuple(awaits))

    def step_failure(self, own: TransportStatus) -> str | None:
        """Return the failure of another rank, in a step in whose loss function this rank is, that
        prevents operations on `own`; or None."""
        for status in self.open_statuses:
            if status is not own and status.in_step is not None:
                failure = status.read_step_failure(status.in_step)
                if failure is not None:
                    return f"{failure} in step {status.in_step} of {status.label or 'its sync'}"
        return None

    def close_abandoned(self, keys: Collection[str]) -> None:
        """Close the transports with these keys, which some rank has abandoned within a call."""
        for status in [*self.open_statuses, *self.abandoned.values()]:
            if status.key in keys and status.close is not None:
                status.close()
        for key in keys:
            self.abandoned.pop(key, None)

    def close_abandoned_in_interrupted_step(self) -> None:
        """Close the transports that some rank has abandoned within a call of an interrupted step.

        Ranks could not exchange the keys of these transports in that step. A rank that waited in
        such a call notices the end of the step later than the others.
        """
        if self.interrupted_s is None:
            return
        until_s, self.interrupted_s = self.interrupted_s + _STEP_FAILURE_S, None
        statuses = [status for status in self.open_statuses if status.close is not None]
        keys = [*(status.key for status in statuses), *self.abandoned]
        found = self.find_abandoned(keys)
        while keys and not found and time.perf_counter() < until_s:
            time.sleep(0.02)
            found = self.find_abandoned(keys)
        self.close_abandoned(found)

    # Communication with other ranks, implemented in subclasses

    def publish_abandoned(self, key: str) -> None:
        """Report that this rank has abandoned a transport within a call."""

    def find_abandoned(self, keys: Sequence[str]) -> list[str]:
        """Return those of `keys` that some rank has reported as abandoned."""
        return [key for key in keys if key in self.abandoned]

    def publish(self, key: str) -> None:
        """Publish the status of this rank before it closes the transport with this key because of a
        failure."""

    def answers(
        self, ranks: Sequence[int], key: str, grace_s: float
    ) -> dict[int, RankStatus | None]:
        """Query ranks of the job and return their statuses, None for those without an answer.

        Args:
            ranks: their numbers in the job.
            key: a transport; what ranks published before they closed it counts as their answer.
            grace_s: longest wait for all answers, in seconds.
        """
        return {}


def line_of(thread: int | None) -> str:
    return own_lines(sys._current_frames().get(thread or 0))


def _called(what: str, lines: str) -> str:
    """Return the suffix that adds call sites to the description of an operation.

    Descriptions of operators already name the innermost call site, so only its callers are added.
    In a backward pass the call sites differ, and nothing is added.

    >>> _called("bucket 0 of step 9", "sums.py:3 in mean, from train.py:8 in main")
    ', called at sums.py:3 in mean, from train.py:8 in main'
    >>> _called("psum of 1 leaf, called at sums.py:3", "sums.py:3 in mean, from train.py:8 in main")
    ', from train.py:8 in main'
    >>> _called("backward of psum, called at sums.py:3", "train.py:9 in main, from run.py:2 in run")
    ''
    """
    if "called at" not in what:
        return f", called at {lines}" if lines else ""
    first, _, outer = lines.partition(", from ")
    is_first = what.endswith(f"called at {first.rpartition(' in ')[0]}")
    return f", from {outer}" if outer and is_first else ""
