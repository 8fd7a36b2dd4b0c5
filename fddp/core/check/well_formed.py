"""What holds of each operation of a schedule by itself, and of how many there are of a kind."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fddp.core.check.findings import fail, fail_bucket, in_words, wide
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

_REDUCED: tuple[tuple[Buffer, When], ...] = (
    ("bucket", "always"),
    ("bucket", "late"),
    ("bucket", "again"),
    ("repair", "late"),
)
# The repair's buffer exists only where something came late.
_PLACES: Mapping[Kind, tuple[tuple[Buffer, When], ...]] = MappingProxyType(
    {
        "pack": (("bucket", "always"), ("repair", "late"), ("bucket", "again")),
        "all_reduce": _REDUCED,
        "reduce_scatter": _REDUCED,
        "all_gather": _REDUCED,
        "add": (("bucket", "late"),),
        "control": (("control", "always"),),
        "gather": (("bucket", "always"),),
        "unpack": (("bucket", "always"),),
    }
)

# The formats that hold every value of a bucket's dtype, and that it can be cast to and from.
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

# Elements that the padding of the smallest bucket may have, so that no document asks for memory
# out of proportion; 2**16 is the coarsest alignment in use.
_ALIGNMENT = 2**16


def check_form(schedule: Schedule) -> dict[int, list[int]]:
    """Judges operations one by one; those of each bucket, by position.

    Raises:
        ScheduleError: an operation that can't be carried out, or one too many or too few.
    """
    _check_dtypes(schedule)
    by_bucket: dict[int, list[int]] = {b: [] for b in range(len(schedule.plan.buckets))}
    for position, op in enumerate(schedule.ops):
        _check_axes(schedule, position, op)
        if op.kind == "control":
            _check_control(schedule, position, op)
            continue
        if op.bucket not in by_bucket:
            fail(schedule, position, f"name one of the plan's {len(by_bucket)} buckets")
        if schedule.deterministic:
            _check_deterministic(schedule, position, op)
        _check_place(schedule, position, op)
        _check_region(schedule, position, op)
        by_bucket[op.bucket].append(position)
    for bucket, positions in by_bucket.items():
        _check_bucket(schedule, bucket, positions)
    return by_bucket


def _check_dtypes(schedule: Schedule) -> None:
    for b, (bucket, wire) in enumerate(
        zip(schedule.plan.buckets, schedule.wire_dtypes, strict=True)
    ):
        holders = _HOLDERS[bucket.dtype]
        if wire not in holders:
            fail_bucket(
                schedule,
                b,
                f"{wire} on the wire does not hold its {bucket.dtype}; choose "
                f"{' or '.join(holders)}",
            )
        if schedule.deterministic and wire in _NARROW:
            fail_bucket(
                schedule,
                b,
                f"deterministic sums are not rounded on the way, and {wire} on the wire does; "
                f"choose float32 or float64",
            )


def _check_deterministic(schedule: Schedule, position: int, op: Op) -> None:
    """What would let the bits depend on more than the topology."""
    if op.kind == "all_reduce":
        fail(
            schedule,
            position,
            "it leaves the order of the sum to the transport, and the schedule is deterministic; "
            "reduce_scatter and all_gather instead",
        )
    if op.when == "late":
        fail(
            schedule,
            position,
            "what came late would be added to a sum, and the schedule is deterministic; reduce the "
            "bucket 'again' as a whole",
        )
    if schedule.scaling == "average" and op.kind == "reduce_scatter":
        fail(
            schedule,
            position,
            "it averages, which rounds on the way, and the schedule is deterministic; scale "
            "'before' or 'after'",
        )


def _check_axes(schedule: Schedule, position: int, op: Op) -> None:
    names = schedule.topology.names
    for text, axes in (("it runs along", op.axes), ("it is divided along", op.region.shard)):
        unknown = [axis for axis in axes if axis not in names]
        if unknown:
            fail(schedule, position, f"{text} {unknown[0]!r}; the axes are {in_words(names)}")
        if len(set(axes)) < len(axes):
            fail(schedule, position, f"{text} {in_words(axes)}; name each axis once")
    if is_collective(op):
        ordered = tuple(axis for axis in names if axis in op.axes)
        if op.axes != ordered:
            fail(
                schedule,
                position,
                f"name its axes in the topology's order, {in_words(ordered)}",
            )
        if not op.axes:
            fail(schedule, position, f"it needs axes to run along, of {in_words(names)}")
    elif op.axes:
        fail(schedule, position, "each rank does this by itself; leave its axes empty")


def _check_control(schedule: Schedule, position: int, op: Op) -> None:
    if op.region != CONTROL_REGION or op.when != "always":
        fail(
            schedule,
            position,
            f"it has no elements that a schedule knows, and always runs: {CONTROL_REGION} and "
            f"'always' are due, got {op.region} and {op.when!r}",
        )
    if not is_piggybacked(op):
        _check_whole_world(schedule, position, op)
    elif op.bucket >= len(schedule.plan.buckets):
        fail(schedule, position, f"name one of the plan's {len(schedule.plan.buckets)} buckets")


def _check_whole_world(schedule: Schedule, position: int, op: Op) -> None:
    names = schedule.topology.names
    if wide(schedule, op.axes) != wide(schedule, names):
        missing = tuple(axis for axis in wide(schedule, names) if axis not in op.axes)
        fail(
            schedule,
            position,
            f"all ranks must meet in it, and those along {in_words(missing)} do not; let it run "
            f"along {in_words(names)}",
        )


def _check_place(schedule: Schedule, position: int, op: Op) -> None:
    """Kind, buffer, condition, and whether the bucket is sparse."""
    places = _PLACES[op.kind]
    if (op.region.buffer, op.when) not in places:
        allowed = " or ".join(f"({buffer!r}, {when!r})" for buffer, when in places)
        fail(
            schedule,
            position,
            f"it has ({op.region.buffer!r}, {op.when!r}) for buffer and condition; {op.kind} goes "
            f"with {allowed}",
        )
    if schedule.result == "replicated" and op.when != "always":
        fail(
            schedule,
            position,
            f"shards are all there from the start, so that nothing is {op.when!r} where the result "
            f"is 'replicated'; leave it out",
        )
    sparse = schedule.plan.buckets[op.bucket].sparse
    if sparse and op.kind not in ("gather", "unpack"):
        fail(schedule, position, "its bucket is sparse: gather and unpack it, nothing else")
    if not sparse and op.kind == "gather":
        fail(schedule, position, "its bucket is dense: pack and reduce it instead")
    if op.kind == "gather":
        _check_whole_world(schedule, position, op)
    if sparse and schedule.result != "replicated_mean":
        fail(
            schedule,
            position,
            f"a sparse bucket ends as the whole mean on each rank, and {schedule.result!r} is "
            f"stated; plan its leaf as a dense one, or leave it out",
        )


def _check_region(schedule: Schedule, position: int, op: Op) -> None:
    start, stop, shard = op.region.start, op.region.stop, op.region.shard
    if not 0 <= start <= stop:
        fail(
            schedule,
            position,
            f"its elements {start}:{stop} must start at 0 or above, and not stop before",
        )
    numel = schedule.plan.buckets[op.bucket].numel
    limit = 2 * numel + max(schedule.topology.world_size, _ALIGNMENT)
    if stop > limit:
        fail(
            schedule,
            position,
            f"its elements {start}:{stop} reach far past the {numel} of its bucket; pad to "
            f"{limit} at most",
        )
    own = shard if op.kind != "reduce_scatter" else (*shard, *op.axes)
    parts = schedule.topology.size(own)
    if (stop - start) % parts:
        fail(
            schedule,
            position,
            f"its {stop - start} elements can't be cut into {parts} equal chunks along "
            f"{in_words(own)}; pad the bucket to a multiple",
        )
    if op.kind == "gather" and wide(schedule, shard):
        fail(
            schedule,
            position,
            f"it leaves everything on every rank, and its elements are divided along "
            f"{in_words(shard)}; leave the shard empty",
        )
    is_whole = op.kind in ("pack", "unpack", "gather") and not wide(schedule, shard)
    if is_whole and (start > 0 or stop < numel):
        fail(
            schedule,
            position,
            f"it has the elements {start}:{stop} of {numel}; what is not divided is "
            f"{op.kind}ed at once, as a whole",
        )


def _check_bucket(schedule: Schedule, bucket: int, positions: list[int]) -> None:
    """What a rank brings can be taken once, and results be handed out once."""
    ops = schedule.ops
    whens = {ops[i].when for i in positions}
    if {"late", "again"} <= whens:
        position = next(i for i in positions if ops[i].when == "late")
        fail(
            schedule,
            position,
            "its bucket is also reduced 'again' as a whole, what came late included; keep one of "
            "the two",
        )
    seen: dict[tuple[Kind, When], int] = {}
    for i in positions:
        op = ops[i]
        if op.kind in ("pack", "unpack", "gather") and not wide(schedule, op.region.shard):
            first = seen.setdefault((op.kind, op.when), i)
            if first != i:
                fail(
                    schedule,
                    i,
                    f"op {first} has {op.kind}ed all of its bucket already; keep one of the two",
                )
    kinds = {ops[i].kind for i in positions if ops[i].when == "always"}
    if not schedule.plan.buckets[bucket].sparse and "pack" not in kinds:
        fail_bucket(schedule, bucket, "no operation packs it; put one in front of its others")
    if "unpack" not in kinds:
        fail_bucket(schedule, bucket, "no operation unpacks it; append one")
