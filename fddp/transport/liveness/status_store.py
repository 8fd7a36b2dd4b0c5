"""Ranks as processes tell each other what they do, through the store of their job.

See [Note: rank status]. Questions and answers lie in the store of the default group, by global
ranks, so that a rank hears of the others whichever of their transports they are on. Where there is
no default group, a group's own store takes its place.
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
from fddp.transport.liveness.processes import Process, numbering, own_line, parsed
from fddp.transport.liveness.status import (
    QUERY_INTERVAL_S,
    RankStatus,
    StatusBoard,
    TransportStatus,
)
from fddp.transport.liveness.user_code import ignore_backend_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

_MIN_INTERVAL_S = 0.1  # from one look for questions to the next
# Less than the two seconds for which one waits for answers; but a store serves so many at a time.
_POLLS_PER_S, _LONG_INTERVAL_S, _MAX_INTERVAL_S = 1000, 1.0, 5.0
_PER_TIMEOUT = 8  # looks in the time that an operation may take
_ACTIVE_S = 2 * QUERY_INTERVAL_S  # how long a rank looks often, once it was asked
_ACTIVE_POLLS_PER_S = 10_000
_END_S = 0.5  # what the thread gets to end in order
_ANSWER: Schema = (
    int,
    bool,
    [str],
    str,
    str,
    [str],
)  # question, whether at the end, and a `RankStatus`
_MOST_WAITS, _MOST_CHARS = 8, 1000  # of one rank's answer that an error shows

_lock = threading.RLock()  # a transport may be collected while one is opened
_boards: weakref.WeakKeyDictionary[Any, StoreStatusBoard] = weakref.WeakKeyDictionary()
# Of groups in whose store this process is named: those of their ranks, when it answered last.
_known: weakref.WeakKeyDictionary[Any, dict[int, Process]] = weakref.WeakKeyDictionary()


class StoreStatusBoard(StatusBoard):
    """What this process does, told through a store.

    Args:
        store: that all ranks of the job share.
        rank: this rank's number in it.
        size: ranks of the job.
        client: that puts this process's questions to the store.
    """

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
        host = numbering()
        self._processes = f"processes/{host}" if host else ""  # where nobody can be looked for
        self.known: dict[int, Process] = {}  # of them, when the store answered last

    def publish_process(self) -> None:
        """Says, once in the life of the group, which process this is."""
        with ignore_backend_errors(ValueError):  # not every store can append
            if self._processes:
                self._bounded.append(self._processes, own_line(self._rank))

    def processes(self) -> dict[int, Process]:
        """Those of the ranks that this one can look for, as far as they have told."""
        store = self._bounded.within(GLANCE_S)
        with ignore_backend_errors(ValueError):
            if self._processes and store.check([self._processes]):
                self.known.update(parsed(store.get(self._processes).decode(errors="replace")))
        return self.known

    def register(
        self, key: str, timeout_s: float
    ) -> tuple[TransportStatus, _StatusResponder | None]:
        """The status of a transport that is being opened, and who answers for it, if anybody could
        ask; the caller has the lock."""
        status = self.open(key)
        self._timeouts_s[status] = timeout_s
        if self._size == 1:
            return status, None
        if self._responder is None or self._responder.ended:
            self._responder = _StatusResponder(self)
        shortest_s = min(tuple(self._timeouts_s.values()))
        self._responder.poll_interval_s = poll_interval_s(shortest_s, self._size)
        self._responder.active_poll_interval_s = active_poll_interval_s(shortest_s, self._size)
        return status, self._responder

    def leave(self, status: TransportStatus) -> None:
        super().leave(status)
        responder = None
        with _lock:
            self._timeouts_s.pop(status, None)
            if not self._timeouts_s:
                responder, self._responder = self._responder, None
                for host in [host for host, board in _boards.items() if board is self]:
                    del _boards[host]  # the store is not to be held for longer than groups hold it
        if responder is not None:
            responder.stop()

    def query(self) -> int:
        with ignore_backend_errors(ValueError):
            return self._bounded.within(GLANCE_S).add("questions", 1)
        return 0

    def publish(self) -> None:
        with ignore_backend_errors(ValueError):
            self.answer(self._bounded, _question(self._bounded), ended=True)

    def publish_abandoned(self, key: str) -> None:
        with ignore_backend_errors(ValueError):
            self._bounded.within(GLANCE_S).set(f"abandoned/{key}", "")

    def find_abandoned(self, keys: Sequence[str]) -> list[str]:
        store = self._bounded.within(GLANCE_S)
        with ignore_backend_errors(ValueError):
            return [key for key in keys if store.check([f"abandoned/{key}"])]
        return super().find_abandoned(keys)

    def answer(
        self, store: BoundedStore | dist.Store, question: int, *, ended: bool = False
    ) -> None:
        """Puts what this rank does where the others look for it."""
        text = json.dumps([question, ended, *self.own_status()])
        store.set(f"answer/{self._rank}", text)

    def answers(
        self, ranks: Sequence[int], since: int, grace_s: float
    ) -> dict[int, RankStatus | None]:
        found: dict[int, RankStatus | None] = dict.fromkeys(ranks)
        deadline_s = time.perf_counter() + grace_s
        question = self.query()
        waiting = [rank for rank in ranks if rank != self._rank]
        if self._rank in found:
            found[self._rank] = self.own_status()
        with ignore_backend_errors():
            while waiting:
                waiting = [rank for rank in waiting if not self._read(rank, question, since, found)]
                if time.perf_counter() > deadline_s:
                    break
                time.sleep(0.02)
        return found

    def _read(
        self, rank: int, question: int, since: int, found: dict[int, RankStatus | None]
    ) -> bool:
        """Whether a rank has answered, or has said where it ended."""
        if not self._bounded.check([f"answer/{rank}"]):
            return False
        try:
            fields = decode(self._bounded.get(f"answer/{rank}"), _ANSWER)
        except ValueError:  # no answer that makes sense
            found[rank] = None
            return True
        asked, ended, waits, last, at, transports = fields
        if asked < question and not (ended and since and asked >= since):
            return False
        shown = [_shown(text) for text in waits[:_MOST_WAITS]]
        found[rank] = RankStatus(tuple(shown), _shown(last), _shown(at), tuple(transports))
        return True


class _StatusResponder:
    """A thread that looks for questions and answers them; ends by itself where the store does.

    It has a connection of its own, because the rank's may be taken by a call that waits.

    Attributes:
        poll_interval_s: from one look to the next.
        active_poll_interval_s: the same once it was asked.
        ended: whether the store is gone.
    """

    def __init__(self, board: StoreStatusBoard) -> None:
        self.poll_interval_s = self.active_poll_interval_s = _MAX_INTERVAL_S
        self.ended = False
        self._wake = threading.Event()  # to look anew how long to pause, or to end
        self._board = weakref.ref(board)
        self._store = board._store
        self._stopped = self._started = False
        self._thread: threading.Thread | None = None

    def start_or_wake(self) -> None:
        """Starts it, or tells it of another pause. Not under the lock, see [Note: exits]."""
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
        answered, active_until_s, polled_s = -1, 0.0, time.perf_counter()
        store: dist.Store | None = None
        while True:
            now_s = time.perf_counter()
            interval_s = (
                self.active_poll_interval_s if now_s < active_until_s else self.poll_interval_s
            )
            if not self._is_due(polled_s + interval_s - now_s):
                continue
            polled_s, board = time.perf_counter(), self._board()
            if self._stopped or board is None:
                return
            try:
                if store is None:
                    store = self._store.clone()  # type: ignore[attr-defined]
                question = _question(store)
                if question not in (0, answered):
                    board.answer(store, question)
                    answered, board.last_query_s = question, time.perf_counter()
                    active_until_s = board.last_query_s + _ACTIVE_S
            except Exception:  # of this connection, or the store is gone with whoever could ask
                store = None
                self.ended = self._is_gone()
                if self.ended:
                    return
            del board

    def _is_gone(self) -> bool:
        """Whether the store is, by the rank's own connection. To connect anew where nobody listens
        would take minutes."""
        try:
            self._store.check(["questions"])
        except Exception:
            return True
        return False

    def _is_due(self, within_s: float) -> bool:
        """Waits so long, or until it is told something; whether it is time to look, or the end."""
        if not self._wake.wait(max(within_s, 0.0)):
            return True
        self._wake.clear()
        return self._stopped


def poll_interval_s(timeout_s: float, size: int) -> float:
    """How long a rank pauses from one look for questions to the next.

    Args:
        timeout_s: the shortest time limit of its transports.
        size: ranks of the job.

    >>> [poll_interval_s(timeout_s, 8) for timeout_s in (0.5, 4.0, 1800.0)]
    [0.1, 0.5, 1.0]
    >>> [poll_interval_s(1800.0, size) for size in (1000, 3000, 30000)]
    [1.0, 3.0, 5.0]
    """
    most_s = min(max(size / _POLLS_PER_S, _LONG_INTERVAL_S), _MAX_INTERVAL_S)
    return min(max(timeout_s / _PER_TIMEOUT, _MIN_INTERVAL_S), most_s)


def active_poll_interval_s(timeout_s: float, size: int) -> float:
    """The same once it was asked.

    >>> [active_poll_interval_s(1800.0, size) for size in (8, 5000)]
    [0.1, 0.5]
    """
    return min(max(size / _ACTIVE_POLLS_PER_S, _MIN_INTERVAL_S), poll_interval_s(timeout_s, size))


def register(group: dist.ProcessGroup, timeout_s: float) -> tuple[TransportStatus, list[int]]:
    """The status of a transport over `group`, and the numbers of its ranks on the board."""
    world = dist.group.WORLD if dist.is_initialized() else None
    members = dist.get_process_group_ranks(group)
    host, ranks = (world, members) if world is not None else (group, list(range(len(members))))
    with _lock:
        board, is_new = _boards.get(host), host not in _known
        if board is None:
            rank, size = dist.get_rank(host), dist.get_world_size(host)
            board = _boards[host] = StoreStatusBoard(
                host.get_group_store(), rank, size, client_of(group)
            )
            board.known = _known.setdefault(host, {})
        # Groups of the same ranks have names of their own, the same on all ranks.
        name = hashlib.sha256(f"{members} of {group.group_name!r}".encode()).hexdigest()[:16]
        status, responder = board.register(name, timeout_s)
    try:
        if is_new:
            board.publish_process()
        if responder is not None:
            responder.start_or_wake()
    except BaseException:
        board.leave(status)
        raise
    return status, ranks


def _shown(text: str) -> str:
    """What a rank says, as part of an error."""
    short = text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..."
    return short if short.isprintable() else repr(short)


def _question(store: BoundedStore | dist.Store) -> int:
    """Number of the last question; 0 if there was none. Writes nothing, which `add` would."""
    return int(store.get("questions")) if store.check(["questions"]) else 0
