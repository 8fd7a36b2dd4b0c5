"""Sums over the virtual ranks of several ranks; see [Note: virtual ranks] in
`core/schedule/virtual.py`.

A rank sends one partial sum for each span of virtual ranks that it carries, as rows of one
reduce-scatter, which adds them along the tree. What the buffer cannot hold of the result stays in
the step's scratch memory for the next reduction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from fddp.core.schedule.schedule import Schedule
from fddp.core.schedule.virtual import SumTree
from fddp.runtime import operations
from fddp.runtime.step import Step
from fddp.transport.base import Work


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


class RowsWork:
    """A reduce-scatter of several rows. Waiting for it copies the last sum to the buffer.

    Attributes:
        done_s: as `Work.done_s`.
    """

    def __init__(self, step: Step, position: int, memory: Tensor, work: Work) -> None:
        self._step, self._position = step, position
        self._memory, self._work = memory, work

    @property
    def done(self) -> bool:
        """True if `wait` would not block."""
        return self._work.done

    @property
    def done_s(self) -> float | None:
        """As `Work.done_s`."""
        return self._work.done_s

    def wait(self, what: str) -> None:
        """Wait for the collective, and take its results out of the rows."""
        self._work.wait(what)
        step, position = self._step, self._position
        program = step.program
        tree, place, _ = associations(program.schedule, program.rank)[position]
        bucket = program.schedule.ops[position].bucket
        rows = self._memory.view(len(tree.summands), tree.width, -1)[place]
        start, stop = program.extents[position]
        start += place * ((stop - start) // len(tree.summands))
        stop = start + rows.shape[1]
        *before, last = rows[: tree.sums].unbind(0)
        step.memory(bucket)[start:stop].copy_(last)
        if before:
            # Keeps the memory from being reused.
            step.scratch["left", bucket, start, stop] = rows[: tree.sums - 1]
        step.pool.release(("rows", bucket, position), self._memory)


def launch_rows(step: Step, position: int, wait_soon: bool) -> Work | RowsWork:
    """Start a reduce-scatter along the tree of virtual ranks."""
    program = step.program
    association = associations(program.schedule, program.rank).get(position)
    if association is None:
        return operations.launch(step, position, wait_soon)
    op, tree = program.schedule.ops[position], association.tree
    own = operations.operand(step, position)
    memory = own
    if tree.width > 1:
        key = ("rows", op.bucket, position)
        memory = step.pool.acquire(key, tree.width * own.numel(), own.dtype, own.device)
        rows = memory.view(len(tree.summands), tree.width, -1)
        for number, total in enumerate((*_before(step, position, association), own)):
            rows[:, number].copy_(total.view(len(tree.summands), -1))
    work = step.transport.reduce_scatter(
        memory,
        axes=op.axes,
        average=step.sums.averages,
        ordered=tree,
        record_time=step.record_time,
        wait_soon=wait_soon,
    )
    started = work if memory is own else RowsWork(step, position, memory, work)
    step.works[op.bucket] = started
    return started


def _before(step: Step, position: int, association: Association) -> Iterable[Tensor]:
    """Partial sums of this rank but the one in the buffer."""
    op = step.program.schedule.ops[position]
    start, stop = step.program.extents[position]
    if not association.is_first:
        left = step.scratch.pop(("left", op.bucket, start, stop), None)
        return () if left is None else left.unbind(0)
    return [span[start:stop] for span in step.source.spans(op.bucket)]
