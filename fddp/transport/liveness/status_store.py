"""Exchange of rank statuses between processes, through the store of their job.

See [Note: rank status]. Queries and answers are stored by global rank in the store of the default
group, so that they cover all transports of a rank. Without a default group, the group's own store
is used.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fddp.core.protocol.messages import Schema, decode
from fddp.transport.lifetime import threads
from fddp.transport.liveness.bounded_store import (
    GLANCE_S,
    BoundedStore,
    StoreClientThread,
    client_of,
)
from fddp.transport.liveness.interrupts import ignore_backend_errors
from fddp.transport.liveness.processes import Process
from fddp.transport.liveness.status import RankStatus, StatusBoard, TransportStatus
from fddp.transport.torch_private import name_of, store_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_MIN_INTERVAL_S = 0.1  # between two polls
# Shorter than the two seconds of a wait for answers, if the store can serve all ranks that often.
_POLLS_PER_S, _LONG_INTERVAL_S, _MAX_INTERVAL_S = 1000, 1.0, 5.0
_POLLS_PER_TIMEOUT = 8
_END_S = 0.5  # longest wait for the end of the thread
# number of the query, key of a transport that the rank is about to close, and a `RankStatus`
_ANSWER: Schema = (int, str, [str], str, str, [str], [str])
_MAX_WAITS_SHOWN, _MAX_CHARS_SHOWN = 8, 1000  # of one rank's answer

_lock = threading.RLock()  # reentrant: a transport may be collected while another one is opened
_boards: weakref.WeakKeyDictionary[Any, StoreStatusBoard] = weakref.WeakKeyDictionary()
# Processes of ranks, by group whose store their board uses. They outlive the board.
_processes: weakref.WeakKeyDictionary[Any, dict[int, Process]] = weakref.WeakKeyDictionary()


class StoreStatusBoard(StatusBoard):
    """Statuses of rank `rank` of the `size` ranks of a job, exchanged through the job's store."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, client: StoreClientThread | None = None
    ) -> None:
        super().__init__()
        self._bounded = BoundedStore(store, client or StoreClientThread()).prefixed(
            "fddp/whereabouts"
        )
        self._store = self._bounded.raw
        self._rank = rank
        self._size = size
        self._timeouts_s: dict[TransportStatus, float] = {}
        self._responder: _StatusResponder | None = None

    def register(
        self, key: str, timeout_s: float
    ) -> tuple[TransportStatus, _StatusResponder | None]:
        """Register a transport; return its status and the thread that answers queries, if needed.

        The caller holds the lock.
        """
        status = self.open(key)
        self._timeouts_s[status] = timeout_s
        if self._size == 1:
            return status, None
        if self._responder is None or self._responder.ended:
            self._responder = _StatusResponder(self)
        shortest_s = min(tuple(self._timeouts_s.values()))
        self._responder.poll_interval_s = poll_interval_s(shortest_s, self._size)
        return status, self._responder

    def leave(self, status: TransportStatus) -> None:
        super().leave(status)
        responder = None
        with _lock:
            self._timeouts_s.pop(status, None)
            is_last = not self._timeouts_s
            if is_last:
                responder, self._responder = self._responder, None
                for host in [host for host, board in _boards.items() if board is self]:
                    del _boards[host]  # keep the store no longer than its groups do
        if responder is not None:
            responder.stop()
        if is_last:
            self._bounded.end()

    def query(self) -> int:
        """Request the status of all ranks and return the number of this query."""
        with ignore_backend_errors(ValueError):
            return self._bounded.within(GLANCE_S).add("questions", 1)
        return 0

    def publish(self, key: str) -> None:
        with ignore_backend_errors(ValueError):
            self.answer(self._bounded, _last_query(self._bounded), closes=key)

    def publish_abandoned(self, key: str) -> None:
        with ignore_backend_errors(ValueError):
            self._bounded.within(GLANCE_S).set(f"abandoned/{key}", "")

    def find_abandoned(self, keys: Sequence[str]) -> list[str]:
        store = self._bounded.within(GLANCE_S)
        with ignore_backend_errors(ValueError):
            return [key for key in keys if store.check([f"abandoned/{key}"])]
        return super().find_abandoned(keys)

    def answer(self, store: BoundedStore | dist.Store, query: int, *, closes: str = "") -> None:
        text = json.dumps([query, closes, *self.own_status()])
        store.set(f"answer/{self._rank}", text)

    def answers(
        self, ranks: Sequence[int], key: str, grace_s: float
    ) -> dict[int, RankStatus | None]:
        found: dict[int, RankStatus | None] = dict.fromkeys(ranks)
        deadline_s = time.perf_counter() + grace_s
        query = self.query()
        waiting = [rank for rank in ranks if rank != self._rank]
        if self._rank in found:
            found[self._rank] = self.own_status()
        with ignore_backend_errors():
            while waiting:
                waiting = [rank for rank in waiting if not self._read(rank, query, key, found)]
                if time.perf_counter() > deadline_s:
                    break
                time.sleep(0.02)
        return found

    def _read(self, rank: int, query: int, key: str, found: dict[int, RankStatus | None]) -> bool:
        """Return True if a rank has answered `query`, or has closed the transport `key`."""
        if not self._bounded.check([f"answer/{rank}"]):
            return False
        try:
            fields = decode(self._bounded.get(f"answer/{rank}"), _ANSWER)
        except ValueError:  # malformed
            found[rank] = None
            return True
        asked, closes, waits, last, at, transports, awaits = fields
        if asked < query and (not key or closes != key):
            return False
        shown = [_shown(text) for text in waits[:_MAX_WAITS_SHOWN]]
        found[rank] = RankStatus(
            tuple(shown), _shown(last), _shown(at), tuple(transports), tuple(awaits)
        )
        return True


