"""Bucket plans: the assignment of gradients to buckets, and the order of buckets.

A plan is a frozen value. Pure functions compute it from leaf descriptions, not from tensors. It can
be printed, compared, hashed, saved, sent to another rank and tested without a process group.
`fddp.plan_buckets` plans a tree.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from sys import intern
from types import MappingProxyType
from typing import Any

from fddp.core.entrance import entrance
from fddp.core.plan.bucket import Bucket as Bucket
from fddp.core.plan.bucket import assign_buckets, packed_offsets
from fddp.core.plan.leaf import (
    ITEM_BYTES,
    MAX_COUNT,
    is_counts,
    kind_of,
    leaf_problem,
)
from fddp.core.plan.leaf import LeafSpec as LeafSpec
from fddp.core.protocol.messages import Schema, decode, optional
from fddp.core.tables import abridged, html_table, narrowed, plain_table
from fddp.core.text import counted, size_text

_FORMAT = "fddp.BucketPlan/1"  # name and version: the first field of every document
_SCHEMA: Schema = {
    "format": _FORMAT,
    "caps_bytes": [object],
    "order": [object],
    "leaves": [
        dict.fromkeys(LeafSpec._fields, object) | {"shape": [object], "strides": optional([object])}
    ],
    "buckets": [
        dict.fromkeys(Bucket.__dataclass_fields__, object)
        | {"leaves": [object], "offsets": [object]}
    ],
}

_SHOWN_BUCKETS = 20
_HEADER = ("bucket", "leaves", "first leaf", "last leaf", "dtype", "device", "size", "cap")
_NUMERIC_COLUMNS = (0, 1, 6, 7)
_PATH_COLUMNS = (2, 3)


@dataclass(frozen=True, repr=False)
class BucketPlan:
    """Buckets over the leaves of a tree, as returned by `fddp.plan_buckets`.

    The fields are validated against each other on construction. Leaves in no bucket are not
    reduced: their dtype has no gradient, or they were not selected.

    Attributes:
        leaves: all leaves of the tree, in canonical order.
        buckets: buckets in the order in which they are expected to fill.
        caps_bytes: caps of the first, second, ... bucket of a dtype and device; the last repeats.
        order: indices of the bucketed leaves in the order of assignment to buckets.

    Raises:
        ValueError: the fields are inconsistent; the message names the field and both values.

    >>> leaves = (LeafSpec("bias", (2,), "float32"), LeafSpec("weight", (2, 3), "float32"))
    >>> plan = plan_leaves(leaves, order=(1, 0), caps_bytes=(16,))
    >>> plan
    BucketPlan: 2 buckets, 2 of 2 leaves, 32 B, cap 16 B
    bucket  leaves  first leaf  last leaf  dtype    device  size   cap
         0       1  weight      weight     float32  cpu     24 B  16 B
         1       1  bias        bias       float32  cpu      8 B  16 B
    >>> BucketPlan.from_json(plan.to_json()) == plan
    True
    """

    leaves: tuple[LeafSpec, ...]
    buckets: tuple[Bucket, ...]
    caps_bytes: tuple[int, ...]
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_leaves(self.leaves)
        _check_caps(self.caps_bytes)
        bucketed = _check_buckets(self.buckets, self.leaves)
        _check_order(self.order, bucketed)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[type[BucketPlan], tuple[object, ...]]:
        # Drops cached properties, and validates the fields again on loading.
        return type(self), (self.leaves, self.buckets, self.caps_bytes, self.order)

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Paths of all leaves, in canonical order; interned to make comparisons cheap."""
        return tuple(intern(leaf.path) for leaf in self.leaves)

    @cached_property
    def bucket_of(self) -> Mapping[int, int]:
        """Bucket index by leaf index. Leaves in no bucket are absent."""
        return MappingProxyType(
            {leaf: number for number, bucket in enumerate(self.buckets) for leaf in bucket.leaves}
        )

    @cached_property
    def reduced(self) -> tuple[int, ...]:
        """Indices of the bucketed leaves, in canonical order."""
        return tuple(sorted(self.order))

    @cached_property
    def local(self) -> tuple[int, ...]:
        """Indices of the reducible leaves in no bucket, in canonical order."""
        bucketed = set(self.order)
        return tuple(
            i for i, leaf in enumerate(self.leaves) if leaf.reducible and i not in bucketed
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan in hex; the same in all processes and Python versions."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @cached_property
    def shared_digest(self) -> str:
        """SHA-256 of the fields that ranks must agree on: all but leaves in no bucket."""
        # Leaves in no bucket shift leaf indices, so bucketed leaves are written out.
        leaves = {index: self.leaves[index]._asdict() for index in self.order}
        text = self._json(
            order=[self.leaves[index].path for index in self.order],
            buckets=[
                {**vars(bucket), "leaves": [leaves[index] for index in bucket.leaves]}
                for bucket in self.buckets
            ],
        )
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """Return the plan as JSON, equal in all processes. `from_json` restores an equal plan.

        JSON is validated when it is read. A pickle is not a format for files of others: it runs
        code of their choice.
        """
        return self._json(
            order=self.order,
            leaves=[leaf._asdict() for leaf in self.leaves],
            buckets=[vars(bucket) for bucket in self.buckets],
        )

    def _json(self, **fields: Any) -> str:
        document = {"format": _FORMAT, "caps_bytes": self.caps_bytes, **fields}
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    @entrance
    def from_json(cls, text: str) -> BucketPlan:
        """Restore a plan from `to_json`.

        Raises:
            ValueError: the text is malformed or the plan is inconsistent; the message names the
                field.
        """
        document = decode(text, _SCHEMA, "plan JSON")
        return cls(
            tuple(LeafSpec(**_with_tuples(leaf)) for leaf in document["leaves"]),
            tuple(Bucket(**_with_tuples(bucket)) for bucket in document["buckets"]),
            tuple(document["caps_bytes"]),
            tuple(document["order"]),
        )

    def __repr__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """Return the table of the buckets, whose paths are cut at the left to fit a width.

        Args:
            width: characters in a line; None to cut nothing.
        """
        rows = self._rows()
        if width is not None:
            rows = narrowed(_HEADER, rows, _PATH_COLUMNS, width)
        return f"BucketPlan: {summary(self)}\n{plain_table(_HEADER, rows, _NUMERIC_COLUMNS)}"

    def _repr_html_(self) -> str:
        return html_table(f"BucketPlan: {summary(self)}", _HEADER, self._rows())

    def _rows(self) -> list[tuple[str, ...]]:
        left_out = ("…", "", "({} more buckets)")
        return abridged(len(self.buckets), self._row, _SHOWN_BUCKETS, left_out)

    def _row(self, number: int) -> tuple[str, ...]:
        bucket = self.buckets[number]
        return (
            str(number),
            str(len(bucket.leaves)),
            _shown_path(self.leaves[bucket.leaves[0]].path),
            _shown_path(self.leaves[bucket.leaves[-1]].path),
            bucket.dtype,
            bucket.device,
            size_text(bucket.nbytes),
            "sparse" if bucket.sparse else size_text(bucket.cap_bytes),
        )


def summary(plan: BucketPlan) -> str:
    """Return the totals of a plan in one line."""
    total_bytes = sum(bucket.nbytes for bucket in plan.buckets)
    caps = ", ".join(map(size_text, plan.caps_bytes[:4]))
    more_caps = ", …" if len(plan.caps_bytes) > 4 else ""
    return (
        f"{counted(len(plan.buckets), 'bucket')}, {len(plan.order)} of "
        f"{counted(len(plan.leaves), 'leaf')}, {size_text(total_bytes)}, "
        f"cap{'s' if len(plan.caps_bytes) > 1 else ''} {caps}{more_caps}"
    )


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(value) if isinstance(value, list) else value for k, value in fields.items()}


