"""Bucket plans as JSON, and as tables for terminals and notebooks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Protocol

from fddp.core import tables
from fddp.core.plan.bucket import Bucket
from fddp.core.plan.leaf import LeafSpec
from fddp.core.protocol.messages import Schema, decode, optional

FORMAT = "fddp.BucketPlan/1"
"""Format name and version: the first field of every document."""

MIB = 1024 * 1024

_BUCKET_FIELDS = ("leaves", "offsets", "numel", "dtype", "device", "cap_bytes", "sparse")
_LEAF_SCHEMA: Schema = {
    **dict.fromkeys(LeafSpec._fields, object),
    "shape": [object],
    "strides": optional([object]),
}
_BUCKET_SCHEMA: Schema = {
    **dict.fromkeys(_BUCKET_FIELDS, object),
    "leaves": [object],
    "offsets": [object],
}
_SCHEMA: Schema = {
    "format": FORMAT,
    "caps_bytes": [object],
    "order": [object],
    "leaves": [_LEAF_SCHEMA],
    "buckets": [_BUCKET_SCHEMA],
}

_SHOWN_BUCKETS = 20
_HEADER = ("bucket", "leaves", "first leaf", "last leaf", "dtype", "device", "MiB", "cap MiB")
_NUMERIC_COLUMNS = (0, 1, 6, 7)


class _Plan(Protocol):
    """Fields of a `BucketPlan`, which imports this module."""

    @property
    def leaves(self) -> tuple[LeafSpec, ...]: ...
    @property
    def buckets(self) -> tuple[Bucket, ...]: ...
    @property
    def caps_bytes(self) -> tuple[int, ...]: ...
    @property
    def order(self) -> tuple[int, ...]: ...


def to_json(plan: _Plan) -> str:
    """Return the plan as JSON that is identical in all processes."""
    return _dumps(
        {
            "format": FORMAT,
            "caps_bytes": plan.caps_bytes,
            "order": plan.order,
            "leaves": [leaf._asdict() for leaf in plan.leaves],
            "buckets": [_fields(bucket) for bucket in plan.buckets],
        }
    )


def shared_json(plan: _Plan) -> str:
    """Return the part of the plan that ranks must agree on, as JSON.

    Leaves in no bucket are omitted. They shift leaf indices, so bucketed leaves are written out.
    """
    leaf_documents = {index: plan.leaves[index]._asdict() for index in plan.order}
    return _dumps(
        {
            "format": FORMAT,
            "caps_bytes": plan.caps_bytes,
            "order": [plan.leaves[index].path for index in plan.order],
            "buckets": [
                {**_fields(bucket), "leaves": [leaf_documents[index] for index in bucket.leaves]}
                for bucket in plan.buckets
            ],
        }
    )


def parse(text: str) -> dict[str, Any]:
    """Parse JSON from `to_json` into the fields of a plan. `BucketPlan` validates their values.

    Raises:
        ValueError: not JSON, or fields are missing, unexpected or of the wrong type.
    """
    try:
        document = decode(text, _SCHEMA)
    except (ValueError, TypeError) as error:
        raise ValueError(f"plan JSON: {error}") from error
    return {
        "leaves": tuple(LeafSpec(**_with_tuples(leaf)) for leaf in document["leaves"]),
        "buckets": tuple(Bucket(**_with_tuples(bucket)) for bucket in document["buckets"]),
        "caps_bytes": tuple(document["caps_bytes"]),
        "order": tuple(document["order"]),
    }


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(value) if isinstance(value, list) else value for k, value in fields.items()}


def _fields(bucket: Bucket) -> dict[str, Any]:
    return {name: getattr(bucket, name) for name in _BUCKET_FIELDS}


def _dumps(document: dict[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"))


def summary(plan: _Plan) -> str:
    """Return totals in one line."""
    total_bytes = sum(bucket.nbytes for bucket in plan.buckets)
    caps = ", ".join(_mib(cap) for cap in plan.caps_bytes[:4])
    more_caps = ", …" if len(plan.caps_bytes) > 4 else ""
    return (
        f"{len(plan.buckets)} buckets, {len(plan.order)} of {len(plan.leaves)} leaves, "
        f"{_mib(total_bytes)} MiB, caps {caps}{more_caps} MiB"
    )


def table(plan: _Plan) -> str:
    """Return totals and a plain-text table. The middle of a long table is omitted."""
    rows = tables.plain_table(_HEADER, _rows(plan), _NUMERIC_COLUMNS)
    return f"BucketPlan: {summary(plan)}\n{rows}"


def html_table(plan: _Plan) -> str:
    """Return the table as HTML for notebooks."""
    return tables.html_table(f"BucketPlan: {summary(plan)}", _HEADER, _rows(plan))


def _rows(plan: _Plan) -> Iterator[tuple[str, ...]]:
    count = len(plan.buckets)
    head = count if count <= _SHOWN_BUCKETS else _SHOWN_BUCKETS // 2
    for index in range(head):
        yield _row(plan, index)
    if head < count:
        tail = _SHOWN_BUCKETS - head
        yield ("…", "", f"({count - head - tail} more buckets)", *[""] * (len(_HEADER) - 3))
        for index in range(count - tail, count):
            yield _row(plan, index)


def _row(plan: _Plan, index: int) -> tuple[str, ...]:
    bucket = plan.buckets[index]
    return (
        str(index),
        str(len(bucket.leaves)),
        _shown_path(plan.leaves[bucket.leaves[0]].path),
        _shown_path(plan.leaves[bucket.leaves[-1]].path),
        bucket.dtype,
        bucket.device,
        _mib(bucket.nbytes),
        "sparse" if bucket.sparse else _mib(bucket.cap_bytes),
    )


def _shown_path(path: str) -> str:
    # The path of a tree that is a single leaf is empty; JSON may contain control characters.
    return path if path and path.isprintable() else repr(path)


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.4g}"
