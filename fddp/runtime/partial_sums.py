"""Sums over the virtual ranks of several ranks; see [Note: virtual ranks] in
`core/schedule/virtual.py`.

A rank sends one partial sum for each span of virtual ranks that it carries, as rows of one
reduce-scatter, which adds them along the tree. What the buffer cannot hold of the result stays in
the step's scratch memory for the next reduction.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from fddp.runtime import operations
from fddp.runtime.step import Step
from fddp.transport.base import Work


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
        tree, op = program.trees[position], program.schedule.ops[position]
        block = program.schedule.topology.size(op.region.shard)
        place, bucket = program.rank // block % len(tree.summands), op.bucket
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


def launch_rows(step: Step, position: int, wait_soon: bool) -> RowsWork:
    """Start a reduce-scatter in which some rank has several summands, or keeps several sums."""
    op, tree = step.program.schedule.ops[position], step.program.trees[position]
    own = operations.operand(step, position)
    key = ("rows", op.bucket, position)
    memory = step.pool.acquire(key, tree.width * own.numel(), own.dtype, own.device)
    rows = memory.view(len(tree.summands), tree.width, -1)
    for number, total in enumerate((*_before(step, position), own)):
        rows[:, number].copy_(total.view(len(tree.summands), -1))
    work = step.transport.reduce_scatter(
        memory,
        axes=op.axes,
        tree=tree,
        record_time=step.record_time,
        wait_soon=wait_soon,
    )
    started = step.works[op.bucket] = RowsWork(step, position, memory, work)
    return started


def _before(step: Step, position: int) -> Iterable[Tensor]:
    """Partial sums of this rank but the one in the buffer."""
    program = step.program
    op = program.schedule.ops[position]
    start, stop = program.extents[position]
    if program.schedule.topology.size(op.region.shard) > 1:  # sums over ranks already
        left = step.scratch.pop(("left", op.bucket, start, stop), None)
        return () if left is None else left.unbind(0)
    return [span[start:stop] for span in step.source.spans(op.bucket)]
