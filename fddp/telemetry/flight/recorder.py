"""A flight recorder: what a process did last, kept always, and written down when it is asked for.

[Note: flights] Each `GradSync` and communicator notes its newest operations in a ring. An entry
refers to the schedule that its operation is of, never to tensors, programs or works, so that
nothing is kept alive; all else is worked out when somebody looks. Noting an operation is three
readings of the clock and an append.

Whoever looks does so without locks: it may be a signal handler, which runs between any two
instructions of the thread that it stops.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import time
import weakref
from collections import deque
from math import prod
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from fddp.core.plan.leaf import ITEM_BYTES
from fddp.core.schedule.op import Op, is_piggybacked
from fddp.core.schedule.schedule import Schedule
from fddp.telemetry.flight.log import Flight, FlightLog, FlightOp, State

if TYPE_CHECKING:
    from collections.abc import Iterable


SIZE = 100
"""Operations that are kept of each `GradSync` and communicator."""

_serials = itertools.count()
_alive: weakref.WeakSet[Recorder] = weakref.WeakSet()


class Recordable(Protocol):
    """Part of a transport that the recorder reads."""

    name: str
    timeout_s: float

    @property
    def label(self) -> str:
        """Name in error texts; empty if there is none."""

    @property
    def rank(self) -> int:
        """Rank of this process."""

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks of the group."""


class Recorded(Protocol):
    """What has a recorder."""

    @property
    def recorder(self) -> Recorder:
        """Its recorder."""

    def at(self) -> tuple[int, str]:
        """The number of the step that runs, or else of the next, and what it is at."""


class Entry:
    """One operation; times on the clock of `time.perf_counter`, 0.0 for what has not been, infinite
    for what never will be."""

    __slots__ = ("done_s", "launched_s", "number", "position", "source", "step", "waited_s")

    def __init__(self, number: int, source: Schedule | str, step: int, position: int) -> None:
        self.number = number
        self.source = source  # the schedule that has the operation, or what it is in words
        self.step = step
        self.position = position  # in the schedule; elsewhere the number of bytes
        self.launched_s = perf_counter()
        self.waited_s = 0.0
        self.done_s = 0.0


class Recorder:
    """The newest operations of one `GradSync` or communicator; see [Note: flights].

    Args:
        kind: "GradSync" or "Communicator", for a transport without a name.
        owner: what is recorded; not kept alive.
        transport: carries the operations; not kept.

    Attributes:
        name: what is recorded.
        ring: the newest entries.
        count: how many there have been.
    """

    def __init__(self, kind: str, owner: Recorded, transport: Recordable) -> None:
        self._members = transport.members
        self._rank = transport.rank
        self._transport = transport.name
        self._timeout_s = transport.timeout_s
        self._made_s = time.time()
        self.name = transport.label or kind
        self._serial = next(_serials)
        self._owner = weakref.ref(owner)
        self.ring: deque[Entry] = deque(maxlen=SIZE)
        self.count = 0
        _alive.add(self)

    def launched(self, source: Schedule | str, step: int, position: int) -> Entry:
        """Notes an operation that is about to be handed to the transport.

        Args:
            source: the schedule that it is of; what it is in words, for one of none.
            step: the number of the step.
            position: where it stands in the schedule; for one of none, its bytes.
        """
        entry = Entry(self.count, source, step, position)
        self.count += 1
        self.ring.append(entry)
        return entry

    def fail(self) -> None:
        """What is not done has failed."""
        for entry in list(self.ring):
            entry.done_s = entry.done_s or math.inf

    def log(self, now_s: float) -> FlightLog:
        """What was noted, as a value; `now_s` is on the clock of `time.perf_counter`."""
        owner = self._owner()
        step, phase = (0, "gone") if owner is None else owner.at()
        ops = tuple(_op(entry, now_s) for entry in list(self.ring))
        return FlightLog(
            name=self.name,
            members=self._members,
            rank=self._rank,
            transport=self._transport,
            timeout_s=self._timeout_s,
            step=step,
            phase=phase,
            ops=ops,
            made_s=self._made_s,
        )

    @property
    def order(self) -> tuple[str, int, int]:
        """By which logs are sorted; of one name and rank, as they were made."""
        return self.name, self._rank, self._serial


