"""A plan and its schedule, made ready to run: everything about a step that does not change."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property

from fddp.control import ControlLayout
from fddp.layout import Layout
from fddp.leaves import LeafTypes, Members, leaf_types, members
from fddp.plan import BucketPlan
from fddp.schedule import Schedule, Topology, make_schedule

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

    @classmethod
    def of(cls, plan: BucketPlan, bucket: int, layout: Layout, *, eager: bool) -> Packing:
        """Decides by size; `eager` is whether the bucket may be packed before it is full."""
        leaves = [plan.leaves[i] for i in plan.buckets[bucket].leaves]
        large = [eager and leaf.nbytes >= _EAGER_BYTES for leaf in leaves]
        together = tuple(p for p, is_large in enumerate(large) if not is_large)
        early = tuple((p, layout.part((p,))) for p, is_large in enumerate(large) if is_large)
        return cls(together, layout.part(together), early)


@dataclass(frozen=True)
class Program:
    """What a session executes.

    Attributes:
        plan: the bucket plan.
        schedule: the operations, for this plan.
        layouts: for each bucket, where its leaves lie in its flat buffer.
        reduced: the leaves that are reduced, in canonical order; the control word's slots.
        differentiated: the leaves that have gradients, in canonical order; the reduced ones and
            those that stay local.
        control: layout of the control word.
        packing: for each bucket, how its leaves are packed during backward.
    """

    plan: BucketPlan
    schedule: Schedule
    layouts: tuple[Layout, ...]
    reduced: tuple[int, ...]
    differentiated: tuple[int, ...]
    control: ControlLayout
    packing: tuple[Packing, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each leaf, in canonical order."""
        return self.plan.paths

    @cached_property
    def number(self) -> dict[int, int]:
        """For each differentiated leaf, its position among them."""
        return {leaf: k for k, leaf in enumerate(self.differentiated)}

    @cached_property
    def slot(self) -> dict[int, int]:
        """For each reduced leaf, its position in the control word."""
        return {leaf: k for k, leaf in enumerate(self.reduced)}

    @cached_property
    def bucket_slots(self) -> tuple[tuple[int, ...], ...]:
        """For each bucket, the positions of its leaves in the control word."""
        return tuple(tuple(self.slot[i] for i in b.leaves) for b in self.plan.buckets)

    @cached_property
    def member_numbers(self) -> tuple[tuple[int, ...], ...]:
        """For each bucket, its leaves as numbered among the differentiated ones."""
        return tuple(tuple(self.number[i] for i in b.leaves) for b in self.plan.buckets)

    @cached_property
    def members(self) -> Members:
        """The same, compiled."""
        return members(self.member_numbers)

    @cached_property
    def leaf_types(self) -> LeafTypes:
        """What each leaf must be, compiled."""
        return leaf_types(self.plan.leaves)

    def fingerprint(self, step: int) -> int:
        """Number below 2**32 on which ranks agree if they are at one step of one plan."""
        return zlib.crc32(f"{self.schedule.plan_digest}:{step}".encode())

    def describe(self, bucket: int) -> str:
        """A bucket in words, for errors: its number and the leaves at its ends."""
        leaves = self.plan.buckets[bucket].leaves
        first, last = self.paths[leaves[0]], self.paths[leaves[-1]]
        return f"bucket {bucket} ({first if first == last else f'{first} .. {last}'})"


def make_program(
    plan: BucketPlan, world_size: int, *, reduce_dtype: str | None, with_order: bool
) -> Program:
    """Prepares a plan for a group of `world_size` ranks.

    Args:
        plan: the bucket plan.
        world_size: number of ranks.
        reduce_dtype: as in `make_schedule`.
        with_order: whether rank 0's ready order rides in the control word.
    """
    reduced = plan.reduced
    schedule = make_schedule(plan, Topology(world=world_size), reduce_dtype=reduce_dtype)
    layouts = tuple(Layout.of(plan, b) for b in range(len(plan.buckets)))
    return Program(
        plan=plan,
        schedule=schedule,
        layouts=layouts,
        reduced=reduced,
        differentiated=tuple(i for i, leaf in enumerate(plan.leaves) if leaf.reducible),
        control=ControlLayout(len(reduced), len(plan.buckets), with_order),
        packing=tuple(
            Packing.of(plan, b, layout, eager=_may_be_eager(plan, schedule, b))
            for b, layout in enumerate(layouts)
        ),
    )


def _may_be_eager(plan: BucketPlan, schedule: Schedule, bucket: int) -> bool:
    """On accelerators many copies in one launch are faster; kept contributions can't be let go."""
    spec = plan.buckets[bucket]
    return spec.device in ("cpu", "meta") and not spec.sparse and bucket not in schedule.retained