def _shown_path(path: str) -> str:
    # The path of a tree that is a single leaf is empty; JSON may contain control characters.
    return path if path and path.isprintable() else repr(path)


def plan_leaves(
    leaves: Sequence[LeafSpec],
    *,
    order: Sequence[int],
    caps_bytes: Sequence[int],
    from_back: bool = False,
) -> BucketPlan:
    """Plan buckets for the leaves of `order`. Other leaves are not reduced.

    Args:
        leaves: all leaves of a tree, in canonical order.
        order: indices of the leaves to reduce, in the order of assignment to buckets.
        caps_bytes: caps of the first, second, ... bucket of a dtype and device; the last repeats.
        from_back: fill buckets from the last leaf of `order`, so that the first cap applies to the
            bucket that is launched last.

    Raises:
        ValueError: `order` holds an index that is repeated, out of range or not of a reducible
            leaf, or `caps_bytes` is not one or more positive ints.

    >>> plan = plan_leaves([LeafSpec("step", (), "int64"), LeafSpec("w", (3,), "float32")],
    ...                    order=[1], caps_bytes=[1024])
    >>> plan.reduced, plan.bucket_of[1]
    ((1,), 0)
    """
    leaves, order, caps_bytes = tuple(leaves), tuple(map(index, order)), tuple(caps_bytes)
    _check_caps(caps_bytes)
    _check_indices(order, leaves, "order")
    step = -1 if from_back else 1
    buckets = tuple(assign_buckets(leaves, order[::step], caps_bytes)[::step])
    return BucketPlan(leaves, buckets, caps_bytes, order)


