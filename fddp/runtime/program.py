"""Programs: schedules prepared for execution on one rank, with all constants of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from fddp.core.numerics.overflow import max_safe_magnitude
from fddp.core.numerics.weighting import WeightScale
from fddp.core.plan.plan import BucketPlan
from fddp.core.protocol.control_word import ControlLayout
from fddp.core.schedule.op import Region, chunk, is_collective
from fddp.core.schedule.piggyback import control_layout
from fddp.core.schedule.schedule import Schedule, association, summands
from fddp.core.schedule.sum_tree import SumTree
from fddp.native import extension
from fddp.native.layout import Layout
from fddp.runtime.shards import ShardMap

if TYPE_CHECKING:
    from fddp._C import BucketMembers, BucketPacking, LeafTypes

# Gradients of at least this size are packed as they arrive, while they are in the cache and so that
# the allocator can reuse their memory. Smaller ones are packed together.
_EAGER_BYTES = 1 << 17


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
        is_view: True if results are views of the buffer.
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
    is_view: bool
    max_safe_magnitude: float


@dataclass(frozen=True)
class Program:
    """Schedule of a step, prepared for one rank, and constants derived from it.

    Attributes:
        schedule: the operations.
        rank: this rank's number.
        with_order: True to send rank 0's ready order in the control word.
        foreign: True if this rank's trees have arrays of another library.
        defers_report: True if no operation needs the report, which is read after the step; see
            [Note: deferred reports] in `finish.py`.
        noise: for each reduced leaf, the group whose squared norms are measured; () to measure
            none.
    """

    schedule: Schedule
    rank: int
    with_order: bool
    foreign: bool = False
    defers_report: bool = False
    noise: tuple[str, ...] = ()

    @cached_property
    def plan(self) -> BucketPlan:
        """The bucket plan."""
        return self.schedule.plan

    @cached_property
    def differentiated(self) -> tuple[int, ...]:
        """Leaves that have gradients, reduced or local, in canonical order."""
        return tuple(i for i, leaf in enumerate(self.plan.leaves) if leaf.reducible)

    @cached_property
    def control(self) -> ControlLayout:
        """Layout of the control word."""
        return control_layout(self.schedule, with_order=self.with_order, groups=len(self.groups))

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """Groups of leaves whose squared norms are measured, in the order of their first leaves."""
        return tuple(dict.fromkeys(self.noise))

    @cached_property
    def group_numbers(self) -> tuple[tuple[int, ...], ...]:
        """For each bucket, the number of the group of each leaf."""
        number = {name: k for k, name in enumerate(self.groups)}
        group_of = dict(zip(self.plan.reduced, self.noise, strict=True))
        return tuple(tuple(number[group_of[i]] for i in b.leaves) for b in self.plan.buckets)

    def by_group(self, squares: Mapping[int, torch.Tensor]) -> list[float]:
        """Add numbers of leaves, given by bucket, to one for each group, in the order of the plan.
        Waits for devices other than the CPU."""
        totals = [0.0] * len(self.groups)
        for bucket, numbers in enumerate(self.group_numbers):
            if bucket in squares:
                for number, square in zip(numbers, squares[bucket].tolist(), strict=True):
                    totals[number] += square
        return totals

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """For each bucket, the slices of its leaves."""
        return tuple(Layout.of(self.plan, bucket) for bucket in range(len(self.plan.buckets)))

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """For each axis of the topology, its size and this rank's place."""
        topology = self.schedule.topology
        pairs = zip(topology.axes, topology.coordinates(self.rank), strict=True)
        return {name: (size, place) for (name, size), place in pairs}

    @cached_property
    def shards(self) -> ShardMap:
        """Elements that this rank owns, if the schedule divides buckets."""
        kind = {"sharded_mean": "unpack", "replicated": "pack"}.get(self.schedule.result)
        divided = [
            (position, op, _own(op.region, op.region.shard, self.places))
            for position, op in enumerate(self.schedule.ops)
            if op.kind == kind
        ]
        return ShardMap.of(self.plan, divided)

    @cached_property
    def buckets(self) -> tuple[BucketProgram, ...]:
        """Constants of each bucket."""
        return tuple(_bucket_program(self, index) for index in range(len(self.plan.buckets)))

    @cached_property
    def first_repair(self) -> int:
        """Position of the first operation that only some reports ask for."""
        ops = enumerate(self.schedule.ops)
        return next((i for i, op in ops if op.when != "always"), len(self.schedule.ops))

    @cached_property
    def waits(self) -> tuple[tuple[int, ...], ...]:
        """For each operation, the positions of the collectives of buckets that must have finished
        before, including those that dependencies wait for which may be skipped."""
        ops = self.schedule.ops
        waits: list[tuple[int, ...]] = []
        for op in ops:
            awaited: dict[int, None] = {}
            for dep in op.deps:
                if is_collective(ops[dep]) and ops[dep].bucket >= 0:
                    awaited[dep] = None
                if ops[dep].when != "always":
                    awaited.update(dict.fromkeys(waits[dep]))
            waits.append(tuple(awaited))
        return tuple(waits)

    @cached_property
    def scale(self) -> WeightScale:
        """Factors of the weighted mean."""
        if self.schedule.result == "replicated":  # shards are gathered, not averaged
            return WeightScale(self.schedule.topology.world_size)
        return WeightScale(summands(self.schedule), self.schedule.scaling)

    @cached_property
    def narrow(self) -> str:
        """First bucket that is summed in float16, for error texts; "" if there is none."""
        found = (b.text for b in self.buckets if b.wire_dtype is torch.float16 and not b.sparse)
        return next(found, "")

    @cached_property
    def extents(self) -> tuple[tuple[int, int], ...]:
        """Elements of its buffer that each operation works on, on this rank. An all-gather works on
        its result."""
        extents = []
        for op in self.schedule.ops:
            cut = len(op.region.shard) - (len(op.axes) if op.kind == "all_gather" else 0)
            extents.append(_own(op.region, op.region.shard[:cut], self.places))
        return tuple(extents)

    @cached_property
    def trees(self) -> dict[int, SumTree]:
        """By position, the associations of sums that the schedule fixes."""
        ops = enumerate(self.schedule.ops)
        sums = {
            i: association(self.schedule, op, self.rank)
            for i, op in ops
            if op.kind == "reduce_scatter"
        }
        return {i: tree for i, tree in sums.items() if tree is not None}

    @cached_property
    def carried(self) -> range:
        """Virtual ranks that this rank carries; empty without virtual ranks."""
        virtual = self.schedule.virtual
        return range(0) if virtual is None else virtual.runs[self.rank]

    @cached_property
    def summands(self) -> int:
        """Number of summands that this rank contributes: its virtual ranks, or one."""
        return 1 if self.schedule.virtual is None else len(self.carried)

    @cached_property
    def early(self) -> dict[int, tuple[tuple[int, Layout], ...]]:
        """Buckets with leaves that are packed as they arrive: the positions of these leaves in the
        bucket, and the slice of each."""
        found = {}
        for bucket, layout in enumerate(self.layouts):
            least, leaves = _eager_bytes(self, bucket), self.plan.buckets[bucket].leaves
            large = [p for p, i in enumerate(leaves) if self.plan.leaves[i].nbytes >= least]
            if large:
                found[bucket] = tuple((position, layout.part((position,))) for position in large)
        return found

    @cached_property
    def packings(self) -> tuple[BucketPacking, ...]:
        """For each bucket, the leaves that are packed early and those packed together, in the
        extension."""
        made = []
        for bucket, layout in enumerate(self.layouts):
            early = [(position, slot.native) for position, slot in self.early.get(bucket, ())]
            alone = {position for position, _ in early}
            together = tuple(p for p in range(len(layout.shapes)) if p not in alone)
            part = layout.part(together).native
            made.append(extension.compiled.BucketPacking(together, part, early))
        return tuple(made)

    @cached_property
    def number(self) -> dict[int, int]:
        """For each differentiated leaf, its position among them."""
        return {leaf: k for k, leaf in enumerate(self.differentiated)}

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
    def members(self) -> BucketMembers:
        """`member_numbers` in the extension."""
        return extension.compiled.BucketMembers(self.member_numbers)

    @cached_property
    def leaf_types(self) -> LeafTypes:
        """Shapes and dtypes of the leaves, in the extension."""
        leaves = self.plan.leaves
        dtypes = [getattr(torch, leaf.dtype, None) for leaf in leaves]
        return extension.compiled.LeafTypes(
            [leaf.shape for leaf in leaves],
            [dtype if isinstance(dtype, torch.dtype) else None for dtype in dtypes],
            [leaf.reducible for leaf in leaves],
        )


