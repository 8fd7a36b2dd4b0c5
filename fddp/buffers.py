"""Flat memory for buckets, used again once nothing outside holds a view of it.

[Note: results are values]
What a synchronisation returns are views of bucket memory, each with a storage of its own that keeps
the bucket's alive. A buffer goes back into use only when its storage has no owner but the pool. In
the usual loop two buffers alternate for each bucket: the gradients of one step are still held when
the next begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from fddp.pack import storage_use_count

# What a loop holds in turn; more are freed when the caller lets go of them.
_KEPT = 2


#: makes memory of so many elements, of this dtype, on this device
Allocate: TypeAlias = Callable[[int, torch.dtype, torch.device], Tensor]


class BufferPool:
    """Buffers by bucket, in memory that `allocate` makes."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._lent: dict[int, list[Tensor]] = {}

    def acquire(self, bucket: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of shape `(numel,)` that nobody holds; its contents are undefined."""
        lent = self._lent.get(bucket, [])
        for position, buffer in enumerate(lent):
            fits = buffer.dtype == dtype and buffer.device == device and buffer.numel() == numel
            if fits and storage_use_count(buffer) == 1:
                return lent.pop(position)
        return self._allocate(numel, dtype, device)

    def lend(self, bucket: int, buffer: Tensor) -> None:
        """Takes note of a buffer whose views have been handed out."""
        lent = self._lent.setdefault(bucket, [])
        lent.append(buffer)
        del lent[:-_KEPT]

    def clear(self) -> None:
        """Lets go of all buffers."""
        self._lent.clear()
