"""Ranks as processes tell each other what they do, through the store of their job.

See [Note: whereabouts]. Questions and answers lie in the store of the default group, by global
ranks, so that a rank hears of the others whichever of their transports they are on. Where there is
no default group, a group's own store takes its place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fddp.core.protocol.messages import Schema, decode
from fddp.transport.lifetime import threads
from fddp.transport.liveness.bounded_store import GLANCE_S, AskedStore, Asker, asker_of
from fddp.transport.liveness.processes import Process, numbering, own_line, parsed
from fddp.transport.liveness.status import ASK_AGAIN_S, Desk, Doing, Slot

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEAST_PAUSE_S = 0.1  # from one look for questions to the next
# Less than the two seconds for which one waits for answers; but a store serves so many at a time.
_LOOKS_PER_S, _LONG_PAUSE_S, _LONGEST_PAUSE_S = 1000, 1.0, 5.0
_PER_TIMEOUT = 8  # looks in the time that an operation may take
_AWAKE_S = 2 * ASK_AGAIN_S  # how long a rank looks often, once it was asked
_AWAKE_LOOKS_PER_S = 10_000
_END_S = 0.5  # what the thread gets to end in order
_ANSWER: Schema = (int, bool, [str], str, str, [str])  # question, whether at the end, and a `Doing`
_MOST_WAITS, _MOST_CHARS = 8, 1000  # of one rank's answer that an error shows

_lock = threading.RLock()  # a transport may be collected while one is opened
_desks: weakref.WeakKeyDictionary[Any, StoreDesk] = weakref.WeakKeyDictionary()
# Of groups in whose store this process is named: those of their ranks, when it answered last.
_known: weakref.WeakKeyDictionary[Any, dict[int, Process]] = weakref.WeakKeyDictionary()


class StoreDesk(Desk):
    """What this process does, told through a store.

    Args:
        store: that all ranks of the job share.
        rank: this rank's number in it.
        size: ranks of the job.
        asker: that puts this process's questions to the store.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, asker: Asker | None = None) -> None:
        super().__init__()
        self._asked = AskedStore(store, asker or Asker()).part("fddp/whereabouts")
        self._store = self._asked.raw
        self._rank = rank
        self._size = size
        self._timeouts_s: dict[Slot, float] = {}
        self._clerk: _Clerk | None = None
        host = numbering()
        self._processes = f"processes/{host}" if host else ""  # where nobody can be looked for
        self.known: dict[int, Process] = {}  # of them, when the store answered last

    def tell_process(self) -> None:
        """Says, once in the life of the group, which process this is."""
        with contextlib.suppress(RuntimeError, ValueError):  # not every store can append
            if self._processes:
                self._asked.append(self._processes, own_line(self._rank))

    def processes(self) -> dict[int, Process]:
        """Those of the ranks that this one can look for, as far as they have told."""
        store = self._asked.within(GLANCE_S)
        with contextlib.suppress(RuntimeError, ValueError):
            if self._processes and store.check([self._processes]):
                self.known.update(parsed(store.get(self._processes).decode(errors="replace")))
        return self.known

    def enter(self, key: str, timeout_s: float) -> tuple[Slot, _Clerk | None]:
        """A slot for a transport that is being opened, and who answers for it, if anybody could
        ask; the caller has the lock."""
        slot = self.open(key)
        self._timeouts_s[slot] = timeout_s
        if self._size == 1:
            return slot, None
        if self._clerk is None or self._clerk.ended:
            self._clerk = _Clerk(self)
        shortest_s = min(tuple(self._timeouts_s.values()))
        self._clerk.pause_s = pause_s(shortest_s, self._size)
        self._clerk.awake_pause_s = awake_pause_s(shortest_s, self._size)
        return slot, self._clerk

    def leave(self, slot: Slot) -> None:
        super().leave(slot)
        clerk = None
        with _lock:
            self._timeouts_s.pop(slot, None)
            if not self._timeouts_s:
                clerk, self._clerk = self._clerk, None
                for host in [host for host, desk in _desks.items() if desk is self]:
                    del _desks[host]  # the store is not to be held for longer than groups hold it
        if clerk is not None:
            clerk.stop()

    def ask(self) -> int:
        with contextlib.suppress(RuntimeError, ValueError):
            return self._asked.within(GLANCE_S).add("questions", 1)
        return 0

    def tell(self) -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            self.answer(self._asked, _question(self._asked), ended=True)

    def tell_abandoned(self, key: str) -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            self._asked.within(GLANCE_S).set(f"abandoned/{key}", "")

    def told_abandoned(self, keys: Sequence[str]) -> list[str]:
        store = self._asked.within(GLANCE_S)
        with contextlib.suppress(RuntimeError, ValueError):
            return [key for key in keys if store.check([f"abandoned/{key}"])]
        return super().told_abandoned(keys)

    def answer(self, store: AskedStore | dist.Store, question: int, *, ended: bool = False) -> None:
        """Puts what this rank does where the others look for it."""
        told = json.dumps([question, ended, *self.doing()])
        store.set(f"answer/{self._rank}", told)

    def answers(self, ranks: Sequence[int], since: int, grace_s: float) -> dict[int, Doing | None]:
        found: dict[int, Doing | None] = dict.fromkeys(ranks)
        deadline_s = time.perf_counter() + grace_s
        question = self.ask()
        waiting = [rank for rank in ranks if rank != self._rank]
        if self._rank in found:
            found[self._rank] = self.doing()
        with contextlib.suppress(RuntimeError):
            while waiting:
                waiting = [rank for rank in waiting if not self._read(rank, question, since, found)]
                if time.perf_counter() > deadline_s:
                    break
                time.sleep(0.02)
        return found

    def _read(self, rank: int, question: int, since: int, found: dict[int, Doing | None]) -> bool:
        """Whether a rank has answered, or has said where it ended."""
        if not self._asked.check([f"answer/{rank}"]):
            return False
        try:
            told = decode(self._asked.get(f"answer/{rank}"), _ANSWER)
        except ValueError:  # no answer that makes sense
            found[rank] = None
            return True
        asked, ended, waits, last, at, transports = told
        if asked < question and not (ended and since and asked >= since):
            return False
        shown = [_shown(text) for text in waits[:_MOST_WAITS]]
        found[rank] = Doing(tuple(shown), _shown(last), _shown(at), tuple(transports))
        return True


