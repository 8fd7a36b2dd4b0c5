"""Programs: schedules prepared for execution on one rank, with all constants of a step."""

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

# Gradients of at least this size are packed as they arrive, while they are in the cache and so that
# the allocator can reuse their memory. Smaller ones are packed together.
_EAGER_BYTES = 1 << 17


@dataclass(frozen=True)
class Packing:
    """Division of a bucket's leaves into those packed early and those packed together.

    Attributes:
        together: positions in the bucket of the leaves that are packed when it is full.
        layout: slices of these leaves.
        early: positions of the leaves that are packed as they arrive, and the slice of each.
    """

    together: tuple[int, ...]
    layout: Layout
    early: tuple[tuple[int, Layout], ...]

    @cached_property
    def native(self) -> NativePacking:
        """Packing in the extension."""
        return packing(self.together, self.layout, self.early)

    @classmethod
    def of(cls, plan: BucketPlan, bucket: int, layout: Layout, *, eager_bytes: float) -> Packing:
        """Make the packing of a bucket; leaves of at least `eager_bytes` are packed early."""
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
        text: description for error texts: the number and the first and last path.
        leaves: indices of its leaves.
        layout: slices of the leaves in the buffer.
        numel: elements of the leaves.
        padded_numel: elements that collectives work on.
        buffer_numel: elements of the buffer, including a piggybacked control word.
        wire_dtype: dtype of the buffer.
        device: device in the plan.
        sparse: True for a single leaf with sparse gradients.
        is_plain: True if results are views of the buffer.
        rescaled: True if the bucket is reduced again when the agreed scale does not fit.
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
        position: position in the schedule.
        op: the operation.
        awaited: positions and buckets of the collectives that must have finished before, including
            those awaited by dependencies that may be skipped.
        needs_report: True if the control word must have been read before.
    """

    position: int
    op: Op
    awaited: tuple[tuple[int, int], ...]
    needs_report: bool


@dataclass(frozen=True)
class Program:
    """Schedule of a step, and constants derived from it.

    Attributes:
        schedule: the operations.
        layouts: for each bucket, the slices of its leaves.
        reduced: the leaves that are reduced, in canonical order; the slots of the control word.
        differentiated: the leaves that have gradients, reduced or local, in canonical order.
        control: layout of the control word.
        packing: for each bucket, the packing of its leaves during backward.
        places: for each axis of the topology, its size and this rank's place.
        shards: elements that this rank owns, if the schedule divides buckets.
        foreign: True if this rank's trees have arrays of another library.
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
        """Buckets with leaves that are packed as they arrive: the positions of these leaves among
        the differentiated ones, and the slice of each."""
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
    def buffer_numels(self) -> tuple[int, ...]:
        """Elements of each bucket's buffer, including a piggybacked control word."""
        numels = list(self.schedule.buffer_numels)
        if self.schedule.piggyback_op >= 0:
            numels[self.schedule.ops[self.schedule.piggyback_op].bucket] += self.control.size
        return tuple(numels)

    @cached_property
    def member_numbers(self) -> tuple[tuple[int, ...], ...]:
        """For each bucket, the positions of its leaves among the differentiated ones."""
        return tuple(tuple(self.number[i] for i in b.leaves) for b in self.plan.buckets)

    @cached_property
    def members(self) -> Members:
        """`member_numbers` in the extension."""
        return members(self.member_numbers)

    @cached_property
    def trees(self) -> KnownTrees:
        """Cache of the structures of callers' trees."""
        return KnownTrees()

    @cached_property
    def leaf_types(self) -> LeafTypes:
        """Shapes and dtypes of the leaves, in the extension."""
        return leaf_types(self.plan.leaves)

    def extent(self, op: Op) -> tuple[int, int]:
        """Return the elements of the buffer that an operation works on, on this rank. An all-gather
        works on its result."""
        shard = op.region.shard
        if op.kind == "all_gather":
            shard = shard[: len(shard) - len(op.axes)]
        return _own(op.region, shard, self.places)

    def describe(self, bucket: int) -> str:
        """Return the number and the first and last path of a bucket, for errors."""
        leaves = self.plan.buckets[bucket].leaves
        first, last = self.paths[leaves[0]], self.paths[leaves[-1]]
        return f"bucket {bucket} ({first if first == last else f'{first} .. {last}'})"


def make_program(
    schedule: Schedule, rank: int, *, with_order: bool, foreign: bool = False
) -> Program:
    """Prepare a schedule for one rank.

    Args:
        schedule: the operations.
        rank: this rank's number.
        with_order: True to send rank 0's ready order in the control word.
        foreign: True if this rank's trees have arrays of another library.
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
                plan, b, layout, eager_bytes=_eager_bytes(plan, schedule, b, all_early=with_order)
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
    """Return the smallest size of leaves that are packed as they arrive."""
    spec = plan.buckets[bucket]
    may_be = spec.device in ("cpu", "meta") and not spec.sparse and bucket not in schedule.retained
    if not may_be:
        # Accelerators are faster with many copies in one launch. Retained contributions can't be
        # released early.
        return math.inf
    # Small gradients that wait fragment the memory of large ones freed between them. A plan that is
    # about to be rebuilt may be a single bucket, in which all would wait.
    nbytes = [plan.leaves[leaf].nbytes for leaf in spec.leaves]
    return 0 if all_early or sum(nbytes) >= _EAGER_BYTES * len(nbytes) else _EAGER_BYTES