@entrance
def rebucket(
    plan: BucketPlan,
    ready_order: Iterable[int],
    *,
    caps_bytes: Sequence[int] | None = None,
    from_back: bool = False,
) -> BucketPlan:
    """Plan the leaves of `plan` again, for a measured order of gradients.

    Leaves then share a bucket with leaves that become ready at about the same time, and the small
    first bucket is launched early.

    Args:
        plan: the original plan; its bucket boundaries are discarded.
        ready_order: leaf indices in the order in which their gradients were ready. Other bucketed
            leaves follow in the order of `plan`.
        caps_bytes: new caps; None for those of `plan`.
        from_back: as in `plan_leaves`.

    Raises:
        ValueError: an index is repeated, or its leaf is in no bucket of `plan`.

    >>> leaves = [LeafSpec(name, (4,), "float32") for name in "abc"]
    >>> plan = plan_leaves(leaves, order=(2, 1, 0), caps_bytes=(16, 64))
    >>> [bucket.leaves for bucket in rebucket(plan, [0]).buckets]
    [(0,), (2, 1)]
    """
    ready = tuple(map(index, ready_order))
    _check_indices(ready, plan.leaves, "ready_order")
    bucketed = set(plan.order)
    if not bucketed.issuperset(ready):
        leaf = next(leaf for leaf in ready if leaf not in bucketed)
        raise ValueError(
            f"ready_order holds {_name(leaf, plan.leaves)}, which is in no bucket of the plan; "
            f"plan.reduced lists the {len(bucketed)} bucketed leaves"
        )
    order = tuple(dict.fromkeys((*ready, *plan.order)))
    caps_bytes = plan.caps_bytes if caps_bytes is None else caps_bytes
    return plan_leaves(plan.leaves, order=order, caps_bytes=caps_bytes, from_back=from_back)


def _name(leaf: int, leaves: Sequence[LeafSpec]) -> str:
    return f"leaf {leaf} ({leaves[leaf].path!r})"


def _check_leaves(leaves: object) -> None:
    if not isinstance(leaves, tuple):
        raise ValueError(f"leaves must be a tuple of LeafSpec, got {reprlib.repr(leaves)}")
    for position, leaf in enumerate(leaves):
        problem = leaf_problem(leaf)
        if problem is not None:
            raise ValueError(f"leaves[{position}] {problem}")
    paths = [leaf.path for leaf in leaves]
    if len(set(paths)) != len(paths):
        [(path, count)] = Counter(paths).most_common(1)
        raise ValueError(f"leaves has the path {path!r} {count} times; paths must differ")


def _check_caps(caps_bytes: object) -> None:
    if not is_counts(caps_bytes, at_least=1) or not caps_bytes:
        raise ValueError(
            "caps_bytes must be a tuple of one or more positive 64-bit ints, "
            f"got {reprlib.repr(caps_bytes)}"
        )


def _check_indices(indices: object, leaves: Sequence[LeafSpec], where: str) -> None:
    """Check that leaf indices are in range, reducible and unique."""
    if not is_counts(indices):
        raise ValueError(
            f"{where} must be a tuple of non-negative leaf indices, got {reprlib.repr(indices)}"
        )
    if indices and max(indices) >= len(leaves):
        raise ValueError(f"{where} holds leaf {max(indices)}, but there are {len(leaves)} leaves")
    if len(set(indices)) != len(indices):
        [(leaf, count)] = Counter(indices).most_common(1)
        raise ValueError(f"{where} holds {_name(leaf, leaves)} {count} times")
    if not {leaves[leaf].dtype for leaf in indices} <= ITEM_BYTES.keys():
        leaf = next(leaf for leaf in indices if not leaves[leaf].reducible)
        raise ValueError(
            f"{where} holds {_name(leaf, leaves)} of dtype {leaves[leaf].dtype!r}, which has no "
            f"gradient to reduce; reducible dtypes are {', '.join(ITEM_BYTES)}"
        )


