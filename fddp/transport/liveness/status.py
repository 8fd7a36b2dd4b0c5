"""What each rank is waiting for or did last, for the errors of those who wait in vain.

[Note: rank status] A rank that waits knows what it waits for, and not what the others do instead.
So each rank keeps in mind what it is waiting for and what it finished last, on each of its
transports: a reference to a text that exists anyway. Nothing is told in the good case. A rank that
has waited for a quarter of its time limit, or whose operation has failed, asks; a thread of every
rank looks for questions now and then, and answers, also while its rank computes. Threads that were
asked look more often for a while, and ranks that go on waiting ask again, so that there are answers
soon when the time is over. Where the ranks are is then part of the error, whichever transports of
the job they are on.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fddp.telemetry.call_site import own_lines
from fddp.transport.liveness.processes import Process

MOST_RANKS = 16  # that one error tells of, so that ten thousand ranks may fail at a time
_HEARS_WITHIN_S = 1.0  # in which ranks hear that their step has failed: they look every 0.25 s
QUERY_INTERVAL_S = 5.0  # from one question of a rank that waits for long to its next


class RankStatus(NamedTuple):
    """What one rank says of itself.

    Attributes:
        waits: what it waits for; none if it waits for nothing.
        last: what it finished last, or gave up; empty if there was nothing yet.
        at: the line of its main thread, and the lines that called it.
        transports: keys of those that are open there.
    """

    waits: tuple[str, ...] = ()
    last: str = ""
    at: str = ""
    transports: tuple[str, ...] = ()

    def __str__(self) -> str:
        """What goes behind the rank's name.

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
    """What ranks do, those together that do the same; None for a rank that does not answer.

    >>> waits = RankStatus(("a sum",))
    >>> format_statuses({"rank 0": waits, "rank 1": None, "rank 2": waits})
    'rank 0, rank 2: waiting for a sum; rank 1: no answer'
    """
    names: dict[str, list[str]] = {}
    for name, status in statuses.items():
        text = "no answer" if status is None else str(status)
        names.setdefault(text, []).append(name)
    return "; ".join(f"{', '.join(who)}: {text}" for text, who in names.items())