def _eager_bytes(program: Program, bucket: int) -> float:
    """Return the smallest size of leaves that are packed as they arrive."""
    spec, plan = program.plan.buckets[bucket], program.plan
    if spec.device not in ("cpu", "meta") or spec.sparse or bucket in program.schedule.retained:
        # Accelerators are faster with many copies in one launch. Retained contributions can't be
        # released early.
        return math.inf
    # Small gradients that wait fragment the memory of large ones freed between them. A plan that is
    # about to be rebuilt may be a single bucket, in which all would wait.
    nbytes = [plan.leaves[leaf].nbytes for leaf in spec.leaves]
    is_large = sum(nbytes) >= _EAGER_BYTES * len(nbytes)
    return 0 if program.with_order or is_large else _EAGER_BYTES


def _bucket_program(program: Program, index: int) -> BucketProgram:
    schedule, planned = program.schedule, program.plan.buckets[index]
    wire = schedule.wire_dtypes[index]
    first, last = program.plan.paths[planned.leaves[0]], program.plan.paths[planned.leaves[-1]]
    return BucketProgram(
        index=index,
        text=f"bucket {index} ({first if first == last else f'{first} .. {last}'})",
        leaves=planned.leaves,
        layout=program.layouts[index],
        numel=program.layouts[index].numel,
        padded_numel=schedule.buffer_numels[index],
        buffer_numel=program.buffer_numels[index],
        wire_dtype=getattr(torch, wire),
        device=planned.device,
        sparse=planned.sparse,
        is_view=wire == planned.dtype and schedule.result != "sharded_mean",
        max_safe_magnitude=max_safe_magnitude(wire, planned.dtype, summands(schedule)),
    )


def _own(
    region: Region, shard: tuple[str, ...], places: Mapping[str, tuple[int, int]]
) -> tuple[int, int]:
    return chunk(region.start, region.stop, [places[axis] for axis in shard])
