"""Steps over virtual ranks; see [Note: virtual ranks] in `core/schedule/virtual.py`.

A rank packs the gradients of each virtual rank that it carries, one after the other, and adds them
along the tree. The gradients of the last one are those of the step itself: they may arrive during
its backward pass, and a bucket is sent as soon as they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fddp.core.numerics.weighting import WeightScale
from fddp.core.protocol.control_word import ControlWord, encode
from fddp.core.protocol.expected_counts import Arrivals
from fddp.core.schedule.op import Op
from fddp.core.schedule.schedule import Schedule
from fddp.core.schedule.virtual import SumTree, tree_additions
from fddp.errors import InternalError
from fddp.native.autograd_leaves import GradientCounter, GraphInfo
from fddp.native.buffer_pool import BufferPool, new_memory
from fddp.native.layout import Layout, views
from fddp.native.pack import plus
from fddp.runtime.contributions import (
    Accumulated,
    BackwardContributions,
    Contributions,
    TreeContributions,
    WeightedGradients,
)
from fddp.runtime.failures import pack_error
from fddp.runtime.inputs import outside_transforms
from fddp.runtime.program import BucketProgram, Program
from fddp.runtime.results import Devices
from fddp.runtime.sparse import SparseForm, gather_sparse, sum_sparse_along_tree
from fddp.runtime.state import BucketState, StepContext, StepState
from fddp.runtime.step import Step

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
        scale: the agreed unit of weight.
        devices: devices of the leaves.

    Attributes:
        program, scale: as above.
        weights: weights of the virtual ranks so far.
        used: for each reduced leaf, True if one of them has a gradient.
    """

    def __init__(
        self, program: Program, pool: BufferPool, scale: WeightScale, devices: Devices
    ) -> None:
        self.program, self.scale = program, scale
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
                    parts = contributions.parts(bucket.index)
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
        return plus(self._peaks[bucket], peak)

    def spans(self, bucket: int) -> list[Tensor]:
        """Sums of the spans before the last."""
        return self._spans[bucket]

    def sources(self, bucket: int, layout: Layout) -> list[WeightedGradients]:
        """Sums of all spans by leaf."""
        sums = [*self._spans[bucket], self._totals[bucket]]
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
            peak = contributions.pack_(bucket.index, buffer, bucket.layout, self.scale)
        except Exception as error:
            raise pack_error(self.program, bucket.index, buffer, contributions, error) from error
        self._peaks[bucket.index] = plus(self._peaks[bucket.index], peak)

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


class VirtualContributions(Contributions):
    """Contributions of several virtual ranks: those of the last, and the sums of the others.

    Attributes:
        sums: sums of the others.
    """

    sums: VirtualSums
    _program: Program

    def pack_(self, bucket: int, buffer: Tensor, layout: Layout, scale: WeightScale) -> float:
        return self.sums.close(bucket, buffer, super().pack_(bucket, buffer, layout, scale))

    def parts(self, bucket: int) -> list[WeightedGradients]:
        """Summands of a bucket: those of the last virtual rank. Of a sparse bucket those of all."""
        return [*self.sums.gradients(bucket), *super().parts(bucket)]

    def used(self, program: Program) -> list[bool]:
        return [bool(flag) for flag in self.sums.used | super().used(program)]

    def retain_sources(self) -> None:
        """The sums are sources of their own."""

    def sources(self, bucket: int) -> list[WeightedGradients]:
        return self.sums.sources(bucket, self._program.layouts[bucket])


class VirtualBackward(VirtualContributions, BackwardContributions):
    """Gradients that arrive during the backward pass of the last virtual rank."""

    def __init__(self, program: Program, *, weight: float, sums: VirtualSums) -> None:
        super().__init__(program, weight=weight, accumulated=None)
        self.sums = sums


class VirtualTree(VirtualContributions, TreeContributions):
    """Complete gradients of the last virtual rank, by leaf."""

    def __init__(
        self, program: Program, leaves: list[Tensor | None], weight: float, sums: VirtualSums
    ) -> None:
        super().__init__(program, leaves, weight)
        self.sums = sums


class Association(NamedTuple):
    """Sum over virtual ranks by one reduce-scatter.

    Attributes:
        tree: association of the sum, over the ranks that take part.
        place: place of this rank among them.
        is_first: True if the summands are those of single ranks, and not yet sums over ranks.
    """

    tree: SumTree
    place: int
    is_first: bool


