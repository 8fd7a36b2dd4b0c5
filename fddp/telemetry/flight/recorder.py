"""Flight recorder: the newest operations of a process, always recorded, written out on request.

[Note: flights] Each `GradSync` and communicator records its newest operations in a compiled ring,
into which the executor writes. A record names the schedule of its operation, never tensors,
programs or works, so that nothing else is kept alive. Everything else is derived on reading.
Recording an operation takes three readings of the clock.

Reading takes no locks of Python, as it may happen in a signal handler, which runs between any two
instructions of the thread that it interrupts.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import time
import weakref
from collections import OrderedDict
from dataclasses import replace
from math import prod
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, Protocol

from fddp.core.entrance import entrance
from fddp.core.plan.leaf import ITEM_BYTES
from fddp.core.schedule.op import Op, is_piggybacked
from fddp.core.schedule.schedule import Schedule
from fddp.native import extension
from fddp.telemetry.flight.log import Flight, FlightLog, FlightOp, State

if TYPE_CHECKING:
    from fddp._C import FlightEntry

SIZE = 100
"""Operations recorded per `GradSync` and communicator."""

_serials = itertools.count()
_alive: weakref.WeakSet[Recorder] = weakref.WeakSet()


class FlightRecord(NamedTuple):
    """State of an operation. Times are on the clock of `time.perf_counter`; 0.0 stands for not yet,
    and infinity for never.

    Attributes:
        number: counts the operations of the ring.
        source: number of the schedule of the operation, or of its description.
        step: number of the step.
        position: position in the schedule, or the number of bytes.
        launched_s, waited_s, done_s: times of the launch, of the start of the wait, and of the end.
    """

    number: int
    source: int
    step: int
    position: int
    launched_s: float
    waited_s: float
    done_s: float


class Recordable(Protocol):
    """Part of a transport that the recorder reads."""

    name: str
    timeout_s: float

    @property
    def label(self) -> str:
        """Name in error texts; empty if there is none."""

    @property
    def rank(self) -> int: ...

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks of the group."""


class Recorded(Protocol):
    """Owner of a recorder."""

    @property
    def recorder(self) -> Recorder:
        """Recorder of the owner."""

    def at(self) -> tuple[int, str]:
        """Return the number of the running or else the next step, and the position within it."""


class Recorder:
    """Newest operations of one `GradSync` or communicator; see [Note: flights].

    Args:
        kind: "GradSync" or "Communicator", the name if the transport has none.
        owner: recorded object; only weakly referenced.
        transport: transport of the operations; not referenced.

    Attributes:
        name: name of the recorded object.
        ring: newest operations.
    """

    def __init__(self, kind: str, owner: Recorded, transport: Recordable) -> None:
        self.name = transport.label or kind
        self._empty = FlightLog(
            name=self.name,
            members=transport.members,
            rank=transport.rank,
            transport=transport.name,
            timeout_s=transport.timeout_s,
            step=-1,
            phase="",
            ops=(),
            made_s=time.time(),
        )
        self._serial = next(_serials)
        self._owner = weakref.ref(owner)
        self.ring = extension.compiled.FlightRing(SIZE)
        # By number, the last used last.
        self._sources: OrderedDict[int, Schedule | str] = OrderedDict()
        _alive.add(self)

    def launched(self, source: Schedule | str, step: int, position: int) -> FlightEntry:
        """Record an operation about to be passed to the transport.

        Args:
            source: schedule of the operation, or a description if it belongs to none.
            step: number of the step.
            position: position in the schedule, or the number of bytes.
        """
        return self.ring.launch(self.number_of(source), step, position)

    def number_of(self, source: Schedule | str) -> int:
        """Return the number that stands for a schedule or description in `ring`.

        It is valid for the operations of one step.
        """
        number, sources = id(source), self._sources
        if number in sources:
            sources.move_to_end(number)
            return number
        sources[number] = source  # keeps the number unique
        if len(sources) > 2 * SIZE:
            # Those used last may belong to a step without operations as yet.
            kept = {record.source for record in self._records()}
            for old in list(sources)[:-SIZE]:
                if old not in kept:
                    sources.pop(old, None)
        return number

    def _records(self) -> list[FlightRecord]:
        return [FlightRecord(*fields) for fields in self.ring.records()]

    def fail(self) -> None:
        """Mark all unfinished operations as failed."""
        self.ring.fail()

    def log(self, now_s: float) -> FlightLog:
        """Return the recorded operations as a value. `now_s` is on `time.perf_counter`'s clock."""
        owner = self._owner()
        step, phase = (0, "gone") if owner is None else owner.at()
        sources = self._sources
        ops = tuple(
            _op(record, sources[record.source], now_s)
            for record in self._records()
            if record.source in sources
        )
        return replace(self._empty, step=step, phase=phase, ops=ops)

    @property
    def order(self) -> tuple[str, int, int]:
        """Sort key of logs; those of one name and rank sort by creation."""
        return self.name, self._empty.rank, self._serial