class StepEntries(dict[int, Entry]):
    """What is noted of one step's operations, by their positions in the schedule.

    Args:
        recorder: keeps the newest.
        schedule: of the step.
        step: its number.
    """

    __slots__ = ("_recorder", "_schedule", "_step")

    def __init__(self, recorder: Recorder, schedule: Schedule, step: int) -> None:
        self._recorder = recorder
        self._schedule = schedule
        self._step = step

    def launched(self, position: int) -> Entry:
        """Notes an operation that is about to be handed to the transport."""
        # As the recorder's, without one more call.
        recorder = self._recorder
        entry = self[position] = Entry(recorder.count, self._schedule, self._step, position)
        recorder.count += 1
        recorder.ring.append(entry)
        return entry


def flight(*of: object, reason: str = "asked for") -> Flight:
    """What this process did last: the newest 100 operations of each `GradSync` and communicator.

    Args:
        *of: a `GradSync`, a wrapped module or a `Communicator`, or several; none for all that are
            alive.
        reason: why it is taken, in words.

    Returns:
        A value to print, or to write as JSON.

    Raises:
        TypeError: something else was passed, or a module that has not made its first step.

    Example:
        >>> import fddp, torch
        >>> def average(group):
        ...     grads = {"w": torch.ones(2)}
        ...     with fddp.GradSync(grads, group=group) as sync:
        ...         sync(grads)
        ...         (log,) = fddp.flight(sync).logs
        ...         return [(op.number, op.step, op.kind, op.nbytes, op.state) for op in log.ops]
        >>> fddp.loopback(2, average)[1]
        [(0, 0, 'all_reduce', 8, 'done')]
    """
    if not isinstance(reason, str):
        raise TypeError(f"reason is a text, got {reason!r:.80}")
    recorders = [_recorder_of(one) for one in of] if of else _all()
    return _flight_of(recorders, reason)


def _flight_of(recorders: Iterable[Recorder], reason: str) -> Flight:
    now_s = perf_counter()
    logs = tuple(recorder.log(now_s) for recorder in recorders)
    return Flight(socket.gethostname(), os.getpid(), time.time(), reason, logs)


def _all() -> list[Recorder]:
    return sorted(_copied(_alive), key=lambda recorder: recorder.order)


def _copied(recorders: weakref.WeakSet[Recorder]) -> list[Recorder]:
    """Whatever other threads add meanwhile."""
    for _ in range(100):
        try:
            return list(recorders)
        except RuntimeError as error:
            if "changed size" not in str(error):
                raise
    return []


def _recorder_of(one: object) -> Recorder:
    steps = getattr(one, "_steps", None)  # of a wrapped module, from its first step on
    engine = getattr(one, "_engine", getattr(steps, "engine", one))
    recorder = getattr(engine, "recorder", None)
    if not isinstance(recorder, Recorder):
        raise TypeError(
            f"flight takes GradSyncs, Communicators and wrapped modules that have made a step, got "
            f"a {type(one).__name__}; pass nothing for all that are alive"
        )
    return recorder


def _op(entry: Entry, now_s: float) -> FlightOp:
    launched_s, waited_s, done_s = entry.launched_s, entry.waited_s, entry.done_s
    kind, bucket, leaves, nbytes = _describe(entry.source, entry.position)
    state: State = "waited for" if waited_s else "in flight"
    if done_s:
        state = "failed" if math.isinf(done_s) else "done"
    return FlightOp(
        number=entry.number,
        step=entry.step,
        kind=kind,
        bucket=bucket,
        leaves=leaves,
        nbytes=nbytes,
        launched_s=now_s - launched_s,
        waited_s=waited_s - launched_s if waited_s else None,
        done_s=done_s - launched_s if state == "done" else None,
        state=state,
    )


def _describe(source: Schedule | str, position: int) -> tuple[str, int, str, int]:
    """Kind, bucket, leaves and bytes."""
    if isinstance(source, str):
        return source, -1, "", position
    op = source.ops[position]
    if op.bucket < 0:
        return op.kind, -1, "", -1
    leaves, paths = source.plan.buckets[op.bucket].leaves, source.plan.paths
    first, last = paths[leaves[0]], paths[leaves[-1]]
    kind = op.kind if op.when == "always" else f"{op.kind} ({op.when})"
    return kind, op.bucket, first if first == last else f"{first} .. {last}", _nbytes(source, op)


def _nbytes(schedule: Schedule, op: Op) -> int:
    """Bytes of the memory that an operation works on, without a word that rides."""
    if op.kind == "gather" or is_piggybacked(op):
        return -1
    sizes = dict(schedule.topology.axes)
    shard = op.region.shard
    if op.kind == "all_gather":
        shard = shard[: len(shard) - len(op.axes)]
    divided = prod(sizes[axis] for axis in shard)
    numel = (op.region.stop - op.region.start) // divided
    return numel * ITEM_BYTES.get(schedule.wire_dtypes[op.bucket], 0)
