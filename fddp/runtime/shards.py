"""Shards: the parts of leaves that a rank owns under a schedule that divides buckets.

[Note: shards]
A bucket's flat buffer is cut into equal chunks, one for each rank, independent of the boundaries of
leaves. Callers get a tree with the structure of the parameters. Each of its leaves is the flat run
of the leaf's elements that lie in the rank's chunks, in the order of the bucket's memory; most are
empty. `tree_map` therefore works on shards of parameters, gradients and optimizer state as on whole
trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from fddp.core.plan.plan import BucketPlan
from fddp.core.schedule.op import Op
from fddp.native.layout import Layout


class Part(NamedTuple):
    """A run of a leaf's elements in a rank's chunk."""

    leaf: int
    start: int  # first element within the leaf's shard
    offset: int  # first element in the bucket's buffer
    numel: int


@dataclass(frozen=True)
class Chunk:
    """One rank's chunk of one piece of a bucket, and the runs of leaves in it."""

    bucket: int
    start: int  # in the bucket's buffer
    stop: int
    parts: tuple[Part, ...]

    @cached_property
    def layout(self) -> Layout:
        """Layout of the parts in the bucket's buffer, each as a flat leaf."""
        return Layout(
            offsets=tuple(part.offset for part in self.parts),
            shapes=tuple((part.numel,) for part in self.parts),
            strides=((1,),) * len(self.parts),
            numel=self.stop,
        )

    @cached_property
    def own_layout(self) -> Layout:
        """Layout of the parts one after the other, in memory of their own."""
        *offsets, numel = accumulate((part.numel for part in self.parts), initial=0)
        return Layout(tuple(offsets), self.layout.shapes, self.layout.strides, numel)

    def sources(self, shards: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Parts as views of their leaves' shards; None for shards that are None."""
        sources: list[Tensor | None] = []
        for part in self.parts:
            shard = shards[part.leaf]
            sources.append(None if shard is None else shard.narrow(0, part.start, part.numel))
        return sources


@dataclass(frozen=True)
class ShardMap:
    """Elements that a rank owns.

    Attributes:
        chunks: chunk that an operation packs or unpacks, by its position.
        numels: for each leaf, the length of its shard; 0 for leaves in no bucket.
    """

    chunks: dict[int, Chunk]
    numels: tuple[int, ...]

    @classmethod
    def of(cls, plan: BucketPlan, ops: Sequence[tuple[int, Op, tuple[int, int]]]) -> ShardMap:
        """Make the map from operations, each with its position and this rank's chunk."""
        numels = [0] * len(plan.leaves)
        chunks = {}
        for position, op, (start, stop) in sorted(ops, key=lambda item: (item[1].bucket, item[2])):
            bucket = plan.buckets[op.bucket]
            parts = []
            for leaf, offset in zip(bucket.leaves, bucket.offsets, strict=True):
                first = max(start, offset)
                last = min(stop, offset + plan.leaves[leaf].numel)
                if first < last:
                    parts.append(Part(leaf, numels[leaf], first, last - first))
                    numels[leaf] += last - first
            chunks[position] = Chunk(op.bucket, start, stop, tuple(parts))
        return cls(chunks, tuple(numels))

    def joined(
        self,
        plan: BucketPlan,
        parts: Mapping[int, Sequence[Tensor]],
        devices: Mapping[str, torch.device],
    ) -> list[Tensor | None]:
        """Join the parts of each leaf's shard; None for leaves in no bucket.

        Args:
            plan: the plan.
            parts: tensors of the parts of each chunk, by position of the operation.
            devices: device of the leaves for each device label of the plan.
        """
        own: dict[int, list[tuple[int, Tensor]]] = {leaf: [] for leaf in plan.order}
        for position, tensors in parts.items():
            for part, tensor in zip(self.chunks[position].parts, tensors, strict=True):
                own[part.leaf].append((part.start, tensor))
        shards: list[Tensor | None] = [None] * len(plan.leaves)
        for leaf, runs in own.items():
            spec = plan.leaves[leaf]
            tensors = [tensor for _, tensor in sorted(runs, key=lambda run: run[0])]
            empty = torch.empty(0, dtype=getattr(torch, spec.dtype), device=devices[spec.device])
            shards[leaf] = tensors[0] if len(tensors) == 1 else torch.cat([empty, *tensors])
        return shards
