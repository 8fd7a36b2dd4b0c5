"""Schedules as JSON, and as tables for terminals and notebooks."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from fddp.core import tables
from fddp.core.schedule.op import Op
from fddp.core.schedule.topology import Topology

FORMAT = "fddp.Schedule/2"
"""Format name and version: the first field of every document."""

_FIELDS = ("format", "plan", "axes", "ops", "wire_dtypes", "scaling", "result", "deterministic")
_HEADER = ("op", "kind", "bucket", "along", "buffer", "elements", "shard", "when", "after")
_NUMERIC_COLUMNS = (0, 2)
_SHOWN_IN_HTML = 60


class Schedule(Protocol):
    """Fields of a `Schedule`, apart from its plan."""

    @property
    def topology(self) -> Topology:
        """Axes of the ranks."""

    @property
    def ops(self) -> tuple[Op, ...]:
        """Operations in launch order."""

    @property
    def wire_dtypes(self) -> tuple[str, ...]:
        """Dtype in which each bucket is reduced."""

    @property
    def scaling(self) -> str:
        """Position of the division by the number of ranks."""

    @property
    def result(self) -> str:
        """Postcondition."""

    @property
    def deterministic(self) -> bool:
        """True if sums are associated in one fixed order."""


class ScheduleDocument(NamedTuple):
    """Parsed JSON with the right structure. `Schedule` validates the values."""

    plan: str  # JSON of the plan
    axes: dict[str, Any]
    ops: list[tuple[Any, Any, tuple[Any, ...], tuple[Any, ...], tuple[Any, ...], Any]]
    wire_dtypes: tuple[Any, ...]
    scaling: Any
    result: Any
    deterministic: Any


def to_json(schedule: Schedule, *, plan: str) -> str:
    """Return the schedule as JSON, with the text `plan` as its plan."""
    document = {
        "format": FORMAT,
        "plan": plan,
        "axes": schedule.topology.axes,
        "ops": schedule.ops,
        "wire_dtypes": schedule.wire_dtypes,
        "scaling": schedule.scaling,
        "result": schedule.result,
        "deterministic": schedule.deterministic,
    }
    return json.dumps(document, separators=(",", ":"))


def parse(text: str) -> ScheduleDocument:
    """Parse JSON from `to_json`.

    Raises:
        ValueError: not JSON, or fields are missing, unexpected or of the wrong type.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError, TypeError) as error:
        raise ValueError(f"schedule JSON: not a JSON document: {error}") from error
    if not isinstance(document, dict) or document.keys() != set(_FIELDS):
        raise ValueError(
            f"schedule JSON: must be an object with the fields {', '.join(_FIELDS)}, "
            f"got {reprlib.repr(document)}"
        )
    if document["format"] != FORMAT:
        raise ValueError(
            f"schedule JSON: format is {reprlib.repr(document['format'])}, "
            f"this version reads {FORMAT!r}"
        )
    if not isinstance(document["plan"], str):
        raise ValueError(f"schedule JSON: plan must be text, got {reprlib.repr(document['plan'])}")
    axes: dict[str, Any] = {}
    for index, pair in enumerate(_list(document["axes"], "axes")):
        name, size = _list(pair, f"axes[{index}]", 2)
        if not isinstance(name, str) or name in axes:
            raise ValueError(f"schedule JSON: axes[{index}] needs a unique name, got {name!r}")
        axes[name] = size
    ops = [_parse_op(op, f"ops[{index}]") for index, op in enumerate(_list(document["ops"], "ops"))]
    return ScheduleDocument(
        plan=document["plan"],
        axes=axes,
        ops=ops,
        wire_dtypes=tuple(_list(document["wire_dtypes"], "wire_dtypes")),
        scaling=document["scaling"],
        result=document["result"],
        deterministic=document["deterministic"],
    )


def _parse_op(
    value: object, where: str
) -> tuple[Any, Any, tuple[Any, ...], tuple[Any, ...], tuple[Any, ...], Any]:
    kind, bucket, axes, region, deps, when = _list(value, where, 6)
    buffer, start, stop, shard = _list(region, f"{where}.region", 4)
    return (
        kind,
        bucket,
        tuple(_list(axes, f"{where}.axes")),
        (buffer, start, stop, tuple(_list(shard, f"{where}.region.shard"))),
        tuple(_list(deps, f"{where}.deps")),
        when,
    )


def _list(value: object, where: str, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        size = "" if length is None else f" of {length}"
        raise ValueError(f"schedule JSON: {where} must be a list{size}, got {reprlib.repr(value)}")
    return value


def table(schedule: Schedule) -> str:
    """Return the operations as a plain-text table."""
    rows = tables.plain_table(_HEADER, _rows(schedule), _NUMERIC_COLUMNS)
    return f"{schedule!r}\n{rows}"


def html_table(schedule: Schedule) -> str:
    """Return the table as HTML for notebooks. The middle of a long table is omitted."""
    rows = list(_rows(schedule))
    if len(rows) > _SHOWN_IN_HTML:
        half = _SHOWN_IN_HTML // 2
        left_out = f"({len(rows) - 2 * half} more operations)"
        rows = [*rows[:half], ("…", left_out, *[""] * (len(_HEADER) - 2)), *rows[-half:]]
    return tables.html_table(repr(schedule), _HEADER, rows)


def _rows(schedule: Schedule) -> Iterator[tuple[str, ...]]:
    for position, op in enumerate(schedule.ops):
        is_control = op.kind == "control"
        yield (
            str(position),
            op.kind,
            "-" if op.bucket < 0 else str(op.bucket),
            " x ".join(op.axes) or "-",
            op.region.buffer,
            "-" if is_control else f"{op.region.start}:{op.region.stop}",
            " / ".join(op.region.shard) or "-",
            op.when,
            ", ".join(map(str, op.deps)) or "-",
        )