@entrance
def flight(*of: object, reason: str = "requested") -> Flight:
    """Return the newest 100 operations of each `GradSync` and communicator of this process.

    Args:
        *of: `GradSync`s, wrapped modules or `Communicator`s; none for all that are alive.
        reason: reason in words.

    Returns:
        A value to print, or to write as JSON.

    Raises:
        TypeError: an argument has another type, or is a module before its first step.

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
        raise TypeError(f"reason must be a str, got {reason!r:.80}")
    recorders = [_recorder_of(one) for one in of] if of else _all_alive()
    now_s = perf_counter()
    logs = tuple(recorder.log(now_s) for recorder in recorders)
    return Flight(socket.gethostname(), os.getpid(), time.time(), reason, logs)


def _all_alive() -> list[Recorder]:
    for _ in range(100):
        try:
            return sorted(_alive, key=lambda recorder: recorder.order)
        except RuntimeError as error:  # another thread may change the set during iteration
            if "changed size" not in str(error):
                raise
    return []


def _recorder_of(one: object) -> Recorder:
    steps = getattr(one, "_steps", None)  # set at the first step of a wrapped module
    engine = getattr(one, "_engine", getattr(steps, "engine", one))
    recorder = getattr(engine, "recorder", None)
    if not isinstance(recorder, Recorder):
        raise TypeError(
            f"flight takes GradSyncs, Communicators and wrapped modules that have made a step, got "
            f"a {type(one).__name__}; pass nothing for all that are alive"
        )
    return recorder


def _op(record: FlightRecord, source: Schedule | str, now_s: float) -> FlightOp:
    launched_s, waited_s, done_s = record.launched_s, record.waited_s, record.done_s
    state: State = "waited for" if waited_s else "in flight"
    if done_s:
        state = "failed" if math.isinf(done_s) else "done"
    return FlightOp(
        record.number,
        record.step,
        *_describe(source, record.position),
        launched_s=now_s - launched_s,
        waited_s=waited_s - launched_s if waited_s else None,
        done_s=done_s - launched_s if state == "done" else None,
        state=state,
    )


def _describe(source: Schedule | str, position: int) -> tuple[str, int, str, int]:
    """Return kind, bucket, leaves and bytes of an operation."""
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
    """Return the bytes of an operation's memory, without a piggybacked control word."""
    if op.kind == "gather" or is_piggybacked(op):
        return -1
    sizes = dict(schedule.topology.axes)
    shard = op.region.shard
    if op.kind == "all_gather":
        shard = shard[: len(shard) - len(op.axes)]
    divided = prod(sizes[axis] for axis in shard)
    numel = (op.region.stop - op.region.start) // divided
    return numel * ITEM_BYTES.get(schedule.wire_dtypes[op.bucket], 0)