class _StatusResponder:
    """A thread that polls for queries and answers them. It ends when the store is gone.

    It uses its own connection, because a blocking call may occupy the rank's connection.
    """

    def __init__(self, board: StoreStatusBoard) -> None:
        self.poll_interval_s = _MAX_INTERVAL_S
        self.ended = False  # True if the store is gone
        self._wake = threading.Event()  # the interval has changed, or the thread is to end
        self._board = weakref.ref(board)
        self._store = board._store
        self._stopped = self._started = False
        self._thread: threading.Thread | None = None

    def start_or_wake(self) -> None:
        """Start the thread, or apply a new interval. Do not hold the lock, see [Note: exits]."""
        with _lock:
            starts, self._started = not self._started and not self._stopped, True
        if not starts:
            self._wake.set()
            return
        try:
            self._thread = threads.start_thread(self._run, "fddp-status", self._end)
        except BaseException:
            self._started = False
            raise

    def stop(self) -> None:
        self._end()
        thread = self._thread
        if thread is not None and threading.current_thread() is not thread:
            thread.join(_END_S)

    def _end(self) -> None:
        self._stopped = True
        self._wake.set()

    def _run(self) -> None:
        answered, polled_s = -1, time.perf_counter()
        store: dist.Store | None = None
        while True:
            if not self._is_due(polled_s + self.poll_interval_s - time.perf_counter()):
                continue
            polled_s, board = time.perf_counter(), self._board()
            if self._stopped or board is None:
                return
            try:
                if store is None:
                    store = self._store.clone()  # type: ignore[attr-defined]
                query = _last_query(store)
                if query not in (0, answered):
                    board.answer(store, query)
                    answered = query
            except Exception:  # this connection failed, or the store is gone
                store = None
                self.ended = self._is_gone()
                if self.ended:
                    return
            del board

    def _is_gone(self) -> bool:
        """Return True if the rank's own connection has failed as well.

        A new connection to a store that is gone would block for minutes.
        """
        try:
            self._store.check(["questions"])
        except Exception:
            return True
        return False

    def _is_due(self, within_s: float) -> bool:
        """Wait for `within_s`; return True if a poll is due or the thread is to end."""
        if not self._wake.wait(max(within_s, 0.0)):
            return True
        self._wake.clear()
        return self._stopped


def poll_interval_s(timeout_s: float, size: int) -> float:
    """Return the interval of polls in seconds, given the shortest time limit of the transports.

    >>> [poll_interval_s(timeout_s, 8) for timeout_s in (0.5, 4.0, 1800.0)]
    [0.1, 0.5, 1.0]
    >>> [poll_interval_s(1800.0, size) for size in (1000, 3000, 30000)]
    [1.0, 3.0, 5.0]
    """
    most_s = min(max(size / _POLLS_PER_S, _LONG_INTERVAL_S), _MAX_INTERVAL_S)
    return min(max(timeout_s / _POLLS_PER_TIMEOUT, _MIN_INTERVAL_S), most_s)


def register(group: dist.ProcessGroup, timeout_s: float) -> tuple[TransportStatus, list[int]]:
    """Register a transport over `group`; return its status and its ranks' numbers on the board."""
    world = dist.group.WORLD if dist.is_initialized() else None
    members = dist.get_process_group_ranks(group)
    host, ranks = (world, members) if world is not None else (group, list(range(len(members))))
    with _lock:
        board = _boards.get(host)
        if board is None:
            rank, size = dist.get_rank(host), dist.get_world_size(host)
            board = _boards[host] = StoreStatusBoard(store_of(host), rank, size, client_of(group))
            board.processes = _processes.setdefault(host, {})
        # The group name distinguishes groups of the same ranks, and is the same on all ranks.
        name = hashlib.sha256(f"{members} of {name_of(group)!r}".encode()).hexdigest()[:16]
        status, responder = board.register(name, timeout_s)
    try:
        if responder is not None:
            responder.start_or_wake()
    except BaseException:
        board.leave(status)
        raise
    return status, ranks


def _shown(text: str) -> str:
    short = text if len(text) <= _MAX_CHARS_SHOWN else f"{text[:_MAX_CHARS_SHOWN]}..."
    return short if short.isprintable() else repr(short)


def _last_query(store: BoundedStore | dist.Store) -> int:
    """Number of the last query; 0 if there was none. Unlike `add`, this writes nothing."""
    return int(store.get("questions")) if store.check(["questions"]) else 0
