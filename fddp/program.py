"""A plan and its schedule, made ready to run: everything about a step that does not change."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property

from fddp.control import ControlLayout
from fddp.leaves import LeafTypes, Members, leaf_types, members
from fddp.pack import Layout
from fddp.plan import BucketPlan
from fddp.schedule import Schedule, Topology, make_schedule


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
    """

    plan: BucketPlan
    schedule: Schedule
    layouts: tuple[Layout, ...]
    reduced: tuple[int, ...]
    differentiated: tuple[int, ...]
    control: ControlLayout

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The path of each leaf, in canonical order."""
        return tuple(leaf.path for leaf in self.plan.leaves)

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
        """Shape and dtype of each differentiated leaf, compiled."""
        specs = [self.plan.leaves[i] for i in self.differentiated]
        return leaf_types([spec.shape for spec in specs], [spec.dtype for spec in specs])

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
    return Program(
        plan=plan,
        schedule=make_schedule(plan, Topology(world=world_size), reduce_dtype=reduce_dtype),
        layouts=tuple(Layout.of(plan, b) for b in range(len(plan.buckets))),
        reduced=reduced,
        differentiated=tuple(i for i, leaf in enumerate(plan.leaves) if leaf.reducible),
        control=ControlLayout(len(reduced), len(plan.buckets), with_order),
    )
