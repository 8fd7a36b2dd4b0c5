"""What a process did last, as a value: the newest operations of each `GradSync` and communicator.

Read back from files of several ranks, such values are lined up in `divergence.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

from fddp.core.plan.leaf import MAX_COUNT
from fddp.core.tables import plain_table

State = Literal["in flight", "waited for", "done", "failed"]

FORMAT = "fddp flight 1"
"""What files of flights begin with."""

T = TypeVar("T")

_STATES = ", ".join(get_args(State))
_HEADER = (
    "no", "step", "operation", "bucket", "leaves", "bytes", "launched", "waited", "done", "state"
)  # fmt: skip
_NUMERIC = (0, 1, 3, 5, 6, 7, 8)


class FlightOp(NamedTuple):
    """One operation in which ranks meet.

    Attributes:
        number: how many there were before it in this log; the same on all ranks that do the same.
        step: of which step; -1 for operators, which belong to none.
        kind: what it is: "all_reduce", "control", "vote", or an operator and its call site.
        bucket: the bucket's number in the plan then in force; -1 for none.
        leaves: path of the bucket's first leaf, and of the last where that is another.
        nbytes: bytes that the operation was handed; a hook may send fewer. -1 where not known.
        launched_s: seconds before the log was taken at which it was handed to the transport.
        waited_s: seconds from then until this rank began to wait for it; None if it did not.
        done_s: seconds from the launch until the wait was over; None if it is not. Others may have
            been done with it earlier: nobody looks before the wait.
        state: how far it is.
    """

    number: int
    step: int
    kind: str
    bucket: int
    leaves: str
    nbytes: int
    launched_s: float
    waited_s: float | None
    done_s: float | None
    state: State

    @property
    def what(self) -> str:
        """The operation in words."""
        where = (
            f" of bucket {self.bucket} ({escape_control_chars(self.leaves)})"
            if self.bucket >= 0
            else ""
        )
        step = f" of step {self.step}" if self.step >= 0 else ""
        return f"{escape_control_chars(self.kind)}{where}{step}"


@dataclass(frozen=True)
class FlightLog:
    """The newest operations of one `GradSync` or communicator.

    Attributes:
        name: what it is, and its number among those of its kind on these ranks, as in errors.
        members: numbers in the job of the ranks that share it, by rank.
        rank: this rank's number among them.
        transport: name of the transport.
        timeout_s: the longest that an operation may take.
        step: number of the step that runs, or else of the next; -1 where there are none.
        phase: what this rank is at in it.
        ops: oldest first.
        made_s: when it was made, which all ranks do together, in seconds since 1970 by the host's
            clock; 0.0 where that is not known.
    """

    name: str
    members: tuple[int, ...]
    rank: int
    transport: str
    timeout_s: float
    step: int
    phase: str
    ops: tuple[FlightOp, ...]
    made_s: float = 0.0

    @property
    def at(self) -> str:
        """Where the rank is, in words."""
        step = f"at step {self.step}, " if self.step >= 0 else ""
        return f"{step}{escape_control_chars(self.phase)}"

    def __str__(self) -> str:
        head = (
            f"{escape_control_chars(self.name)}: {names((self.rank,), self.members)} of "
            f"{len(self.members)} over {escape_control_chars(self.transport)}, "
            f"timeout {self.timeout_s:g} s, {self.at}"
        )
        if not self.ops:
            return f"{head}\n(no operation yet)"
        return f"{head}\n{plain_table(_HEADER, map(_row, self.ops), numeric=_NUMERIC)}"


@dataclass(frozen=True)
class Flight:
    """What a process did last.

    Attributes:
        host: name of the host.
        pid: number of the process.
        taken_s: when, in seconds since 1970 by the host's clock.
        reason: why it was taken.
        logs: one for each `GradSync` and communicator that was used and is alive.

    Example:
        >>> op = FlightOp(0, 0, "all_reduce", 0, "w", 8, 0.5, 0.1, 0.2, "done")
        >>> log = FlightLog("GradSync #1", (0, 1), 0, "shm", 60.0, 1, "between steps", (op,))
        >>> flight = Flight("host", 7, 1.8e9, "as an example", (log,))
        >>> print(flight)
        process 7 on host: as an example
        <BLANKLINE>
        GradSync #1: rank 0 of 2 over shm, timeout 60 s, at step 1, between steps
        no  step  operation   bucket  leaves  bytes   launched      waited        done  state
         0     0  all_reduce       0  w           8  -0.5000 s  +100.00 ms  +200.00 ms  done
        >>> Flight.from_json(flight.to_json()) == flight
        True
    """

    host: str
    pid: int
    taken_s: float
    reason: str
    logs: tuple[FlightLog, ...]

    def __str__(self) -> str:
        host, reason = escape_control_chars(self.host), escape_control_chars(self.reason)
        head = f"process {self.pid} on {host}: {reason}"
        return "\n\n".join([head, *map(str, self.logs)])

    def to_json(self) -> str:
        """The flight as JSON, a line for each operation."""
        logs = []
        for log in self.logs:
            fields = {k: v for k, v in vars(log).items() if k != "ops"}
            ops = ",\n  ".join(json.dumps(list(op)) for op in log.ops)
            logs.append(f'{json.dumps(fields)[:-1]}, "ops": [\n  {ops}]}}')
        head = {"format": FORMAT, **{k: v for k, v in vars(self).items() if k != "logs"}}
        body = ",\n ".join(logs)
        return f'{json.dumps(head)[:-1]}, "logs": [\n {body}]}}\n'

    @classmethod
    def from_json(cls, text: str) -> Flight:
        """What `to_json` wrote.

        Raises:
            ValueError: it is something else; says what.
        """
        try:
            read = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"no flight: it is not JSON: {error}") from error
        fields = _fields(read, "the file")
        found = fields.get("format")
        if found != FORMAT:
            raise ValueError(f"no flight: format is {found!r:.80}, and should be {FORMAT!r}")
        return cls(
            host=_get(fields, "host", str),
            pid=_get(fields, "pid", int),
            taken_s=_seconds(fields, "taken_s"),
            reason=_get(fields, "reason", str),
            logs=tuple(map(_log, _get(fields, "logs", list))),
        )


def _log(read: object) -> FlightLog:
    fields = _fields(read, "a log")
    members = _get(fields, "members", list)
    if not members or not all(type(member) is int for member in members):
        raise ValueError("no flight: members should be numbers of ranks, one at least")
    rank = _get(fields, "rank", int)
    if not 0 <= rank < len(members):
        raise ValueError(f"no flight: rank {rank} is none of {len(members)} members")
    return FlightLog(
        name=_get(fields, "name", str),
        members=tuple(members),
        rank=rank,
        transport=_get(fields, "transport", str),
        timeout_s=_seconds(fields, "timeout_s"),
        step=_get(fields, "step", int),
        phase=_get(fields, "phase", str),
        ops=tuple(map(_op, _get(fields, "ops", list))),
        made_s=_seconds(fields, "made_s"),
    )


def _op(read: object) -> FlightOp:
    if not isinstance(read, list) or len(read) != len(FlightOp._fields):
        raise ValueError(f"no flight: an operation should be a list of {len(FlightOp._fields)}")
    fields = dict(zip(FlightOp._fields, read, strict=True))
    state = _get(fields, "state", str)
    if state not in get_args(State):
        raise ValueError(f"no flight: state is {state!r:.80}, and should be one of {_STATES}")
    return FlightOp(
        number=_get(fields, "number", int),
        step=_get(fields, "step", int),
        kind=_get(fields, "kind", str),
        bucket=_get(fields, "bucket", int),
        leaves=_get(fields, "leaves", str),
        nbytes=_get(fields, "nbytes", int),
        launched_s=_seconds(fields, "launched_s"),
        waited_s=None if fields["waited_s"] is None else _seconds(fields, "waited_s"),
        done_s=None if fields["done_s"] is None else _seconds(fields, "done_s"),
        state=cast("State", state),
    )


def _fields(read: object, what: str) -> Mapping[str, Any]:
    if not isinstance(read, dict):
        raise ValueError(f"no flight: {what} should be an object, and is a {type(read).__name__}")
    return read


def _get(fields: Mapping[str, Any], name: str, kind: type[T]) -> T:
    value = fields.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"no flight: {name} is {value!r:.80}, a {type(value).__name__}")
    if isinstance(value, int) and abs(value) > MAX_COUNT:
        raise ValueError(f"no flight: {name} is no number below 2**63")
    return value


def _seconds(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    number = float(_get(fields, name, int)) if isinstance(value, int) else _get(fields, name, float)
    if not math.isfinite(number):
        raise ValueError(f"no flight: {name} is {number}")
    return number


def names(ranks: Iterable[int], members: Sequence[int] = ()) -> str:
    """Ranks in words, with their numbers in the job where these are others.

    Args:
        ranks: numbers in a group, one at least.
        members: numbers in the job, by rank; empty for the same.

    Example:
        >>> names([1]), names([0, 1], (0, 9))
        ('rank 1', 'ranks 0, 1 (global 9)')
    """
    labels = [
        f"{r} (global {members[r]})" if members and members[r] != r else str(r) for r in ranks
    ]
    return f"rank{'s' if len(labels) > 1 else ''} {', '.join(labels)}"


def escape_control_chars(text: str) -> str:
    """A text without what would act on a terminal.

    Example:
        >>> escape_control_chars("layer\\x1b[2J.w")
        'layer\\\\x1b[2J.w'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _row(op: FlightOp) -> tuple[str, ...]:
    return (
        str(op.number),
        str(op.step) if op.step >= 0 else "",
        escape_control_chars(op.kind),
        str(op.bucket) if op.bucket >= 0 else "",
        escape_control_chars(op.leaves),
        str(op.nbytes) if op.nbytes >= 0 else "",
        f"-{op.launched_s:.4f} s",
        _after(op.waited_s),
        _after(op.done_s),
        op.state,
    )


def _after(seconds: float | None) -> str:
    return "" if seconds is None else f"+{seconds * 1e3:.2f} ms"
