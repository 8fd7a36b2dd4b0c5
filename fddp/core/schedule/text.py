"""Schedules as JSON, and as tables for terminals and notebooks."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from typing import Any, Protocol

from fddp.core import tables
from fddp.core.protocol.messages import Schema, decode
from fddp.core.schedule.op import Op, Region
from fddp.core.schedule.topology import Topology

FORMAT = "fddp.Schedule/2"
"""Format name and version: the first field of every document."""

_OP_SCHEMA: Schema = (
    object,
    object,
    [object],
    (object, object, object, [object]),
    [object],
    object,
)
_SCHEMA: Schema = {
    "format": FORMAT,
    "plan": str,
    "axes": [(str, object)],
    "ops": [_OP_SCHEMA],
    "wire_dtypes": [object],
    "scaling": object,
    "result": object,
    "deterministic": object,
}
_HEADER = ("op", "kind", "bucket", "along", "buffer", "elements", "shard", "when", "after")
_NUMERIC_COLUMNS = (0, 2)
_SHOWN_IN_HTML = 60


class _Schedule(Protocol):
    """Fields of a `Schedule`, which imports this module, except for its plan."""

    @property
    def topology(self) -> Topology: ...
    @property
    def ops(self) -> tuple[Op, ...]: ...
    @property
    def wire_dtypes(self) -> tuple[str, ...]: ...
    @property
    def scaling(self) -> str: ...
    @property
    def result(self) -> str: ...
    @property
    def deterministic(self) -> bool: ...


def to_json(schedule: _Schedule, *, plan: str) -> str:
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


def parse(text: str) -> dict[str, Any]:
    """Parse JSON from `to_json` into the fields of a schedule, with the plan as JSON.

    Raises:
        ValueError: not JSON, or fields are missing, unexpected or of the wrong type.
    """
    try:
        document = decode(text, _SCHEMA)
    except (ValueError, TypeError) as error:
        raise ValueError(f"schedule JSON: {error}") from error
    axes = dict(document["axes"])
    if len(axes) < len(document["axes"]):
        names = [name for name, _ in document["axes"]]
        raise ValueError(f"schedule JSON: .axes needs unique names, got {reprlib.repr(names)}")
    return {
        "plan": document["plan"],
        "topology": Topology(**axes),
        "ops": tuple(map(_parse_op, document["ops"])),
        "wire_dtypes": tuple(document["wire_dtypes"]),
        **{name: document[name] for name in ("scaling", "result", "deterministic")},
    }


def _parse_op(op: list[Any]) -> Op:
    kind, bucket, axes, (buffer, start, stop, shard), deps, when = op
    region = Region(buffer, start, stop, tuple(shard))
    return Op(kind, bucket, tuple(axes), region, tuple(deps), when)


def table(schedule: _Schedule) -> str:
    """Return the operations as a plain-text table."""
    rows = tables.plain_table(_HEADER, _rows(schedule), _NUMERIC_COLUMNS)
    return f"{schedule!r}\n{rows}"


def html_table(schedule: _Schedule) -> str:
    """Return the table as HTML for notebooks. The middle of a long table is omitted."""
    rows = list(_rows(schedule))
    if len(rows) > _SHOWN_IN_HTML:
        half = _SHOWN_IN_HTML // 2
        left_out = f"({len(rows) - 2 * half} more operations)"
        rows = [*rows[:half], ("…", left_out, *[""] * (len(_HEADER) - 2)), *rows[-half:]]
    return tables.html_table(repr(schedule), _HEADER, rows)


def _rows(schedule: _Schedule) -> Iterator[tuple[str, ...]]:
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
