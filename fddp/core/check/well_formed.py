"""Checks of single operations, and of their number per bucket."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fddp.core.check.findings import Location, fail_bucket, join_names, nontrivial
from fddp.core.plan.leaf import ITEM_BYTES
from fddp.core.schedule.op import (
    CONTROL_REGION,
    Buffer,
    Kind,
    Op,
    When,
    is_collective,
    is_piggybacked,
)
from fddp.core.schedule.schedule import Schedule
from fddp.core.text import counted

_REDUCED: tuple[tuple[Buffer, When], ...] = (
    ("bucket", "always"),
    ("bucket", "late"),
    ("bucket", "again"),
    ("repair", "late"),
)
# Allowed buffers and conditions. The repair buffer exists only if gradients were late.
_PLACES: Mapping[Kind, tuple[tuple[Buffer, When], ...]] = MappingProxyType(
    {
        "pack": (("bucket", "always"), ("repair", "late"), ("bucket", "again")),
        "stage": (("bucket", "always"),),
        "all_reduce": _REDUCED,
        "reduce_scatter": _REDUCED,
        "all_gather": _REDUCED,
        "add": (("bucket", "late"),),
        "control": (("control", "always"),),
        "gather": (("bucket", "always"),),
        "unpack": (("bucket", "always"),),
    }
)

# Wire dtypes that hold every value of a bucket's dtype.
_HOLDERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "float16": ("float16", "float32", "float64"),
        "bfloat16": ("bfloat16", "float32", "float64"),
        "float32": ("float32", "float64"),
        "float64": ("float64",),
        "complex64": ("complex64", "complex128"),
        "complex128": ("complex128",),
    }
)
assert _HOLDERS.keys() == ITEM_BYTES.keys()
_NARROW = frozenset({"float16", "bfloat16"})

# Largest padding in elements, so that a malicious schedule can't request excessive memory. 2**16 is
# the coarsest alignment in use.
_ALIGNMENT = 2**16


def check_form(schedule: Schedule) -> dict[int, list[int]]:
    """Check each operation, and return the positions of the operations of each bucket.

    Raises:
        ScheduleError: an operation is invalid, missing or repeated.
    """
    _check_dtypes(schedule)
    by_bucket: dict[int, list[int]] = {b: [] for b in range(len(schedule.plan.buckets))}
    for position, op in enumerate(schedule.ops):
        at = Location(schedule, position)
        _check_axes(at, op)
        if op.bucket not in by_bucket and (op.kind != "control" or is_piggybacked(op)):
            at.fail(f"bucket must be an index of the {counted(len(by_bucket), 'bucket')}")
        if op.kind == "control":
            _check_control(at, op)
            continue
        if schedule.deterministic:
            _check_deterministic(at, op)
        _check_place(at, op)
        _check_region(at, op)
        by_bucket[op.bucket].append(position)
    for bucket, positions in by_bucket.items():
        _check_bucket(schedule, bucket, positions)
    return by_bucket


def _check_dtypes(schedule: Schedule) -> None:
    for b, wire in enumerate(schedule.wire_dtypes):
        dtype = schedule.plan.buckets[b].dtype
        problem = None
        if wire not in _HOLDERS[dtype]:
            problem = f"can't hold its {dtype} elements; use {' or '.join(_HOLDERS[dtype])}"
        elif schedule.deterministic and wire in _NARROW:
            problem = (
                "rounds partial sums, but the schedule is deterministic; use float32 or float64"
            )
        if problem is not None:
            fail_bucket(schedule, b, f"the wire dtype {wire} {problem}")


def _check_deterministic(at: Location, op: Op) -> None:
    """Reject operations whose bits depend on more than the topology."""
    if op.kind == "all_reduce":
        at.fail(
            "its order of summation depends on the transport, but the schedule is deterministic; "
            "use reduce_scatter and all_gather"
        )
    if op.kind == "stage":
        at.fail(
            "a communication hook does not fix the order of its sums, but the schedule is "
            "deterministic; remove it"
        )
    if op.when == "late":
        at.fail(
            "it adds late gradients to a sum, but the schedule is deterministic; reduce the whole "
            "bucket 'again'"
        )
    if at.schedule.scaling == "average" and op.kind == "reduce_scatter":
        at.fail(
            "averaging rounds partial sums, but the schedule is deterministic; set scaling to "
            "'before' or 'after'"
        )


def _check_axes(at: Location, op: Op) -> None:
    names = at.schedule.topology.names
    for text, axes in (("it runs along", op.axes), ("it is sharded along", op.region.shard)):
        unknown = [axis for axis in axes if axis not in names]
        if unknown:
            at.fail(f"{text} {unknown[0]!r}; the axes are {join_names(names)}")
        if len(set(axes)) < len(axes):
            at.fail(f"{text} {join_names(axes)}; name each axis once")
    if is_collective(op):
        ordered = tuple(axis for axis in names if axis in op.axes)
        if op.axes != ordered:
            at.fail(f"its axes must be in topology order: {join_names(ordered)}")
        if not op.axes:
            at.fail(f"a collective needs axes, of {join_names(names)}")
    elif op.axes:
        at.fail("a local operation must have no axes; remove them")


def _check_control(at: Location, op: Op) -> None:
    if op.region != CONTROL_REGION or op.when != "always":
        at.fail(
            f"its region must be {CONTROL_REGION} and its condition 'always', got {op.region} and "
            f"{op.when!r}"
        )
    if not is_piggybacked(op):
        _check_whole_world(at, op)


def _check_whole_world(at: Location, op: Op) -> None:
    names = at.schedule.topology.names
    if nontrivial(at.schedule, op.axes) != nontrivial(at.schedule, names):
        missing = tuple(axis for axis in nontrivial(at.schedule, names) if axis not in op.axes)
        at.fail(
            f"all ranks must take part, but those along {join_names(missing)} do not; run it along "
            f"{join_names(names)}"
        )


def _check_place(at: Location, op: Op) -> None:
    """Check kind, buffer and condition, and operations on sparse buckets."""
    places = _PLACES[op.kind]
    if (op.region.buffer, op.when) not in places:
        allowed = " or ".join(f"({buffer!r}, {when!r})" for buffer, when in places)
        at.fail(
            f"its buffer and condition are ({op.region.buffer!r}, {op.when!r}); {op.kind} requires "
            f"{allowed}"
        )
    if at.schedule.result == "replicated" and op.when != "always":
        at.fail(
            f"a schedule with the result 'replicated' gathers shards, which are never late; remove "
            f"the {op.when!r} operation"
        )
    sparse = at.schedule.plan.buckets[op.bucket].sparse
    if sparse and op.kind not in ("gather", "unpack"):
        at.fail("its bucket is sparse; only gather and unpack it")
    if not sparse and op.kind == "gather":
        at.fail("its bucket is dense; pack and reduce it instead")
    if op.kind == "gather":
        _check_whole_world(at, op)
    if sparse and at.schedule.result != "replicated_mean":
        at.fail(
            f"a sparse bucket is always a whole mean on each rank, but the stated result is "
            f"{at.schedule.result!r}; plan its leaf as dense, or exclude it"
        )


def _check_region(at: Location, op: Op) -> None:
    start, stop, shard = op.region.start, op.region.stop, op.region.shard
    if not 0 <= start <= stop:
        at.fail(f"its elements {start}:{stop} must satisfy 0 <= start <= stop")
    numel = at.schedule.plan.buckets[op.bucket].numel
    limit = padding_limit(at.schedule, op.bucket)
    if stop > limit:
        at.fail(
            f"its elements {start}:{stop} exceed the {numel} of its bucket by too much; the limit "
            f"with padding is {limit}"
        )
    own = shard if op.kind != "reduce_scatter" else (*shard, *op.axes)
    parts = at.schedule.topology.size(own)
    if (stop - start) % parts:
        at.fail(
            f"its {stop - start} elements can't be cut into {parts} equal chunks along "
            f"{join_names(own)}; pad the bucket to a multiple of {parts}"
        )
    if op.kind == "gather" and nontrivial(at.schedule, shard):
        at.fail(
            f"it gathers the whole bucket on every rank, but its region is sharded along "
            f"{join_names(shard)}; set shard=()"
        )
    is_whole = op.kind in ("pack", "unpack", "gather") and not nontrivial(at.schedule, shard)
    if is_whole and (start > 0 or stop < numel):
        at.fail(
            f"its elements are {start}:{stop} of {numel}; a bucket that is not sharded must be "
            f"{op.kind}ed as a whole"
        )


def padding_limit(schedule: Schedule, bucket: int) -> int:
    """Return the largest number of elements of a bucket with padding."""
    numel = schedule.plan.buckets[bucket].numel
    return 2 * numel + max(schedule.topology.world_size, _ALIGNMENT)


def _check_bucket(schedule: Schedule, bucket: int, positions: list[int]) -> None:
    """Check that a bucket is packed and unpacked, each once."""
    ops = schedule.ops
    whens = {ops[i].when for i in positions}
    if {"late", "again"} <= whens:
        position = next(i for i in positions if ops[i].when == "late")
        Location(schedule, position).fail(
            "its bucket is also reduced 'again' as a whole, including late gradients; remove one "
            "of the two"
        )
    seen: dict[tuple[Kind, When], int] = {}
    for i in positions:
        op = ops[i]
        if op.kind in ("pack", "unpack", "gather") and not nontrivial(schedule, op.region.shard):
            first = seen.setdefault((op.kind, op.when), i)
            if first != i:
                Location(schedule, i).fail(
                    f"op {first} has already {op.kind}ed the whole bucket; remove one of the two"
                )
    kinds = {ops[i].kind for i in positions if ops[i].when == "always"}
    if not schedule.plan.buckets[bucket].sparse and "pack" not in kinds:
        fail_bucket(schedule, bucket, "no operation packs it; insert one before its others")
    if "unpack" not in kinds:
        fail_bucket(schedule, bucket, "no operation unpacks it; append one")
