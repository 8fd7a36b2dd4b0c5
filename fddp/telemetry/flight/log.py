"""Flights as values: the newest operations of each `GradSync` and communicator of a process.

`divergence.py` compares the flights of several ranks, read from files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from fddp.core.protocol.messages import AnyOf, Schema, decode, optional
from fddp.core.tables import narrowed, plain_table
from fddp.core.text import size_text, time_text

State = Literal["in flight", "waited for", "done", "failed"]

FORMAT = "fddp flight 1"
"""First field of flight files."""

_HEADER = (
    "no", "step", "operation", "bucket", "leaves", "bytes", "launched", "waited", "done", "state"
)  # fmt: skip
_NUMERIC = (0, 1, 3, 5, 6, 7, 8)
_SHORT_HEADER = ("no", "step", "operation", "bucket", "leaves", "size", "launched", "done")
_SHORT_NUMERIC = (0, 1, 3, 5, 6, 7)
_TEXT_COLUMNS = (2, 4)

_OP: Schema = (
    *(int, int, str, int, str, int),
    *(float, optional(float), optional(float)),
    AnyOf(get_args(State)),
)
_LOG: Schema = {
    "name": str,
    "members": [int],
    "rank": int,
    "transport": str,
    "timeout_s": float,
    "step": int,
    "phase": str,
    "made_s": float,
    "ops": [_OP],
}
_FLIGHT: Schema = {
    "format": FORMAT,
    "host": str,
    "pid": int,
    "taken_s": float,
    "reason": str,
    "logs": [_LOG],
}


class FlightOp(NamedTuple):
    """One collective operation.

    Attributes:
        number: index of the operation in its log, equal on all ranks that run the same operations.
        step: number of the step; -1 for operators, which belong to none.
        kind: "all_reduce", "control", "vote", or an operator and its call site.
        bucket: index of the bucket in the plan at that time; -1 for none.
        leaves: path of the bucket's first leaf, and of the last if it has several.
        nbytes: bytes passed to the operation, of which a hook may send fewer; -1 if unknown.
        launched_s: seconds from the launch to the time of the log.
        waited_s: seconds from the launch until this rank began to wait; None if it did not.
        done_s: seconds from the launch to the end of the wait; None if it has not ended. The
            operation may have completed earlier; or later, on a device, whose stream then waits.
        state: progress of the operation.
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
        """Description of the operation."""
        bucket = f" of bucket {self.bucket} ({self.leaves})" if self.bucket >= 0 else ""
        step = f" of step {self.step}" if self.step >= 0 else ""
        return escape_control_chars(f"{self.kind}{bucket}{step}")


@dataclass(frozen=True)
class FlightLog:
    """Newest operations of one `GradSync` or communicator.

    Attributes:
        name: name with its index among those of its kind on these ranks, as in errors.
        members: global rank of each rank of the group.
        rank: this rank in the group.
        transport: name of the transport.
        timeout_s: timeout of an operation.
        step: number of the running or else the next step; -1 if there are no steps.
        phase: position of this rank within the step.
        ops: operations, oldest first.
        made_s: time of creation, which all ranks do together, in seconds since 1970 by the host's
            clock; 0.0 if unknown.
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
        """Position of the rank in words."""
        step = f"at step {self.step}, " if self.step >= 0 else ""
        return escape_control_chars(f"{step}{self.phase}")

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """Return the table of the operations, as `Flight.to_text`."""
        head = escape_control_chars(
            f"{self.name}: {rank_names((self.rank,), self.members)} of {len(self.members)} over "
            f"{self.transport}, timeout {self.timeout_s:g} s, {self.at}"
        )
        if not self.ops:
            return f"{head}\n(no operation yet)"
        table = plain_table(_HEADER, map(_row, self.ops), numeric=_NUMERIC)
        if width is not None and max(map(len, table.splitlines())) > width:
            rows = narrowed(_SHORT_HEADER, [*map(_short_row, self.ops)], _TEXT_COLUMNS, width)
            table = plain_table(_SHORT_HEADER, rows, numeric=_SHORT_NUMERIC)
        return f"{head}\n{table}"


@dataclass(frozen=True)
class Flight:
    """Newest operations of a process.

    Attributes:
        host: name of the host.
        pid: process ID.
        taken_s: time of the flight, in seconds since 1970 by the host's clock.
        reason: reason for taking it.
        logs: one log for each `GradSync` and communicator that was used and is alive.

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
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """Return the tables of the operations.

        Args:
            width: characters in a line. Tables that are wider have fewer digits, names cut at the
                left, "done" in place of its state, and no start of waiting. None to cut nothing.
        """
        head = escape_control_chars(f"process {self.pid} on {self.host}: {self.reason}")
        return "\n\n".join([head, *(log.to_text(width) for log in self.logs)])

    def to_json(self) -> str:
        """Return the flight as JSON, with a line for each operation."""
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
        """Decode the output of `to_json`.

        Raises:
            ValueError: the text is something else; names the field.
        """
        try:
            fields = decode(text, _FLIGHT)
            for number in _numbers(fields):
                if not abs(number) < 2**63:
                    raise ValueError(f"{number} is not a finite number below 2**63")
            del fields["format"]
            return cls(**{**fields, "logs": tuple(map(_log, fields["logs"]))})
        except ValueError as error:
            raise ValueError(f"not a flight: {error}") from error


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list | dict):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _numbers(entry)


def _log(fields: dict[str, Any]) -> FlightLog:
    rank, members = fields["rank"], tuple(fields["members"])
    if not 0 <= rank < len(members):
        raise ValueError(f"rank {rank} is not one of {len(members)} members")
    ops = tuple(FlightOp(*op) for op in fields["ops"])
    return FlightLog(**{**fields, "members": members, "ops": ops})


def rank_names(ranks: Iterable[int], members: Sequence[int] = ()) -> str:
    """Format ranks, with their global ranks if these differ.

    Args:
        ranks: ranks in a group, at least one.
        members: global rank of each; empty if they are the same.

    Example:
        >>> rank_names([1]), rank_names([0, 1], (0, 9))
        ('rank 1', 'ranks 0, 1 (global 9)')
    """
    labels = [
        f"{r} (global {members[r]})" if members and members[r] != r else str(r) for r in ranks
    ]
    return f"rank{'s' if len(labels) > 1 else ''} {', '.join(labels)}"


def escape_control_chars(text: str) -> str:
    """Escape characters that a terminal would interpret.

    Example:
        >>> escape_control_chars("layer\\x1b[2J.w")
        'layer\\\\x1b[2J.w'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _row(op: FlightOp) -> list[str]:
    numbers = (op.number, op.step, op.bucket, op.nbytes)
    number, step, bucket, nbytes = (str(n) if n >= 0 else "" for n in numbers)
    waited, done = ("" if s is None else f"+{s * 1e3:.2f} ms" for s in (op.waited_s, op.done_s))
    launched = f"-{op.launched_s:.4f} s"
    row = (number, step, op.kind, bucket, op.leaves, nbytes, launched, waited, done, op.state)
    return [escape_control_chars(cell) for cell in row]


def _short_row(op: FlightOp) -> list[str]:
    number, step, kind, bucket, leaves = _row(op)[:5]
    size = size_text(op.nbytes) if op.nbytes >= 0 else ""
    done: str = op.state
    if op.state == "done" and op.done_s is not None:
        done = f"+{time_text(op.done_s)}"
    return [number, step, kind, bucket, leaves, size, f"-{time_text(op.launched_s)}", done]
