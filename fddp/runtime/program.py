"""A plan and its schedule, made ready to run: everything about a step that does not change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from fddp.core.numerics.overflow import max_safe_magnitude
from fddp.core.plan.plan import BucketPlan
from fddp.core.protocol.control_word import ControlLayout
from fddp.core.schedule.op import Op, Region, chunk, is_collective
from fddp.core.schedule.piggyback import control_layout
from fddp.core.schedule.schedule import RETAINED_DTYPES, Schedule
from fddp.native.autograd_leaves import (
    LeafTypes,
    Members,
    NativePacking,
    leaf_types,
    members,
    packing,
)
from fddp.native.layout import Layout
from fddp.runtime.shards import ShardMap
from fddp.tree.cached import KnownTrees

# From this size on, a gradient is packed when it arrives: it would leave the cache, and its memory
# be asked of the system anew, if it waited for its bucket. Smaller ones are packed together.
_EAGER_BYTES = 1 << 17


@dataclass(frozen=True)
class Packing:
    """How a bucket's leaves get into its buffer during backward.

    Attributes:
        together: positions in the bucket of the leaves that are packed when it is full.
        layout: where these lie.
        early: positions of the leaves that are packed as they arrive, and where each lies.
    """

    together: tuple[int, ...]
    layout: Layout
    early: tuple[tuple[int, Layout], ...]

    @cached_property
    def native(self) -> NativePacking:
        """The same, compiled."""
        return packing(self.together, self.layout, self.early)

    @classmethod
    def of(cls, plan: BucketPlan, bucket: int, layout: Layout, *, eager_bytes: float) -> Packing:
        """Decides by size: leaves of so many bytes are packed as they arrive."""
        leaves = [plan.leaves[i] for i in plan.buckets[bucket].leaves]
        large = [leaf.nbytes >= eager_bytes for leaf in leaves]
        together = tuple(p for p, is_large in enumerate(large) if not is_large)
        early = tuple((p, layout.part((p,))) for p, is_large in enumerate(large) if is_large)
        return cls(together, layout.part(together), early)


@dataclass(frozen=True)
class BucketProgram:
    """Constants of one bucket.

    Attributes:
        index: number of the bucket in the plan.
        text: the bucket in error texts: its number and the paths at its ends.
        leaves: indices of its leaves.
        layout: slices of the leaves in the buffer.
        numel: elements of the leaves.
        padded_numel: elements that collectives work on.
        buffer_numel: elements of the buffer, with the control word where it rides there.
        wire_dtype: dtype of the buffer.
        device: device in the plan.
        sparse: True for a single leaf with sparse gradients.
        is_plain: True if results are views of the buffer.
        rescaled: True if the bucket is reduced again where the agreed scale does not fit.
        max_safe_magnitude: largest magnitude of contributions whose sum cannot overflow.
    """

    index: int
    text: str
    leaves: tuple[int, ...]
    layout: Layout
    numel: int
    padded_numel: int
    buffer_numel: int
    wire_dtype: torch.dtype
    device: str
    sparse: bool
    is_plain: bool
    rescaled: bool
    max_safe_magnitude: float


class Instruction(NamedTuple):
    """An operation of the schedule, prepared.

    Attributes:
        position: its position in the schedule.
        op: the operation.
        awaited: positions and buckets of the collectives that must have finished before; also
            those that a dependency would wait for, because it may be skipped.
        needs_report: True if the control word must have been read before.
    """

    position: int
    op: Op
    awaited: tuple[tuple[int, int], ...]
    needs_report: bool


@dataclass(frozen=True)
class Program:
    """What a step executes.

    Attributes:
        plan: the bucket plan.
        schedule: the operations, for this plan.
        layouts: for each bucket, where its leaves lie in its flat buffer.
        reduced: the leaves that are reduced, in canonical order; the control word's slots.
        differentiated: the leaves that have gradients, in canonical order; the reduced ones and
            those that stay local.
        control: layout of the control word.
        packing: for each bucket, how its leaves are packed during backward.
        places: for each axis of the topology, the number of places and this rank's.
        shards: which elements this rank owns, where the schedule divides them.
        foreign: whether this rank's trees hold arrays of another library.
    """

    schedule: Schedule
    layouts: tuple[Layout, ...]
    reduced: tuple[int, ...]
    differentiated: tuple[int, ...]
    control: ControlLayout
    packing: tuple[Packing, ...]
    places: Mapping[str, tuple[int, int]]
    shards: ShardMap
    foreign: bool = False

    @cached_property
    def plan(self) -> BucketPlan:
        """The bucket plan."""
        return self.schedule.plan

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The path of each leaf, in canonical order."""
        return self.plan.paths

    @cached_property
    def buckets(self) -> tuple[BucketProgram, ...]:
        """Constants of each bucket."""
        return tuple(map(self._bucket, range(len(self.plan.buckets))))

    def _bucket(self, index: int) -> BucketProgram:
        schedule, planned = self.schedule, self.plan.buckets[index]
        wire = schedule.wire_dtypes[index]
        return BucketProgram(
            index=index,
            text=self.describe(index),
            leaves=planned.leaves,
            layout=self.layouts[index],
            numel=self.layouts[index].numel,
            padded_numel=schedule.buffer_numels[index],
            buffer_numel=self.buffer_numels[index],
            wire_dtype=getattr(torch, wire),
            device=planned.device,
            sparse=planned.sparse,
            is_plain=wire == planned.dtype and schedule.result != "sharded_mean",
            rescaled=wire in RETAINED_DTYPES and index in schedule.retained,
            max_safe_magnitude=max_safe_magnitude(
                wire, planned.dtype, schedule.topology.world_size
            ),
        )

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """All operations, in launch order."""
        ops = self.schedule.ops
        prepared: list[Instruction] = []
        for position, op in enumerate(ops):
            awaited: dict[tuple[int, int], None] = {}
            for dep in op.deps:
                if is_collective(ops[dep]):
                    awaited[dep, ops[dep].bucket] = None
                if ops[dep].when != "always":
                    awaited.update(dict.fromkeys(prepared[dep].awaited))
            needs_report = op.kind in ("gather", "unpack") or position >= self.first_conditional
            prepared.append(Instruction(position, op, tuple(awaited), needs_report))
        return tuple(prepared)

    @cached_property
    def usual(self) -> tuple[Instruction, ...]:
        """Operations of a step in which no bucket is reduced twice."""
        return tuple(i for i in self.instructions if i.op.when == "always")

    @cached_property
    def first_conditional(self) -> int:
        """Position of the first operation that the control word decides on."""
        ops = self.schedule.ops
        return next((i for i, op in enumerate(ops) if op.when != "always"), len(ops))

    @cached_property
    def rescaled(self) -> frozenset[int]:
        """Buckets that are reduced again where the agreed scale does not fit."""
        return frozenset(bucket.index for bucket in self.buckets if bucket.rescaled)

    @cached_property
    def is_plain(self) -> bool:
        """True if all leaves are reduced, and results are not shards."""
        has_local = len(self.plan.order) < sum(leaf.reducible for leaf in self.plan.leaves)
        return self.schedule.result == "replicated_mean" and not has_local

    @cached_property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """Elements of its buffer that each operation works on, on this rank."""
        return tuple(map(self.extent, self.schedule.ops))

    @cached_property
    def early(self) -> tuple[tuple[int, tuple[tuple[int, Layout], ...]], ...]:
        """Buckets with leaves that are packed as soon as their gradients arrive: these leaves, as
        numbered among the differentiated ones, and the slice of each."""
        return tuple(
            (bucket, tuple((members[position], slot) for position, slot in packing.early))
            for bucket, (members, packing) in enumerate(
                zip(self.member_numbers, self.packing, strict=True)
            )
            if packing.early
        )

    @cached_property
    def number(self) -> dict[int, int]:
        """For each differentiated leaf, its position among them."""
        return {leaf: k for k, leaf in enumerate(self.differentiated)}

    @cached_property
    def slot(self) -> dict[int, int]:
        """For each reduced leaf, its position in the control word."""
        return {leaf: k for k, leaf in enumerate(self.reduced)}

    @cached_property
    def word_position(self) -> int:
        """Position of the operation that brings the control word's sum."""
        return max(self.schedule.control, self.schedule.piggyback_op)

    @cached_property
    def buffer_numels(self) -> tuple[int, ...]:
        """Elements of each bucket's buffer, with the tail in which the control word rides."""
        numels = list(self.schedule.buffer_numels)
        if self.schedule.piggyback_op >= 0:
            numels[self.schedule.ops[self.schedule.piggyback_op].bucket] += self.control.size
        return tuple(numels)

    @cached_property
    def member_numbers(self) -> tuple[tuple[int, ...], ...]:
        """For each bucket, its leaves as numbered among the differentiated ones."""
        return tuple(tuple(self.number[i] for i in b.leaves) for b in self.plan.buckets)

    @cached_property
    def members(self) -> Members:
        """The same, compiled."""
        return members(self.member_numbers)

    @cached_property
    def trees(self) -> KnownTrees:
        """Takes apart what callers hand in, step by step."""
        return KnownTrees()

    @cached_property
    def leaf_types(self) -> LeafTypes:
        """What each leaf must be, compiled."""
        return leaf_types(self.plan.leaves)

    def extent(self, op: Op) -> tuple[int, int]:
        """The elements of the buffer that an operation works on, on this rank: of an all-gather,
        what it fills, of which the rank's own part is there before."""
        shard = op.region.shard
        if op.kind == "all_gather":
            shard = shard[: len(shard) - len(op.axes)]
        return _own(op.region, shard, self.places)

    def describe(self, bucket: int) -> str:
        """A bucket in words, for errors: its number and the leaves at its ends."""
        leaves = self.plan.buckets[bucket].leaves
        first, last = self.paths[leaves[0]], self.paths[leaves[-1]]
        return f"bucket {bucket} ({first if first == last else f'{first} .. {last}'})"


