"""Schedules: the operations that take packed gradients to their mean, as values.

A schedule lists, in launch order, what every rank carries out in one step: packing, collectives,
the control word, the conditional repairs that it decides on, and unpacking. The runtime executes
these values and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from fddp.plan import BucketPlan

Kind = Literal["pack", "all_reduce", "add", "control", "gather", "unpack"]
When = Literal["always", "late", "again"]
Buffer = Literal["bucket", "repair", "control"]

# Formats whose sums are scaled so tightly that a surprise in the weights can't be corrected after
# the reduction. Their contributions are kept until the control word is in, and such a bucket is
# then reduced again as a whole.
RETAINED_DTYPES = frozenset({"float16"})


@dataclass(frozen=True, init=False)
class Topology:
    """The ranks of a group as named axes, outermost first.

    Attributes:
        axes: pairs of name and size; the world size is the product of the sizes.

    Raises:
        ValueError: no axis, or a size below 1.

    Example:
        >>> Topology(host=4, local=8).world_size
        32
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, **axes: int) -> None:
        if not axes:
            raise ValueError("a topology needs at least one axis, such as Topology(world=4)")
        for name, size in axes.items():
            if size < 1:
                raise ValueError(f"axis {name!r} needs a size of at least 1, got {size}")
        object.__setattr__(self, "axes", tuple(axes.items()))

    def __repr__(self) -> str:
        return f"Topology({', '.join(f'{name}={size}' for name, size in self.axes)})"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)


class Op(NamedTuple):
    """One operation.

    Attributes:
        kind: "pack" contributions into a buffer, "all_reduce" a buffer over `axis`, "add" the
            repair buffer to the bucket, reduce the "control" word, "gather" a sparse bucket's
            indices and values over `axis`, or "unpack" results from a bucket.
        bucket: the bucket's index; -1 for the control word.
        axis: name of the axis of a collective; "" for what a rank does alone.
        buffer: what the operation works on.
        deps: positions of operations that must have finished.
        when: "always"; "late" if the control word says that the bucket needs a repair of what came
            after its launch; "again" if it says that a retained bucket must be reduced anew.
    """

    kind: Kind
    bucket: int
    axis: str
    buffer: Buffer
    deps: tuple[int, ...]
    when: When = "always"


