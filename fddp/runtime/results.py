"""Results of a step: leaves as views of bucket memory, or this rank's shards of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from fddp.native.buffer_pool import BufferPool, new_memory
from fddp.native.layout import Layout, Stats
from fddp.native.pack import (
    measure,
    measures_late,
    pack_,
    read_stats,
    scale_,
    slices,
    sum_squares,
    unpack_,
)
from fddp.runtime.program import Program
from fddp.runtime.shards import Chunk


class Devices(dict[str, torch.device]):
    """Device of the leaves for each device label of the plan, from the gradients seen so far.

    Args:
        known: devices of the leaves of earlier steps, for labels without gradients.
    """

    def __init__(self, known: Mapping[str, torch.device] | None = None) -> None:
        super().__init__()
        self._known = known or {}

    def __missing__(self, label: str) -> torch.device:
        if label in self._known:
            return self._known[label]
        # Without gradients the label decides; "meta" plans run on the CPU.
        return torch.device("cpu" if label == "meta" else label.partition("#")[0])


class Results:
    """Results by leaf, filled in bucket by bucket.

    Args:
        program: program of the step.
        leaves: results by leaf, None at first.
        devices: devices of the leaves.
        pool: memory for results that are no views of their bucket.
        measure: True to record norm and finiteness; `checks` is then True from the start.
    """

    def __init__(
        self,
        program: Program,
        leaves: list[Tensor | None],
        devices: Devices,
        pool: BufferPool,
        *,
        measure: bool,
    ) -> None:
        self.leaves = leaves
        # Memory of reduced results, of which they are slices, for checks that overwrite it.
        self.memory: list[Tensor] = []
        # By bucket, the sum of squares of each result; only if several groups of leaves are
        # measured, as else the norm of all is enough.
        self.squares: dict[int, Tensor] = {}
        self._program = program
        self._measure = self.checks = measure
        self._devices = devices
        self._pool = pool
        self._parts: dict[int, list[Tensor]] = {}  # by operation: this rank's shards
        self._stats = Stats(0.0, True)
        self._late: list[Tensor] = []  # measurements that the host has not waited for

    @property
    def stats(self) -> Stats | None:
        """Squared norm and finiteness of the results; None unless requested."""
        return self._read() if self._measure else None

    @property
    def finite(self) -> bool:
        """True if all checked results are finite."""
        return self._read().finite

    def check_finite(self) -> None:
        """Check all results from now on."""
        self.checks = True

    def unpack(self, position: int, bucket: int, buffer: Tensor, after: float) -> None:
        """Unpack the results of one operation from a dense bucket, times `after`."""
        chunk = self._program.shards.chunks.get(position)
        late = self.checks and measures_late(buffer.device)
        checked = self.checks and not late
        if chunk is None:
            results, stats = self._take_whole(bucket, buffer, after, checked=checked)
        else:
            results, stats = self._own_parts(position, chunk, buffer, after, checked=checked)
            self._parts[position] = results
        if late:
            self._late.append(measure(results))
        else:
            self._note(stats)

    def put_sparse(self, leaf: int, gathered: Tensor) -> None:
        """Set the result of a sparse bucket."""
        self.leaves[leaf] = gathered
        self.memory.append(gathered._values())
        if self.checks:
            self._late.append(measure([gathered._values()]))

    def complete(self, used: Sequence[bool], local: Mapping[int, Tensor | None]) -> None:
        """Join shards, drop reduced leaves that no rank `used`, and add the `local` results."""
        program = self._program
        if self._parts:
            self.leaves[:] = program.shards.joined(program.plan, self._parts, self._devices)
        for leaf, flag in zip(program.plan.reduced, used, strict=True):
            if not flag:
                self.leaves[leaf] = None
        for leaf, result in local.items():
            self.leaves[leaf] = result

    def _take_whole(
        self, bucket: int, buffer: Tensor, after: float, *, checked: bool
    ) -> tuple[list[Tensor], Stats]:
        layout = self._program.layouts[bucket]
        dtype = getattr(torch, self._program.plan.buckets[bucket].dtype)
        stats = Stats(0.0, True)
        if buffer.dtype == dtype:
            if after != 1.0 or checked:
                stats = scale_(buffer[: layout.numel], after, stats=checked)
            results = slices(buffer, layout)
            self.memory.append(buffer[: layout.numel])
        else:
            results = self._own_slices(("cast", bucket), layout, dtype, buffer.device)
            stats = unpack_(results, layout, buffer, after, stats=checked)
        if self._measure and len(self._program.groups) > 1:
            self.squares[bucket] = sum_squares(self.memory[-1], layout)
        leaves = self._program.plan.buckets[bucket].leaves
        for leaf, result in zip(leaves, results, strict=True):
            self.leaves[leaf] = result
        return results, stats

    def _own_parts(
        self, position: int, chunk: Chunk, buffer: Tensor, after: float, *, checked: bool
    ) -> tuple[list[Tensor], Stats]:
        """Copy shards into memory of their own, so that the bucket can be reused."""
        dtype = getattr(torch, self._program.plan.buckets[chunk.bucket].dtype)
        parts = self._own_slices(("shard", position), chunk.own_layout, dtype, buffer.device)
        return parts, unpack_(parts, chunk.layout, buffer, after, stats=checked)

    def _own_slices(
        self, key: Hashable, layout: Layout, dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Slices of memory that belongs to results alone, reused once no result uses it."""
        memory = self._pool.acquire(key, layout.numel, dtype, device, allocate=new_memory)
        results = slices(memory, layout)  # in use before the memory is released
        self._pool.release(key, memory)
        self.memory.append(memory)
        return results

    def _read(self) -> Stats:
        if self._late:
            self._note(read_stats(self._late))
            self._late = []
        return self._stats

    def _note(self, stats: Stats) -> None:
        sq_norm, finite = self._stats
        self._stats = Stats(sq_norm + stats.sq_norm, finite and stats.finite)


def shards_of(program: Program, leaves: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return copies of this rank's shards of whole leaves."""
    devices = Devices()
    results = Results(
        program, [None] * len(program.plan.leaves), devices, BufferPool(new_memory), measure=False
    )
    packed: dict[int, Tensor] = {}
    for position, chunk in program.shards.chunks.items():
        bucket = program.plan.buckets[chunk.bucket]
        sources = [leaves[leaf] for leaf in bucket.leaves]
        if chunk.bucket not in packed:
            there = next((source for source in sources if source is not None), None)
            if there is not None:
                devices[bucket.device] = there.device
            dtype = getattr(torch, program.schedule.wire_dtypes[chunk.bucket])
            numel = program.schedule.buffer_numels[chunk.bucket]
            buffer = torch.empty(numel, dtype=dtype, device=devices[bucket.device])
            pack_(buffer, program.layouts[chunk.bucket], sources)
            packed[chunk.bucket] = buffer
        results.unpack(position, chunk.bucket, packed[chunk.bucket], 1.0)
    used = [leaves[leaf] is not None for leaf in program.plan.reduced]
    outside = {i: leaf for i, leaf in enumerate(leaves) if i not in program.plan.bucket_of}
    copies = {i: None if leaf is None else leaf.detach().clone() for i, leaf in outside.items()}
    results.complete(used, copies)
    return results.leaves