def make_program(
    schedule: Schedule, rank: int, *, with_order: bool, foreign: bool = False
) -> Program:
    """Prepares a schedule for one rank.

    Args:
        schedule: the operations.
        rank: this rank's number.
        with_order: whether rank 0's ready order rides in the control word.
        foreign: whether this rank's trees hold arrays of another library.
    """
    plan = schedule.plan
    reduced = plan.reduced
    layouts = tuple(Layout.of(plan, b) for b in range(len(plan.buckets)))
    coordinates = schedule.topology.coordinates(rank)
    places = {
        name: (size, place)
        for (name, size), place in zip(schedule.topology.axes, coordinates, strict=True)
    }
    return Program(
        schedule=schedule,
        layouts=layouts,
        reduced=reduced,
        differentiated=tuple(i for i, leaf in enumerate(plan.leaves) if leaf.reducible),
        control=control_layout(schedule, with_order=with_order),
        packing=tuple(
            Packing.of(
                plan,
                b,
                layout,
                eager_bytes=_eager_bytes(plan, schedule, b, all_early=with_order),
            )
            for b, layout in enumerate(layouts)
        ),
        places=places,
        shards=ShardMap.of(plan, _divided(schedule, places)),
        foreign=foreign,
    )


def _divided(
    schedule: Schedule, places: Mapping[str, tuple[int, int]]
) -> list[tuple[int, Op, tuple[int, int]]]:
    """The operations at which shards come in or go out, each with this rank's chunk."""
    kind = {"sharded_mean": "unpack", "replicated": "pack"}.get(schedule.result)
    return [
        (position, op, _own(op.region, op.region.shard, places))
        for position, op in enumerate(schedule.ops)
        if op.kind == kind
    ]


def _own(
    region: Region, shard: tuple[str, ...], places: Mapping[str, tuple[int, int]]
) -> tuple[int, int]:
    return chunk(region.start, region.stop, [places[axis] for axis in shard])


def _eager_bytes(plan: BucketPlan, schedule: Schedule, bucket: int, *, all_early: bool) -> float:
    """From which size on a bucket's leaves are packed as they arrive."""
    spec = plan.buckets[bucket]
    may_be = spec.device in ("cpu", "meta") and not spec.sparse and bucket not in schedule.retained
    if not may_be:
        # On accelerators many copies in one launch are faster; kept contributions can't be let go.
        return math.inf
    # Small gradients that wait pin the memory of large ones that came and went between them. A plan
    # that is about to be rebuilt may be a single bucket, in which all would wait.
    nbytes = [plan.leaves[leaf].nbytes for leaf in spec.leaves]
    return 0 if all_early or sum(nbytes) >= _EAGER_BYTES * len(nbytes) else _EAGER_BYTES
