"""All-gather of shards whose results are awaited bucket by bucket."""

from __future__ import annotations

from collections import deque
from functools import cached_property

from torch import Tensor

from fddp.core.schedule.op import Op, is_collective
from fddp.native.pack import slices
from fddp.runtime.failures import locate
from fddp.runtime.program import Instruction
from fddp.runtime.state import StepContext
from fddp.runtime.step import Step


class GatherStep(Step):
    """A step whose operations run in forward order; see `make_all_gather_schedule`.

    `start` launches all collectives that need not wait for others. `arrive` then waits for one
    bucket, and `Engine.finish` for all.

    [Note: further all-gathers] On a mesh of several axes, a bucket has one all-gather for each, and
    each waits for the one before. `arrive` launches the further ones of later buckets, too, up to
    the first that would wait. They are thus launched at different times on different ranks, but in
    the order of the schedule on all of them, and after all first ones. None is launched before the
    control word was read: ranks that give up together must have launched the same collectives.
    """

    gathers_together = True

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        self._limit = -1  # operations up to here may wait
        # Collectives that wait for others and were not launched, and positions of those that were.
        self._further = deque(filter(_waits_for_others, self._instructions))
        self._ahead: set[int] = set()
        self._is_irregular = bool(self._further)

    @property
    def is_broken(self) -> bool:
        """True if an operation has failed; `Engine.finish` raises its error."""
        return self._broken is not None

    @cached_property
    def unpacks(self) -> dict[int, int]:
        """Position of the last operation on each bucket."""
        ops = enumerate(self.program.schedule.ops)
        return {op.bucket: position for position, op in ops if op.kind == "unpack"}

    def destinations(self) -> list[Tensor | None]:
        """Return by leaf the memory that it is gathered into, in the shape of the leaf. None for
        leaves in no bucket, and of buckets that could not be packed."""
        leaves: list[Tensor | None] = [None] * len(self.leaves)
        for state in self.buckets:
            if state.buffer is not None:
                views = slices(state.buffer, state.program.layout)
                for leaf, view in zip(state.program.leaves, views, strict=True):
                    leaves[leaf] = view
        return leaves

    def has_arrived(self, bucket: int) -> bool:
        """Return True if a bucket was awaited."""
        # All operations are unconditional, so that the cursor is a position.
        return self.cursor > self.unpacks[bucket]

    def arrive(self, bucket: int) -> None:
        """Wait for a bucket, and for those before it. Never raises: see `is_broken`."""
        self._limit = max(self._limit, self.unpacks[bucket])
        self._launch_ahead()
        self.bucket_ready(bucket)
        self._launch_ahead()

    def _launch_ahead(self) -> None:
        """Launch what would not wait; see [Note: further all-gathers]. Never raises."""
        if self.report is None or self._broken is not None:
            return
        try:
            self._launch_further()
        except BaseException as error:
            locate(error, self.program, self.current, self.number)
            self._broken = error

    def _launch_further(self) -> None:
        while self._further:
            position, op, awaited, _ = self._further[0]
            state = self.buckets[op.bucket]
            if position >= self.cursor:
                if not all(state.is_done(dep) for dep, _ in awaited):
                    return
                self._ahead.add(position)
                self.current = op
                for dep, _ in awaited:
                    state.wait(self, dep)
                state.launch(self, position, op)
            self._further.popleft()

    def _applies(self, position: int, op: Op) -> bool:
        return position not in self._ahead

    def _may_run(self, instruction: Instruction) -> bool:
        return instruction.position <= self._limit or super()._may_run(instruction)


def _waits_for_others(instruction: Instruction) -> bool:
    return is_collective(instruction.op) and any(bucket >= 0 for _, bucket in instruction.awaited)
