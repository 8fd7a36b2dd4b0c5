"""All-gather of shards whose results are awaited bucket by bucket."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from fddp.native.pack import slices
from fddp.runtime.program import Instruction
from fddp.runtime.state import StepContext
from fddp.runtime.step import Step


class GatherStep(Step):
    """A step whose operations run in forward order; see `make_all_gather_schedule`.

    `start` launches all collectives that need not wait for others. `arrive` then waits for one
    bucket, and `Engine.finish` for all.
    """

    def __init__(self, context: StepContext) -> None:
        super().__init__(context)
        self._limit = -1  # operations up to here may wait

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
        self.bucket_ready(bucket)

    def _may_run(self, instruction: Instruction) -> bool:
        return instruction.position <= self._limit or super()._may_run(instruction)
