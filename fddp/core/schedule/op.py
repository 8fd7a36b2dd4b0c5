"""Operations of a schedule, and the regions of memory that they work on.

[Note: regions]
An operation works on elements [start, stop) of one of a bucket's buffers. Where axes *shard* these,
each rank works on its own chunk: the region is cut into as many equal chunks as the first of these
axes has places, a rank's is that of its place, and the next axis cuts that chunk again. A
reduce-scatter leaves each rank its chunk; an all-gather along the last sharding axis joins them.

[Note: the word rides]
The control word is summed by a collective of its own, or it rides: a rank writes it behind the
last element of a bucket's buffer, and the bucket's last all-reduce, the carrier, sums both. The
first is an operation along all axes with the bucket -1. The second names the bucket and no axes,
for the rank does it alone; the carrier depends on it, and what acts on the word depends on the
carrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

Kind = Literal[
    "pack", "all_reduce", "reduce_scatter", "all_gather", "add", "control", "gather", "unpack"
]
When = Literal["always", "late", "again"]
Buffer = Literal["bucket", "repair", "control"]

#: kinds in which ranks meet; but see `is_piggybacked`
COLLECTIVES = frozenset({"all_reduce", "reduce_scatter", "all_gather", "control", "gather"})


class Region(NamedTuple):
    """What memory an operation works on; see [Note: regions].

    Attributes:
        buffer: the "bucket" itself, the "repair" of what came late, or the "control" word.
        start: first element.
        stop: element after the last.
        shard: axes that divide the region, outer cut first; () for all of it.
    """

    buffer: Buffer
    start: int
    stop: int
    shard: tuple[str, ...] = ()


CONTROL_REGION = Region("control", 0, 0)


class Op(NamedTuple):
    """One operation.

    Attributes:
        kind: "pack" contributions (or own shards) into a region; "all_reduce", "reduce_scatter" or
            "all_gather" it along `axes`; "add" the repair's region to the bucket's; reduce the
            "control" word, or write it where it rides; "gather" a sparse bucket's indices and
            values; "unpack" results.
        bucket: the bucket's index; -1 for a control word that does not ride, see
            [Note: the word rides].
        axes: the axes of a collective, in the topology's order; () for what a rank does alone.
        region: what it works on, before the operation.
        deps: positions of operations that must have finished.
        when: "always"; "late" if the control word says that the bucket needs a repair of what came
            after its launch; "again" if it says that a retained bucket must be reduced anew.
    """

    kind: Kind
    bucket: int
    axes: tuple[str, ...]
    region: Region
    deps: tuple[int, ...]
    when: When = "always"


def is_piggybacked(op: Op) -> bool:
    """Whether an operation is a control word that rides; see [Note: the word rides]."""
    return op.kind == "control" and op.bucket >= 0


def is_collective(op: Op) -> bool:
    """Whether ranks meet in an operation."""
    return op.kind in COLLECTIVES and not is_piggybacked(op)


def op_problem(op: object) -> str | None:
    """Why a value is no operation, or None."""
    if not isinstance(op, Op) or not isinstance(op.region, Region):
        return f"must be an Op on a Region, got {op!r}"
    region = op.region
    for name, value, choice in (
        ("kind", op.kind, Kind),
        ("when", op.when, When),
        ("region.buffer", region.buffer, Buffer),
    ):
        if value not in get_args(choice):
            return f"has the {name} {value!r}; it must be one of {', '.join(get_args(choice))}"
    for name, number in (("bucket", op.bucket), ("start", region.start), ("stop", region.stop)):
        if type(number) is not int or not -1 <= number < 2**63:
            return f"has the {name} {number!r}; it must be a 64-bit int"
    for name, texts in (("axes", op.axes), ("region.shard", region.shard)):
        if not is_texts(texts):
            return f"has the {name} {texts!r}; it must be a tuple of axis names"
    if not isinstance(op.deps, tuple) or any(type(dep) is not int for dep in op.deps):
        return f"has the deps {op.deps!r}; they must be a tuple of ints"
    return None


def is_texts(value: object) -> bool:
    """Return True if `value` is a tuple of strings."""
    return isinstance(value, tuple) and all(isinstance(item, str) for item in value)


def chunk(start: int, stop: int, cuts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The part of [start, stop) that a rank works on; see [Note: regions].

    Args:
        start: first element.
        stop: element after the last.
        cuts: for each sharding axis, the number of places on it and the rank's place.

    Example:
        >>> chunk(0, 12, [(2, 1), (3, 0)])
        (6, 8)
    """
    for places, place in cuts:
        length = (stop - start) // places
        start += place * length
        stop = start + length
    return start, stop
