"""Ranks as processes tell each other what they do, through the store of their job.

See [Note: whereabouts]. Questions and answers lie in the store of the default group, by global
ranks, so that a rank hears of the others whichever of their transports they are on. Where there is
no default group, a group's own store takes its place.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fddp.transports.whereabouts import Desk, Doing, Slot

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.1, 5.0  # from one look for questions to the next
_PER_TIMEOUT = 8  # looks in the time that an operation may take
_AWAKE_S = 10.0  # how long a rank looks often, once it was asked
_END_S = 0.5  # what the thread gets to end in order

_lock = threading.RLock()  # a transport may be collected while one is opened
_desks: weakref.WeakKeyDictionary[Any, StoreDesk] = weakref.WeakKeyDictionary()
_running: weakref.WeakSet[_Clerk] = weakref.WeakSet()


class StoreDesk(Desk):
    """What this process does, told through a store.

    Args:
        store: that all ranks of the job share.
        rank: this rank's number in it.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        super().__init__()
        self._store = dist.PrefixStore("fddp/whereabouts", store)
        self._rank = rank
        self._timeouts_s: dict[Slot, float] = {}
        self._clerk: _Clerk | None = None

    def enter(self, key: str, timeout_s: float) -> tuple[Slot, _Clerk]:
        """A slot for a transport that is being opened, and who answers for it; the caller has the
        lock."""
        slot = self.open(key)
        self._timeouts_s[slot] = timeout_s
        if self._clerk is None:
            self._clerk = _Clerk(self)
        shortest_s = min(tuple(self._timeouts_s.values()))
        self._clerk.pause_s = min(max(shortest_s / _PER_TIMEOUT, _LEAST_PAUSE_S), _MOST_PAUSE_S)
        return slot, self._clerk

    def drop(self, slot: Slot) -> None:
        """Its transport is gone, without having been closed. Takes no lock: the garbage collector
        calls this, in the midst of anything."""
        clerk = self._clerk
        if clerk is not None:
            clerk.mail.put(slot)

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
        with contextlib.suppress(RuntimeError):
            return self._store.add("questions", 1)
        return 0

    def tell(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.answer(self._store, self._store.add("questions", 0), ended=True)

    def answer(self, store: dist.Store, question: int, *, ended: bool = False) -> None:
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
        if not self._store.check([f"answer/{rank}"]):
            return False
        try:
            asked, ended, waits, last, at = json.loads(self._store.get(f"answer/{rank}"))
            if asked < question and not (ended and since and asked >= since):
                return False
            found[rank] = Doing(tuple(map(str, waits)), str(last), str(at))
        except (ValueError, TypeError, RecursionError):  # no answer that makes sense
            found[rank] = None
        return True


class _Clerk:
    """A thread that looks for questions and answers them; ends by itself where the store does.

    It has a connection of its own, because the rank's may be taken by a call that waits.

    Attributes:
        pause_s: from one look to the next.
        mail: slots that are to be left; None to look anew how long to pause, or to end.
    """

    def __init__(self, desk: StoreDesk) -> None:
        self.pause_s = _MOST_PAUSE_S
        self.mail: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        self._desk = weakref.ref(desk)
        self._store = desk._store
        self._stopped = self._started = False
        self._thread = threading.Thread(target=self._run, name="fddp-whereabouts", daemon=True)

    def look_anew(self) -> None:
        """Starts it, or tells it of another pause. Not under the lock: a thread that starts may be
        where garbage is collected, and transports with it that take the lock."""
        with _lock:
            starts, self._started = not self._started and not self._stopped, True
        if not starts:
            self.mail.put(None)
            return
        if not _running:
            # A thread that comes back from the store to an interpreter that has ended aborts.
            atexit.unregister(_stop_all)
            atexit.register(_stop_all)
        _running.add(self)
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self.mail.put(None)
        _running.discard(self)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_END_S)

    def _run(self) -> None:
        heard, awake_until_s, looked_s = -1, 0.0, time.perf_counter()
        store: dist.Store | None = None
        while True:
            now_s = time.perf_counter()
            pause_s = _LEAST_PAUSE_S if now_s < awake_until_s else self.pause_s
            if not self._is_due(looked_s + pause_s - now_s):
                continue
            looked_s, desk = time.perf_counter(), self._desk()
            if self._stopped or desk is None:
                return
            try:
                if store is None:
                    store = self._store.clone()  # type: ignore[attr-defined]
                question = store.add("questions", 0)
                if question not in (0, heard):
                    desk.answer(store, question)
                    heard, awake_until_s = question, time.perf_counter() + _AWAKE_S
            except Exception:  # the store is gone, and with it whoever could ask
                return
            del desk

    def _is_due(self, within_s: float) -> bool:
        """Waits for mail; whether none came, or it is the end."""
        try:
            left = self.mail.get(timeout=max(within_s, 0.0))
        except queue.Empty:
            return True
        desk = self._desk()
        if left is not None and desk is not None:
            desk.leave(left)
        return self._stopped or desk is None


def enter(group: dist.ProcessGroup, timeout_s: float) -> tuple[Slot, list[int]]:
    """A slot for a transport over `group`, and the numbers of its ranks at the desk."""
    world = dist.group.WORLD if dist.is_initialized() else None
    members = dist.get_process_group_ranks(group)
    host, ranks = (world, members) if world is not None else (group, list(range(len(members))))
    with _lock:
        desk = _desks.get(host)
        if desk is None:
            desk = _desks[host] = StoreDesk(host.get_group_store(), dist.get_rank(host))
        slot, clerk = desk.enter(str(members), timeout_s)
    clerk.look_anew()
    return slot, ranks


def _stop_all() -> None:
    for clerk in list(_running):
        clerk.stop()
