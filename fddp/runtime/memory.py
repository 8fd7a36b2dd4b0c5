"""Where the buckets and the control word of one step lie on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fddp.core.schedule.op import Op, is_piggybacked
from fddp.errors import InternalError
from fddp.runtime.context import BucketState, Setting
from fddp.runtime.results import Devices


class StepMemory:
    """Finds, lends and takes what the operations of a step work on.

    Attributes:
        buckets: how far each bucket is, and its buffers.
        devices: where leaves live.
    """

    def __init__(self, setting: Setting) -> None:
        self.buckets = [BucketState() for _ in setting.program.plan.buckets]
        self.devices = Devices()
        self._setting = setting
        self._program = setting.program
        self._carrier = setting.program.schedule.piggyback_op
        self._word: Tensor | None = None

    def place(self, leaves: Sequence[Tensor | None]) -> None:
        """Buckets belong on the devices of these leaves."""
        for bucket in self._program.plan.buckets:
            if bucket.device not in self.devices:
                leaf = leaves[bucket.leaves[0]]
                if leaf is not None:
                    self.devices[bucket.device] = leaf.device

    def acquire(self, bucket: int) -> Tensor:
        """Memory for a dense bucket, from the pool; its contents are undefined."""
        dtype = getattr(torch, self._program.schedule.wire_dtypes[bucket])
        numel = self._program.buffer_numels[bucket]
        return self._setting.pool.acquire(bucket, numel, dtype, self._device_of(bucket))

    def lend(self) -> None:
        """Buffers are used again once nobody holds a result over them."""
        for bucket, state in enumerate(self.buckets):
            for memory in (state.repair, state.buffer):
                if memory is not None:
                    self._setting.pool.lend(bucket, memory)

    def of(self, op: Op) -> Tensor:
        """What an operation works on, on this rank."""
        state = self.buckets[op.bucket]
        memory = state.repair if op.region.buffer == "repair" else state.buffer
        if memory is None:
            raise InternalError(f"{op.kind} of bucket {op.bucket} before it was packed")
        start, stop = self._program.extent(op)
        return memory[start:stop]

    def travelling(self, position: int, op: Op) -> Tensor:
        """What a collective works on, on this rank: with the word behind it that it carries, which
        is all of it where the bucket is idle."""
        if position != self._carrier:
            return self.of(op)
        word, buffer = self.word, self.buckets[op.bucket].buffer
        if op.bucket in self._setting.idle or buffer is None:
            return word
        return buffer[op.region.start :]

    def put_word(self, op: Op, vector: Tensor, buffer_of: Callable[[int], Tensor]) -> Tensor:
        """The control word where it is summed: behind its bucket, or by itself."""
        if not is_piggybacked(op):
            self._word = vector.to(self._setting.transport.control_device)
        elif op.bucket in self._setting.idle:
            self._word = vector.to(self._device_of(op.bucket))
        else:
            buffer = buffer_of(op.bucket)
            self._word = buffer[self._program.schedule.buffer_numels[op.bucket] :]
            self._word.copy_(vector)
        return self._word

    @property
    def word(self) -> Tensor:
        """The control word, summed once its operation is done."""
        if self._word is None:
            raise InternalError("the control word was to be used before it was written")
        return self._word

    def _device_of(self, bucket: int) -> torch.device:
        return self.devices[self._program.plan.buckets[bucket].device]