class TransportStatus:
    """What one rank does on one transport.

    Attributes:
        label: the transport in the user's words ("GradSync #1"); empty for those without a name.
        key: the same for this transport on all its ranks, and for no other of the job.
        waits: what is being waited for, once that takes long.
        done: what was finished last.
        in_step: number of the step in whose loss function this rank is, or None.
        close: closes the transport, where ranks may do so that left it half way through a call.
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
        self.waits: _PendingWait | None = None
        self.done = ""
        self.in_step: int | None = None
        self.read_step_failure: Callable[[int], str | None] = _no_step_failure
        self.close: Callable[[], None] | None = None

    def begin(self, what: str) -> _PendingWait:
        """A wait takes long."""
        wait = self.waits
        if wait is None:
            wait = self.waits = _PendingWait(what, threading.get_ident())
        return wait

    @property
    def since(self) -> int:
        """Number of the first question that was put in the present wait; 0 if there was none."""
        wait = self.waits
        return 0 if wait is None else wait.since

    def finish(self, what: str) -> None:
        """An operation is done."""
        self.done = what
        self.board.last = self
        if self.waits is not None:
            self.waits = None

    def fail(self, what: str) -> None:
        """An operation has failed, and with it the transport."""
        self.board.gave_up = f"giving up {self.named(what)}"
        self.waits = None
        if self.close is not None:
            self.board.abandoned[self.key] = self
            self.board.publish_abandoned(self.key)

    def named(self, what: str) -> str:
        return f"{what} of {self.label}" if self.label else what


class _PendingWait:
    """One wait that takes long.

    Attributes:
        since: number of the first question that was put for it; 0 if there was none.
    """

    __slots__ = ("_queried_s", "since", "thread", "what")

    def __init__(self, what: str, thread: int) -> None:
        self.what = what
        self.thread = thread
        self.since = 0
        self._queried_s = 0.0

    def query(self, board: StatusBoard, now_s: float) -> None:
        """Ask, unless that was done lately."""
        if not self.since:
            self.since = board.query()
        elif now_s - max(self._queried_s, board.last_query_s) > QUERY_INTERVAL_S:
            board.query()
        else:
            return
        self._queried_s = now_s


class StatusBoard:
    """What one rank does on all its transports, as far as this rank knows itself.

    Attributes:
        last: that on which an operation was finished last.
        gave_up: the last operation that failed; empty once another transport was opened.
        last_query_s: when a question was heard last, by `time.perf_counter`.
        abandoned: transports by their keys that a failure has closed here, and that others may
            still take for open.
        doubtful_s: when a step was last left half done here, by `time.perf_counter`, until what
            other ranks have abandoned in it is closed; None where there is nothing to look for.
    """

    def __init__(self) -> None:
        self._statuses: weakref.WeakSet[TransportStatus] = (
            weakref.WeakSet()
        )  # of transports that are open
        self.last: TransportStatus | None = None
        self.gave_up = ""
        self.last_query_s = float("-inf")
        self.abandoned: dict[str, TransportStatus] = {}
        self.doubtful_s: float | None = None

    @property
    def open_statuses(self) -> list[TransportStatus]:
        """Those of the transports that are open now; other threads may open and close some."""
        while True:
            try:
                return list(self._statuses)
            except RuntimeError as error:  # another thread has just opened or closed one
                if "changed size" not in str(error):
                    raise

    def open(self, key: str) -> TransportStatus:
        """The status of a transport that has been opened."""
        status = TransportStatus(self, key)
        self._statuses.add(status)
        self.gave_up = ""
        return status

    def leave(self, status: TransportStatus) -> None:
        """Its transport is closed, or gone."""
        self._statuses.discard(status)
        if self.last is status and not self.gave_up:
            self.gave_up = status.named(status.done)
        if self.last is status:
            self.last = None

    def own_status(self, main_thread: int | None = None) -> RankStatus:
        """What this rank does right now.

        Args:
            main_thread: identifies the thread whose line is told; None for the process's own.
        """
        waits = []
        statuses = self.open_statuses
        for status in statuses:
            wait = status.waits
            if wait is not None:
                waits.append(f"{status.named(wait.what)}{_called(wait.what, line_of(wait.thread))}")
        last = self.last
        done = last.named(last.done) if last is not None and last.done else ""
        ident = threading.main_thread().ident if main_thread is None else main_thread
        keys = tuple(status.key for status in statuses)
        return RankStatus(tuple(sorted(waits)), self.gave_up or done, line_of(ident), keys)

    def step_failure(self, own: TransportStatus) -> str | None:
        """Why an operation on `own` will never be, in words: this rank is in the loss function of a
        step in which another rank has failed, and which fails on all ranks for that."""
        for status in self.open_statuses:
            if status is not own and status.in_step is not None:
                failure = status.read_step_failure(status.in_step)
                if failure is not None:
                    return f"{failure} in step {status.in_step} of {status.label or 'its sync'}"
        return None

    def close_abandoned(self, keys: Sequence[str]) -> None:
        """Closes the transports that any rank has left half way through a call."""
        for status in [*self.open_statuses, *self.abandoned.values()]:
            if status.key in keys and status.close is not None:
                status.close()
        for key in keys:
            self.abandoned.pop(key, None)

    def close_abandoned_communicators(self) -> None:
        """Closes the transports that any rank has left half way through a call, in a step that was
        left half done on all of them: they could not exchange which these are.

        A rank that waits in such a call hears of the step's end somewhat later than the others.
        """
        if self.doubtful_s is None:
            return
        until_s, self.doubtful_s = self.doubtful_s + _HEARS_WITHIN_S, None
        statuses = [status for status in self.open_statuses if status.close is not None]
        keys = [*(status.key for status in statuses), *self.abandoned]
        found = self.find_abandoned(keys)
        while keys and not found and time.perf_counter() < until_s:
            time.sleep(0.02)
            found = self.find_abandoned(keys)
        self.close_abandoned(found)

    # What follows is told to the others; alone there is nobody to tell.

    def processes(self) -> dict[int, Process]:
        """Processes of ranks of the job that this one can look for."""
        return {}

    def publish_abandoned(self, key: str) -> None:
        """Says that this rank has left a transport half way through a call."""

    def find_abandoned(self, keys: Sequence[str]) -> list[str]:
        """Those of these transports of which any rank has said so."""
        return [key for key in keys if key in self.abandoned]

    def query(self) -> int:
        """Makes the others say what they do; the number of the question."""
        return 0

    def publish(self) -> None:
        """Says what this rank does, which is about to end a transport."""

    def answers(
        self, ranks: Sequence[int], since: int, grace_s: float
    ) -> dict[int, RankStatus | None]:
        """What ranks of the job do, once they were asked, waiting at most `grace_s` for them.

        Args:
            ranks: their numbers in the job.
            since: number of a question; what ranks that gave up have said since then counts.
            grace_s: seconds.
        """
        return {}


def line_of(thread: int | None) -> str:
    """Where a thread of this process is in the user's code, and who called that; empty where that
    can't be told."""
    return own_lines(sys._current_frames().get(thread or 0))


def _called(what: str, lines: str) -> str:
    """What goes behind an operation, of the lines from which it was called. Operators name the
    first of them: behind these goes what called that, unless they run in a backward pass.

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


def _no_step_failure(step: int) -> str | None:
    return None
