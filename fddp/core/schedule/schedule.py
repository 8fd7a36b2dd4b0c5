"""Schedules: the operations that reduce packed gradients, as values.

A schedule lists the operations of one step in launch order: packing, collectives, the control word,
the conditional repairs that it requests, and unpacking. The runtime executes exactly these
operations. `fddp.make_schedule` builds a schedule; `fddp.check_schedule` verifies one.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from fddp.core.entrance import entrance
from fddp.core.plan.plan import BucketPlan
from fddp.core.protocol.messages import Schema, decode
from fddp.core.schedule.op import (
    Op,
    Region,
    is_collective,
    is_piggybacked,
    is_texts,
    op_problem,
)
from fddp.core.schedule.sum_tree import SumTree
from fddp.core.schedule.topology import Topology as Topology
from fddp.core.schedule.virtual import VirtualRanks
from fddp.core.tables import abridged, html_table, plain_table
from fddp.core.text import counted, leaf_text

Scaling = Literal["before", "after", "average"]
Result = Literal["replicated_mean", "sharded_mean", "replicated"]

# Dtypes of so small a range that late gradients are not added to a sum that is there already.
# Gradients of such a bucket are retained until the control word is reduced, and the bucket is
# reduced again as a whole.
RETAINED_DTYPES = frozenset({"float16"})

_FORMAT = "fddp.Schedule/2"  # name and version: the first field of every document
_OP_SCHEMA: Schema = (
    object,
    object,
    [object],
    (object, object, object, [object]),
    [object],
    object,
)
_SCHEMA: dict[str, Schema] = {
    "format": _FORMAT,
    "plan": str,
    "axes": [(str, object)],
    "ops": [_OP_SCHEMA],
    "wire_dtypes": [object],
    "scaling": object,
    "result": object,
    "deterministic": object,
}
_VIRTUAL: Schema = (int, [[(int, int)]], [int])
_VIRTUAL_SCHEMA: Schema = {**_SCHEMA, "virtual": _VIRTUAL}
_VIRTUAL_FIELD = '"virtual":'  # in no other document: quotes of nested ones are escaped
_HEADER = ("op", "kind", "bucket", "along", "buffer", "elements", "shard", "when", "after")
_NUMERIC_COLUMNS = (0, 2)
_SHOWN_IN_HTML = 60


@dataclass(frozen=True, repr=False)
class Schedule:
    """Operations of one step in launch order, the same on every rank.

    Construction validates types only. `check_schedule` verifies that the operations produce the
    stated result.

    Attributes:
        plan: bucket plan.
        topology: ranks and axes.
        ops: operations in launch order.
        wire_dtypes: dtype in which each bucket is reduced.
        scaling: division by the number of ranks: "before" the reduction, as in
            DistributedDataParallel, "after" it, or "average" as part of the collective.
        result: postcondition. "replicated_mean" leaves the mean over all ranks on each rank,
            "sharded_mean" a shard of the mean, "replicated" the shards of all ranks.
        deterministic: True if sums are associated in the one order given by the topology, in
            float32 or wider, so that the bits do not depend on plan, algorithm or transport.
        virtual: virtual ranks whose gradients are averaged, and the association of their sum; None
            if each rank has one gradient. See [Note: virtual ranks].

    Raises:
        ValueError: a field has the wrong type.

    Example:
        >>> from fddp.core.plan.plan import LeafSpec, plan_leaves
        >>> from fddp.core.schedule.builder import make_schedule
        >>> plan = plan_leaves([LeafSpec("w", (3,), "float32")], order=[0], caps_bytes=[1])
        >>> schedule = make_schedule(plan, Topology(world=2))
        >>> Schedule.from_json(schedule.to_json()) == schedule
        True
    """

    plan: BucketPlan
    topology: Topology
    ops: tuple[Op, ...]
    wire_dtypes: tuple[str, ...]
    scaling: Scaling = "before"
    result: Result = "replicated_mean"
    deterministic: bool = False
    virtual: VirtualRanks | None = None

    def __post_init__(self) -> None:
        for name, kind in (("plan", BucketPlan), ("topology", Topology), ("ops", tuple)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ValueError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
        for position, op in enumerate(self.ops):
            problem = op_problem(op)
            if problem is not None:
                raise ValueError(f"ops[{position}] {problem}")
        buckets = len(self.plan.buckets)
        if not is_texts(self.wire_dtypes) or len(self.wire_dtypes) != buckets:
            raise ValueError(
                f"wire_dtypes must be a tuple of {buckets} dtype names, one for each bucket, "
                f"got {self.wire_dtypes!r}"
            )
        for name, choice in (("scaling", Scaling), ("result", Result)):
            value, choices = getattr(self, name), get_args(choice)
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if not isinstance(self.deterministic, bool):
            raise ValueError(f"deterministic must be True or False, got {self.deterministic!r}")
        if not isinstance(self.virtual, (VirtualRanks, type(None))):
            raise ValueError(f"virtual must be a VirtualRanks or None, got {self.virtual!r}")

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[type[Schedule], tuple[object, ...]]:
        # Drops cached properties, and validates the fields again on loading.
        return type(self), tuple(getattr(self, name) for name in self.__dataclass_fields__)

    @cached_property
    def sequence(self) -> tuple[int, ...]:
        """Indices of the buckets that are packed during backward, in launch order."""
        packs = (op.bucket for op in self.ops if op.kind == "pack" and op.when == "always")
        return tuple(dict.fromkeys(packs))

    @cached_property
    def retained(self) -> frozenset[int]:
        """Indices of the buckets whose gradients are kept until the control word is reduced."""
        return frozenset(op.bucket for op in self.ops if op.when == "again")

    @cached_property
    def buffer_numels(self) -> tuple[int, ...]:
        """Number of elements of each bucket's buffer, including padding for shards."""
        numels = [bucket.numel for bucket in self.plan.buckets]
        for op in self.ops:
            if op.kind != "control" and 0 <= op.bucket < len(numels):
                numels[op.bucket] = max(numels[op.bucket], op.region.stop)
        return tuple(numels)

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Distinct axes of the collectives, in order of first use."""
        return tuple(dict.fromkeys(op.axes for op in self.ops if is_collective(op)))

    @cached_property
    def control(self) -> int:
        """Position of the control word; -1 if absent."""
        return next((i for i, op in enumerate(self.ops) if op.kind == "control"), -1)

    @cached_property
    def piggyback_op(self) -> int:
        """Position of the all-reduce that carries the control word; -1 if it is separate."""
        control = self.control
        if control < 0 or not is_piggybacked(self.ops[control]):
            return -1
        bucket = self.ops[control].bucket
        for position in range(control + 1, len(self.ops)):
            op = self.ops[position]
            is_sum = op.kind == "all_reduce" and op.when == "always"
            if is_sum and op.bucket == bucket and control in op.deps:
                return position
        return -1

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the schedule's JSON, in hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @cached_property
    def shared_digest(self) -> str:
        """SHA-256 of the fields that ranks must agree on: all but leaves in no bucket."""
        return hashlib.sha256(self._json(self.plan.shared_digest).encode()).hexdigest()

    def to_json(self) -> str:
        """Return schedule and plan as one line of JSON. `from_json` restores an equal schedule."""
        return self._json(self.plan.to_json())

    def _json(self, plan: str) -> str:
        document: dict[str, object] = {
            "format": _FORMAT,
            "plan": plan,
            "axes": self.topology.axes,
            "ops": self.ops,
            "wire_dtypes": self.wire_dtypes,
            "scaling": self.scaling,
            "result": self.result,
            "deterministic": self.deterministic,
        }
        if self.virtual is not None:
            document["virtual"] = self.virtual.document
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    @entrance
    def from_json(cls, text: str) -> Schedule:
        """Restore a schedule from `to_json`. `check_schedule` verifies its operations.

        Raises:
            ValueError: the text is malformed; the message names the field.
        """
        is_virtual = isinstance(text, str) and _VIRTUAL_FIELD in text
        document = decode(text, _VIRTUAL_SCHEMA if is_virtual else _SCHEMA, "schedule JSON")
        axes = dict(document["axes"])
        if len(axes) < len(document["axes"]):
            names = [name for name, _ in document["axes"]]
            raise ValueError(f"schedule JSON: .axes needs unique names, got {reprlib.repr(names)}")
        return cls(
            BucketPlan.from_json(document["plan"]),
            Topology(**axes),
            tuple(map(_parse_op, document["ops"])),
            tuple(document["wire_dtypes"]),
            **{name: document[name] for name in ("scaling", "result", "deterministic")},
            virtual=VirtualRanks.from_document(document["virtual"]) if is_virtual else None,
        )

    def describe(self, position: int) -> str:
        """Describe an operation for error messages.

        Example:
            >>> from fddp.core.plan.plan import LeafSpec, plan_leaves
            >>> from fddp.core.schedule.builder import make_schedule
            >>> plan = plan_leaves([LeafSpec("w", (3,), "float32")], order=[0], caps_bytes=[1])
            >>> make_schedule(plan, Topology(world=2)).describe(2)
            "op 2 (all_reduce of bucket 0, leaf 'w', along world)"
        """
        op = self.ops[position]
        along = f", along {' and '.join(op.axes)}" if op.axes else ""
        if op.kind == "control":
            where = (
                f", in the tail of {self.describe_bucket(op.bucket)}" if is_piggybacked(op) else ""
            )
            return f"op {position} (the control word{where}{along})"
        repair = " (repair)" if op.region.buffer == "repair" else ""
        return f"op {position} ({op.kind} of {self.describe_bucket(op.bucket)}{repair}{along})"

    def describe_bucket(self, bucket: int) -> str:
        """Describe a bucket by its index, first leaf and last leaf."""
        if not 0 <= bucket < len(self.plan.buckets):
            return f"bucket {bucket}, which is not in the plan"
        leaves, paths = self.plan.buckets[bucket].leaves, self.plan.paths
        if len(leaves) == 1:
            return f"bucket {bucket}, {leaf_text(paths[leaves[0]])}"
        return f"bucket {bucket}, leaves {paths[leaves[0]]!r} to {paths[leaves[-1]]!r}"

    def __repr__(self) -> str:
        return (
            f"Schedule({counted(len(self.ops), 'operation')}, "
            f"{counted(len(self.plan.buckets), 'bucket')}, "
            f"{self.topology}, scaling={self.scaling!r}, result={self.result!r}"
            f"{', deterministic=True' if self.deterministic else ''}"
            f"{'' if self.virtual is None else f', virtual_ranks={self.virtual.count}'})"
        )

    def __str__(self) -> str:
        """Table of the operations."""
        rows = map(self._row, range(len(self.ops)))
        parts = [repr(self), plain_table(_HEADER, rows, _NUMERIC_COLUMNS)]
        if self.virtual is not None:
            parts.append(str(self.virtual))
            for block, axes in summed_blocks(self).items():
                parts.append(self.virtual.describe_blocks(block, " and ".join(axes)))
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        left_out = ("…", "({} more operations)")
        rows = abridged(len(self.ops), self._row, _SHOWN_IN_HTML, left_out)
        return html_table(repr(self), _HEADER, rows)

    def _row(self, position: int) -> tuple[str, ...]:
        op = self.ops[position]
        return (
            str(position),
            op.kind,
            "-" if op.bucket < 0 else str(op.bucket),
            " x ".join(op.axes) or "-",
            op.region.buffer,
            "-" if op.kind == "control" else f"{op.region.start}:{op.region.stop}",
            " / ".join(op.region.shard) or "-",
            op.when,
            ", ".join(map(str, op.deps)) or "-",
        )


def summands(schedule: Schedule) -> int:
    """Return the number of gradients in the mean: that of ranks, or of virtual ranks."""
    virtual = schedule.virtual
    return schedule.topology.world_size if virtual is None else virtual.count


def association(schedule: Schedule, op: Op, rank: int) -> SumTree | None:
    """Return the association of the sum of a reduce-scatter, over the ranks that take part with
    `rank`; None if it is left to the backend, or there is only one rank. See
    [Note: one association] in `sum_tree.py`.

    Example:
        >>> import torch
        >>> from fddp import Topology, make_schedule, plan_buckets
        >>> plan = plan_buckets({"a": torch.zeros(8)})
        >>> schedule = make_schedule(plan, Topology(host=2, local=2), deterministic=True)
        >>> [association(schedule, op, 0) for op in schedule.ops if op.kind == "reduce_scatter"][0]
        SumTree(summands=(1, 1, 1, 1), additions=(0, 1, 0, 2))
    """
    topology = schedule.topology
    block, parts = topology.size(op.region.shard), topology.size(op.axes)
    if not schedule.deterministic or parts == 1:
        return None
    if schedule.virtual is not None:
        return schedule.virtual.stage(block, parts)[rank // (block * parts)]
    return SumTree.along([size for name, size in topology.axes if name in op.axes])


def summed_blocks(schedule: Schedule) -> dict[int, tuple[str, ...]]:
    """Return the numbers of neighbouring ranks whose sums over virtual ranks are formed first, and
    the axes along which these are reduced next; see [Note: virtual ranks]."""
    topology = schedule.topology
    found = {
        topology.size(op.region.shard): op.axes
        for op in schedule.ops
        if schedule.virtual is not None
        and op.kind == "reduce_scatter"
        and topology.size(op.axes) > 1
    }
    return {block: found[block] for block in sorted(found) if block > 1}


def _parse_op(op: list[Any]) -> Op:
    kind, bucket, axes, (buffer, start, stop, shard), deps, when = op
    region = Region(buffer, start, stop, tuple(shard))
    return Op(kind, bucket, tuple(axes), region, tuple(deps), when)