class _Clerk:
    """A thread that looks for questions and answers them; ends by itself where the store does.

    It has a connection of its own, because the rank's may be taken by a call that waits.

    Attributes:
        pause_s: from one look to the next.
        awake_pause_s: the same once it was asked.
        ended: whether the store is gone.
    """

    def __init__(self, desk: StoreDesk) -> None:
        self.pause_s = self.awake_pause_s = _LONGEST_PAUSE_S
        self.ended = False
        self._told = threading.Event()  # to look anew how long to pause, or to end
        self._desk = weakref.ref(desk)
        self._store = desk._store
        self._stopped = self._started = False
        self._thread: threading.Thread | None = None

    def look_anew(self) -> None:
        """Starts it, or tells it of another pause. Not under the lock, see [Note: exits]."""
        with _lock:
            starts, self._started = not self._started and not self._stopped, True
        if not starts:
            self._told.set()
            return
        try:
            self._thread = threads.start(self._run, "fddp-whereabouts", self._end)
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
        self._told.set()

    def _run(self) -> None:
        heard, awake_until_s, looked_s = -1, 0.0, time.perf_counter()
        store: dist.Store | None = None
        while True:
            now_s = time.perf_counter()
            pause_s = self.awake_pause_s if now_s < awake_until_s else self.pause_s
            if not self._is_due(looked_s + pause_s - now_s):
                continue
            looked_s, desk = time.perf_counter(), self._desk()
            if self._stopped or desk is None:
                return
            try:
                if store is None:
                    store = self._store.clone()  # type: ignore[attr-defined]
                question = _question(store)
                if question not in (0, heard):
                    desk.answer(store, question)
                    heard, desk.heard_s = question, time.perf_counter()
                    awake_until_s = desk.heard_s + _AWAKE_S
            except Exception:  # of this connection, or the store is gone with whoever could ask
                store = None
                self.ended = self._is_gone()
                if self.ended:
                    return
            del desk

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
        if not self._told.wait(max(within_s, 0.0)):
            return True
        self._told.clear()
        return self._stopped


def pause_s(timeout_s: float, size: int) -> float:
    """How long a rank pauses from one look for questions to the next.

    Args:
        timeout_s: the shortest time limit of its transports.
        size: ranks of the job.

    >>> [pause_s(timeout_s, 8) for timeout_s in (0.5, 4.0, 1800.0)]
    [0.1, 0.5, 1.0]
    >>> [pause_s(1800.0, size) for size in (1000, 3000, 30000)]
    [1.0, 3.0, 5.0]
    """
    most_s = min(max(size / _LOOKS_PER_S, _LONG_PAUSE_S), _LONGEST_PAUSE_S)
    return min(max(timeout_s / _PER_TIMEOUT, _LEAST_PAUSE_S), most_s)


def awake_pause_s(timeout_s: float, size: int) -> float:
    """The same once it was asked.

    >>> [awake_pause_s(1800.0, size) for size in (8, 5000)]
    [0.1, 0.5]
    """
    return min(max(size / _AWAKE_LOOKS_PER_S, _LEAST_PAUSE_S), pause_s(timeout_s, size))


def enter(group: dist.ProcessGroup, timeout_s: float) -> tuple[Slot, list[int]]:
    """A slot for a transport over `group`, and the numbers of its ranks at the desk."""
    world = dist.group.WORLD if dist.is_initialized() else None
    members = dist.get_process_group_ranks(group)
    host, ranks = (world, members) if world is not None else (group, list(range(len(members))))
    with _lock:
        desk, is_new = _desks.get(host), host not in _known
        if desk is None:
            rank, size = dist.get_rank(host), dist.get_world_size(host)
            desk = _desks[host] = StoreDesk(host.get_group_store(), rank, size, asker_of(group))
            desk.known = _known.setdefault(host, {})
        # Groups of the same ranks have names of their own, the same on all ranks.
        name = hashlib.sha256(f"{members} of {group.group_name!r}".encode()).hexdigest()[:16]
        slot, clerk = desk.enter(name, timeout_s)
    try:
        if is_new:
            desk.tell_process()
        if clerk is not None:
            clerk.look_anew()
    except BaseException:
        desk.leave(slot)
        raise
    return slot, ranks


def _shown(text: str) -> str:
    """What a rank says, as part of an error."""
    short = text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..."
    return short if short.isprintable() else repr(short)


def _question(store: AskedStore | dist.Store) -> int:
    """Number of the last question; 0 if there was none. Writes nothing, which `add` would."""
    return int(store.get("questions")) if store.check(["questions"]) else 0
