"""Operations of a schedule and their memory regions.

[Note: regions]
An operation works on elements [start, stop) of one of a bucket's buffers. If the region has *shard*
axes, each rank works on its own chunk. The first shard axis cuts the region into equal chunks, one
per coordinate on the axis; each further axis cuts the chunk again. A reduce-scatter leaves each
rank its chunk. An all-gather along the last shard axis joins the chunks.

[Note: piggybacked control word]
The control word is reduced by its own collective, or it is piggybacked: each rank writes it behind
the last element of a bucket's buffer, and the bucket's last all-reduce, the carrier, sums both.
A separate control word is a collective operation along all axes, with bucket -1. A piggybacked
control word is a local operation with a bucket and no axes. The carrier depends on it. Operations
that read the reduced word depend on the carrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

Kind = Literal[
    "pack", "stage", "all_reduce", "reduce_scatter", "all_gather", "add", "control", "gather",
    "unpack",
]  # fmt: skip
When = Literal["always", "late", "again"]
Buffer = Literal["bucket", "repair", "control"]

#: kinds of collectives, except for a piggybacked control word
COLLECTIVES = frozenset(
    {"stage", "all_reduce", "reduce_scatter", "all_gather", "control", "gather"}
)


class Region(NamedTuple):
    """Memory of an operation; see [Note: regions].

    Attributes:
        buffer: the "bucket" itself, the "repair" of late gradients, or the "control" word.
        start: first element.
        stop: element after the last.
        shard: axes that divide the region, outer cut first; () for the whole region.
    """

    buffer: Buffer
    start: int
    stop: int
    shard: tuple[str, ...] = ()


CONTROL_REGION = Region("control", 0, 0)


class Op(NamedTuple):
    """One operation.

    Attributes:
        kind: "pack" gradients (or local shards) into a region; "all_reduce", "reduce_scatter" or
            "all_gather" the region along `axes`; a "stage" of a communication hook, before the
            reduction, see [Note: stages in one order]; "add" the region of the repair to that of
            the bucket; reduce the "control" word, or write it if it is piggybacked; "gather"
            indices and values of a sparse bucket; "unpack" results.
        bucket: index of the bucket; -1 for a separate control word, see
            [Note: piggybacked control word].
        axes: axes of a collective, in the topology's order; () for a local operation.
        region: memory region, as divided before the operation.
        deps: positions of the operations that must have finished.
        when: "always"; "late" if the control word requests a repair for gradients that were late
            for the bucket; "again" if it requests that a retained bucket is reduced again.
    """

    kind: Kind
    bucket: int
    axes: tuple[str, ...]
    region: Region
    deps: tuple[int, ...]
    when: When = "always"


def is_piggybacked(op: Op) -> bool:
    """Return True for a piggybacked control word; see [Note: piggybacked control word]."""
    return op.kind == "control" and op.bucket >= 0


def is_collective(op: Op) -> bool:
    """Return True if an operation communicates between ranks."""
    return op.kind in COLLECTIVES and not is_piggybacked(op)


_KINDS, _WHENS, _BUFFERS = get_args(Kind), get_args(When), get_args(Buffer)


def op_problem(op: object) -> str | None:
    """Return the error text for a malformed operation, or None if it is well-formed."""
    if not isinstance(op, Op) or not isinstance(op.region, Region):
        return f"must be an Op on a Region, got {op!r}"
    region = op.region
    for name, value, choice in (
        ("kind", op.kind, _KINDS),
        ("when", op.when, _WHENS),
        ("region.buffer", region.buffer, _BUFFERS),
    ):
        if value not in choice:
            return f"has the {name} {value!r}; it must be one of {', '.join(choice)}"
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
    return isinstance(value, tuple) and all(isinstance(item, str) for item in value)


def chunk(start: int, stop: int, cuts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return a rank's chunk of [start, stop); see [Note: regions].

    `cuts` holds the size of each shard axis and the rank's coordinate on it.

    Example:
        >>> chunk(0, 12, [(2, 1), (3, 0)])
        (6, 8)
    """
    for size, coordinate in cuts:
        length = (stop - start) // size
        start += coordinate * length
        stop = start + length
    return start, stop
