"""Contributions of several virtual ranks; see [Note: virtual ranks] in `core/schedule/virtual.py`.

A rank packs the gradients of each virtual rank that it carries, one after the other, and adds them
along the tree. The gradients of the last one are those of the step itself: they may arrive during
its backward pass, and a bucket is sent as soon as they have.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fddp.core.schedule.sum_tree import tree_additions
from fddp.errors import InternalError
from fddp.native import extension
from fddp.native.buffer_pool import BufferPool, new_memory
from fddp.native.layout import views
from fddp.runtime.contributions import (
    Contributions,
    WeightedGradients,
    divisor_of_squares,
    pack_bucket_,
)
from fddp.runtime.failures import pack_error
from fddp.runtime.inputs import outside_transforms
from fddp.runtime.program import BucketProgram, Program
from fddp.runtime.results import Devices

_WITHOUT = WeightedGradients([None], 0.0)  # a virtual rank without gradient of a sparse leaf


class _Turn(NamedTuple):
    """Additions after one virtual rank."""

    additions: int
    ends_span: bool


def _turns(program: Program) -> list[_Turn]:
    """Return the additions after each virtual rank that the program's rank carries."""
    virtual = program.schedule.virtual
    if virtual is None:
        raise InternalError("a schedule without virtual ranks has no turns")
    turns = []
    for start, stop in virtual.spans[program.rank]:
        *inner, last = tree_additions(stop - start)
        turns += [_Turn(times, ends_span=False) for times in inner] + [_Turn(last, ends_span=True)]
    return turns


class VirtualSums:
    """Sums over the virtual ranks that this rank carries, all but the last, in the tree's order.

    At most log2(n) + 1 buffers of a bucket are in use for a span of n virtual ranks, and one for
    each span before it.

    Args:
        program: program of the step.
        pool: memory of the sums.
        devices: devices of the leaves.

    Attributes:
        program: as above.
        weights: weights of the virtual ranks so far.
        used: for each reduced leaf, True if one of them has a gradient.
        squares: by bucket, for each leaf the sum of squared norms times weights, if these are
            measured.
    """

    def __init__(self, program: Program, pool: BufferPool, devices: Devices) -> None:
        self.program = program
        self._pool, self._devices = pool, devices
        self._turns = _turns(program)
        # By bucket: sums of one span, complete spans, and buffers that are free.
        self._open: list[list[Tensor]] = [[] for _ in program.buckets]
        self._spans: list[list[Tensor]] = [[] for _ in program.buckets]
        self._free: list[list[Tensor]] = [[] for _ in program.buckets]
        self._totals: dict[int, Tensor] = {}  # the last span
        # Of sparse buckets, by virtual rank; they are added once all weights are known.
        self._gradients: list[list[WeightedGradients]] = [[] for _ in program.buckets]
        self._peaks = [0.0] * len(program.buckets)
        self.weights: list[float] = []
        self.used = np.zeros(len(program.plan.reduced), dtype=bool)
        self.squares: dict[int, Tensor] = {}

    @property
    def missing(self) -> int:
        """Number of virtual ranks whose gradients are not added yet, without the last."""
        return len(self._turns) - 1 - len(self.weights)

    def add(self, contributions: Contributions) -> None:
        """Add the gradients of the next virtual rank, which is not the last."""
        turn = self._turns[len(self.weights)]
        self.weights.append(contributions.weight)
        self.used |= contributions.used(self.program)
        with outside_transforms(), torch.no_grad():  # the memory is used in later steps, too
            for bucket in self.program.buckets:
                if bucket.sparse:
                    parts = contributions.sources(self.program, bucket.index)
                    self._gradients[bucket.index] += parts or [_WITHOUT]
                else:
                    self._add(bucket, contributions, turn)

    def _add(self, bucket: BucketProgram, contributions: Contributions, turn: _Turn) -> None:
        buffer = self._memory(bucket)
        self._pack(bucket, buffer, contributions)
        own = self._open[bucket.index]
        for _ in range(turn.additions):
            left = own.pop()
            torch.add(left, buffer, out=buffer)
            self._free[bucket.index].append(left)
        (self._spans[bucket.index] if turn.ends_span else own).append(buffer)

    def close(self, bucket: int, buffer: Tensor, peak: float) -> float:
        """Add the sums of the last span to the gradients of the last virtual rank in `buffer`.
        Return the bound on magnitudes of all virtual ranks, given that of the last."""
        for left in reversed(self._open[bucket]):
            own = buffer[: len(left)]
            torch.add(left, own, out=own)
        self._totals[bucket] = buffer
        return extension.compiled.add_bounds(self._peaks[bucket], peak)

    def spans(self, bucket: int) -> list[Tensor]:
        """Sums of the spans before the last."""
        return self._spans[bucket]

    def sources(self, bucket: int) -> list[WeightedGradients]:
        """Sums of all spans by leaf."""
        layout, sums = self.program.layouts[bucket], [*self._spans[bucket], self._totals[bucket]]
        return [WeightedGradients(views(total, layout), 1.0) for total in sums]

    def gradients(self, bucket: int) -> list[WeightedGradients]:
        """Gradients of a sparse bucket, one for each virtual rank so far; none of a dense one."""
        return self._gradients[bucket]

    def release(self) -> None:
        """Return the memory to the pool, and drop sparse gradients."""
        self._gradients = [[] for _ in self._gradients]
        for bucket, lists in enumerate(zip(self._open, self._spans, self._free, strict=True)):
            buffers = [buffer for buffers in lists for buffer in buffers]
            for slot, buffer in enumerate(buffers):
                self._pool.release(("virtual", bucket, slot), buffer)
            for buffers in lists:
                buffers.clear()

    def _pack(self, bucket: BucketProgram, buffer: Tensor, contributions: Contributions) -> None:
        buffer[bucket.numel :].zero_()
        try:
            packed = pack_bucket_(
                contributions,
                self.program,
                bucket.index,
                buffer,
                self.program.scale,
                sums_squares=len(self.program.groups) > 0,
            )
        except Exception as error:
            raise pack_error(self.program, bucket.index, buffer, contributions, error) from error
        bound = extension.compiled.add_bounds(self._peaks[bucket.index], packed.peak)
        self._peaks[bucket.index] = bound
        if packed.squares is not None and contributions.weight > 0.0:
            own = packed.squares / divisor_of_squares(self.program.scale, contributions.weight)
            self.squares[bucket.index] = self.squares.get(bucket.index, 0.0) + own

    def _memory(self, bucket: BucketProgram) -> Tensor:
        index = bucket.index
        if self._free[index]:
            return self._free[index].pop()
        slot = len(self._open[index]) + len(self._spans[index])
        return self._pool.acquire(
            ("virtual", index, slot),
            bucket.padded_numel,
            bucket.wire_dtype,
            self._devices[bucket.device],
            allocate=new_memory,
        )