@lru_cache(maxsize=16)
def associations(schedule: Schedule, rank: int) -> Mapping[int, Association]:
    """Return the sums over virtual ranks of several ranks, by position of their reduce-scatter."""
    virtual, topology = schedule.virtual, schedule.topology
    found = {}
    for position, op in enumerate(schedule.ops):
        parts = topology.size(op.axes)
        if virtual is not None and op.kind == "reduce_scatter" and parts > 1:
            block = topology.size(op.region.shard)
            group, place = divmod(rank // block, parts)
            found[position] = Association(virtual.stage(block, parts)[group], place, block == 1)
    return found


class VirtualBucket(BucketState):
    """A bucket of which ranks may send several partial sums.

    Attributes:
        associations: sums over ranks, by position of their reduction.
        rows: memory of several sums, by position of their reduction.
        left: sums that a reduction has left for the next one, by their elements of the buffer. The
            buffer holds the last of them, which is not among these.
    """

    __slots__ = ("associations", "left", "rows")

    def __init__(self, program: BucketProgram, associations: Mapping[int, Association]) -> None:
        super().__init__(program)
        self.associations = associations
        self.rows: dict[int, Tensor] = {}
        self.left: dict[tuple[int, int], Tensor] = {}

    def order(self, step: StepState, position: int) -> bool | SumTree:
        """Association of sums over ranks."""
        association = self.associations.get(position)
        return True if association is None else association.tree

    def operand(self, step: StepState, position: int, op: Op) -> Tensor:
        """Tensor to reduce: the buffer, or rows of it for each of several sums."""
        own = super().operand(step, position, op)
        association = self.associations.get(position)
        if association is None or association.tree.width == 1:
            return own
        ranks, width = len(association.tree.summands), association.tree.width
        key = ("rows", self.program.index, position)
        memory = step.pool.acquire(key, width * own.numel(), own.dtype, own.device)
        rows = memory.view(ranks, width, -1)
        start, stop = step.program.extents[position]
        before: Iterable[Tensor] = ()
        if not association.is_first:
            before = self.left.pop((start, stop), ())
        elif isinstance(step.source, VirtualContributions):
            before = [span[start:stop] for span in step.source.sums.spans(op.bucket)]
        for number, total in enumerate((*before, own)):
            rows[:, number].copy_(total.view(ranks, -1))
        self.rows[position] = memory
        return memory

    def wait(self, step: StepState, position: int) -> None:
        """As `BucketState.wait`; then copies the last sum of several rows to the buffer."""
        super().wait(step, position)
        memory = self.rows.pop(position, None)
        if memory is None or self.buffer is None:
            return
        tree, place, _ = self.associations[position]
        rows = memory.view(len(tree.summands), tree.width, -1)[place]
        start, stop = step.program.extents[position]
        start += place * ((stop - start) // len(tree.summands))
        stop = start + rows.shape[1]
        *before, last = rows[: tree.sums].unbind(0)
        self.buffer[start:stop].copy_(last)
        if before:
            self.left[start, stop] = rows[: tree.sums - 1]  # keeps the memory from being reused
        step.pool.release(("rows", self.program.index, position), memory)

    def gathered(
        self,
        step: StepState,
        form: SparseForm,
        parts: Sequence[tuple[Tensor | None, float]],
        what: str,
    ) -> Tensor:
        """As `BucketState.gathered`, with the sums of this rank's spans, along the tree."""
        virtual = step.program.schedule.virtual
        if virtual is None:
            raise InternalError("a step over virtual ranks has a schedule without")
        rows = [form.summed([] if part[0] is None else [(part[0], part[1])]) for part in parts]
        rows += [form.empty()] * (len(virtual.runs[step.program.rank]) - len(rows))
        own = []
        for start, stop in virtual.spans[step.program.rank]:
            number = stop - start
            own.append(sum_sparse_along_tree(rows[:number], tree_additions(number)))
            rows = rows[number:]
        return gather_sparse(form, own, step.transport, what, virtual.tree)


class VirtualStep(Step):
    """A step in which each rank contributes the gradients of the virtual ranks that it carries.

    Attributes:
        sums: sums of the virtual ranks before the last, during a loss function.
    """

    sums: VirtualSums

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        found = associations(self.program.schedule, self.program.rank)
        self.buckets = [VirtualBucket(bucket, found) for bucket in self.program.buckets]

    def backward_contributions(
        self, program: Program, *, weight: float, accumulated: Accumulated | None
    ) -> BackwardContributions:
        """Contributions of the backward pass of the next virtual rank."""
        if self.sums.missing:
            return BackwardContributions(program, weight=weight, accumulated=accumulated)
        return VirtualBackward(program, weight=weight, sums=self.sums)

    def arm(self, leaf_set: GradientCounter, view: GraphInfo, previous: Arrivals | None) -> None:
        """As `Step.arm`. The buckets of virtual ranks before the last are packed after backward."""
        contributions = self.contributions
        if isinstance(contributions, VirtualBackward):
            super().arm(leaf_set, view, previous)
            return
        assert isinstance(contributions, BackwardContributions)
        contributions.leaf_set = leaf_set
        contributions.arm(view, previous, self.buffer_of, self.scale, _ignore)

    def new_sums(self) -> VirtualSums:
        """Return sums for the virtual ranks of this rank, which are empty."""
        return VirtualSums(self.program, self.pool, self.scale, self.devices)

    @property
    def carried(self) -> range:
        """Virtual ranks that this rank carries."""
        virtual = self.program.schedule.virtual
        return range(0) if virtual is None else virtual.runs[self.program.rank]

    def own_word(self) -> npt.NDArray[np.floating[Any]]:
        """Sum of the control words of the virtual ranks, of which the last reports on the rank."""
        layout, total = self.program.control, super().own_word()
        weights: Sequence[float] = [0.0] * (len(self.carried) - 1)
        if isinstance(self.source, VirtualContributions):
            weights = self.source.sums.weights
        for weight in weights:
            word = ControlWord(
                self.fingerprint,
                weight,
                used=[False] * layout.leaves,
                late=[False] * layout.buckets,
                method=self.method,
                has_next=self.has_next,
            )
            total += encode(layout, word)
        return total

    def _close(self) -> None:
        if isinstance(self.contributions, VirtualContributions):
            self.contributions.sums.release()
        super()._close()


def _ignore(bucket: int) -> None:
    """Ignore that a bucket is complete."""