def _check_buckets(buckets: object, leaves: Sequence[LeafSpec]) -> set[int]:
    """Check the buckets and return the indices of their leaves."""
    if not isinstance(buckets, tuple):
        raise ValueError(f"buckets must be a tuple of Bucket, got {reprlib.repr(buckets)}")
    for position, bucket in enumerate(buckets):
        if type(bucket) is not Bucket:
            raise ValueError(f"buckets[{position}] must be a Bucket, got {reprlib.repr(bucket)}")
        _check_indices(bucket.leaves, leaves, f"buckets[{position}].leaves")
        _check_bucket(bucket, leaves, f"buckets[{position}]")
    bucketed = [leaf for bucket in buckets for leaf in bucket.leaves]
    if len(set(bucketed)) != len(bucketed):
        [(leaf, count)] = Counter(bucketed).most_common(1)
        raise ValueError(f"{_name(leaf, leaves)} is in {count} buckets; at most one is allowed")
    return set(bucketed)


def _check_bucket(bucket: Bucket, leaves: Sequence[LeafSpec], where: str) -> None:
    if not bucket.leaves:
        raise ValueError(f"{where} has no leaves")
    _check_kind(bucket, leaves, where)
    if bucket.sparse and len(bucket.leaves) != 1:
        raise ValueError(f"{where} is sparse and has {len(bucket.leaves)} leaves; it must have 1")
    _check_extent(bucket, leaves, where)


def _check_kind(bucket: Bucket, leaves: Sequence[LeafSpec], where: str) -> None:
    """Check that the leaves of a bucket have its dtype, device and sparsity."""
    kinds = {*map(kind_of, map(leaves.__getitem__, bucket.leaves))}
    stated = (bucket.dtype, bucket.device, bucket.sparse)
    if len(kinds) == 1 and kinds.pop() == stated and type(bucket.sparse) is bool:
        return
    for leaf in bucket.leaves:
        dtype, device, sparse = kind_of(leaves[leaf])
        if dtype != bucket.dtype or device != bucket.device:
            raise ValueError(
                f"{where} has dtype {bucket.dtype!r} on {bucket.device!r}, but "
                f"{_name(leaf, leaves)} has dtype {dtype!r} on {device!r}"
            )
        if sparse is not bucket.sparse:
            raise ValueError(
                f"{where} has sparse={bucket.sparse!r}, but {_name(leaf, leaves)} has "
                f"sparse={sparse!r}"
            )


def _check_extent(bucket: Bucket, leaves: Sequence[LeafSpec], where: str) -> None:
    # Any other layout leaves gaps of uninitialised memory, which would be reduced.
    cap_bytes = bucket.cap_bytes
    *starts, numel = packed_offsets(leaves, bucket.leaves)
    offsets = tuple(starts)
    if not is_counts(bucket.offsets) or bucket.offsets != offsets:
        raise ValueError(
            f"{where}.offsets must be {reprlib.repr(offsets)} for its leaves, "
            f"got {reprlib.repr(bucket.offsets)}"
        )
    if type(bucket.numel) is not int or bucket.numel != numel or bucket.nbytes > MAX_COUNT:
        raise ValueError(
            f"{where}.numel must be {numel} for its leaves, and its bytes must fit 64 bits, "
            f"got {reprlib.repr(bucket.numel)}"
        )
    if not is_counts((cap_bytes,)) or (cap_bytes == 0) is not bucket.sparse:
        raise ValueError(
            f"{where}.cap_bytes must be {'0' if bucket.sparse else 'a positive 64-bit int'} where "
            f"sparse={bucket.sparse}, got {reprlib.repr(cap_bytes)}"
        )


def _check_order(order: object, bucketed: set[int]) -> None:
    if not is_counts(order) or len(order) != len(bucketed) or set(order) != bucketed:
        raise ValueError(
            "order must hold each bucketed leaf once, "
            f"{reprlib.repr(sorted(bucketed))}, got {reprlib.repr(order)}"
        )