@dataclass(frozen=True)
class Schedule:
    """What every rank carries out in one step, in launch order.

    Attributes:
        plan_digest: `shared_digest` of the plan that the bucket indices refer to.
        topology: the axes that operations name.
        ops: the operations.
        wire_dtypes: for each bucket, the dtype in which it is reduced.
        scaling: where the division happens; "before" the reduction, as DistributedDataParallel.
        result: the postcondition; "replicated_mean" leaves the mean of all ranks on each.
    """

    plan_digest: str
    topology: Topology
    ops: tuple[Op, ...]
    wire_dtypes: tuple[str, ...]
    scaling: Literal["before"] = "before"
    result: Literal["replicated_mean"] = "replicated_mean"

    @cached_property
    def sequence(self) -> tuple[int, ...]:
        """The buckets that launch while backward runs, in launch order."""
        return tuple(op.bucket for op in self.ops if op.kind == "pack" and op.when == "always")

    @cached_property
    def retained(self) -> frozenset[int]:
        """The buckets whose contributions are kept until the control word is in."""
        return frozenset(op.bucket for op in self.ops if op.when == "again")

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the schedule's JSON, hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The schedule as one line of JSON with sorted keys."""
        document: dict[str, Any] = {
            "plan_digest": self.plan_digest,
            "axes": self.topology.axes,
            "ops": self.ops,
            "wire_dtypes": self.wire_dtypes,
            "scaling": self.scaling,
            "result": self.result,
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"))

    def __str__(self) -> str:
        """A table of the operations."""
        rows = [f"{'op':>4}  {'kind':<10} {'bucket':>6}  {'axis':<6} {'when':<7} after"]
        for position, op in enumerate(self.ops):
            bucket = op.bucket if op.bucket >= 0 else "-"
            after = ", ".join(map(str, op.deps)) or "-"
            axis = op.axis or "-"
            rows.append(f"{position:>4}  {op.kind:<10} {bucket:>6}  {axis:<6} {op.when:<7} {after}")
        return "\n".join(rows)


def make_schedule(
    plan: BucketPlan,
    topology: Topology,
    *,
    algorithm: Literal["all_reduce"] = "all_reduce",
    reduce_dtype: str | None = None,
) -> Schedule:
    """The schedule that averages the plan's buckets over all ranks of the topology.

    Dense buckets are packed and all-reduced in plan order; the control word follows the last of
    them; then come the repairs, should the control word ask for any, and the sparse buckets, whose
    gradients (embeddings, as a rule) arrive last anyway.

    Args:
        plan: the bucket plan.
        topology: the ranks.
        algorithm: "all_reduce", the flat all-reduce.
        reduce_dtype: dtype in which float16 and bfloat16 buckets are reduced ("float32" or
            "float64"); None reduces each bucket in its own dtype.

    Raises:
        ValueError: an unknown algorithm or reduce_dtype, or a topology of several axes.

    Example:
        >>> from fddp.plan import LeafSpec, plan_leaves
        >>> plan = plan_leaves([LeafSpec("w", (3,), "float32")], order=[0], caps_bytes=[1])
        >>> schedule = make_schedule(plan, Topology(world=2))
        >>> [op.kind for op in schedule.ops if op.when == "always"]
        ['pack', 'all_reduce', 'control', 'unpack']
    """
    if algorithm != "all_reduce":
        raise ValueError(f"algorithm must be 'all_reduce', got {algorithm!r}")
    if reduce_dtype not in (None, "float32", "float64"):
        raise ValueError(f"reduce_dtype must be float32 or float64, got {reduce_dtype!r}")
    wire_dtypes = tuple(_wire_dtype(bucket.dtype, reduce_dtype) for bucket in plan.buckets)
    dense = [b for b, bucket in enumerate(plan.buckets) if not bucket.sparse]
    sparse = [b for b, bucket in enumerate(plan.buckets) if bucket.sparse]
    ops: list[Op] = []

    def append(op: Op) -> int:
        ops.append(op)
        return len(ops) - 1

    if len(topology.axes) != 1:
        raise ValueError(f"a flat all-reduce needs a topology of one axis, got {topology}")
    axis = topology.axes[0][0]
    reduced: dict[int, int] = {}
    for b in dense:
        packed = append(Op("pack", b, "", "bucket", ()))
        reduced[b] = append(Op("all_reduce", b, axis, "bucket", (packed,)))
    last_pack = (reduced[dense[-1]] - 1,) if dense else ()
    control = append(Op("control", -1, axis, "control", last_pack))
    for b in dense:
        whole = wire_dtypes[b] in RETAINED_DTYPES
        reduced[b] = _append_repair(ops, b, axis, (reduced[b], control), whole=whole)
    for b in sparse:
        reduced[b] = append(Op("gather", b, axis, "bucket", (control,)))
    for b in range(len(plan.buckets)):
        append(Op("unpack", b, "", "bucket", (reduced[b],)))
    return Schedule(plan.shared_digest, topology, tuple(ops), wire_dtypes)


def _append_repair(
    ops: list[Op], bucket: int, axis: str, deps: tuple[int, ...], *, whole: bool
) -> int:
    """Appends the conditional operations that mend a late bucket; returns the last position."""
    first = len(ops)
    if whole:
        ops.append(Op("pack", bucket, "", "bucket", deps, "again"))
        ops.append(Op("all_reduce", bucket, axis, "bucket", (first,), "again"))
    else:
        ops.append(Op("pack", bucket, "", "repair", deps, "late"))
        ops.append(Op("all_reduce", bucket, axis, "repair", (first,), "late"))
        ops.append(Op("add", bucket, "", "bucket", (first + 1,), "late"))
    return len(ops) - 1


def _wire_dtype(dtype: str, reduce_dtype: str | None) -> str:
    return reduce_dtype if reduce_dtype and dtype in ("float16", "bfloat16") else dtype
