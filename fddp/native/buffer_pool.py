"""Flat memory for buckets, used again once nothing outside holds a view of it.

[Note: results are values]
What a synchronisation returns are views of bucket memory, each with a storage of its own that keeps
the bucket's alive. A buffer goes back into use only when its storage has no owner but the pool. In
the usual loop two buffers alternate for each bucket: the gradients of one step are still held when
the next begins. Who donates gradients, or drops them before the next step, needs one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fddp.native import extension
from fddp.native.pack import storage_use_count

# What a loop holds in turn; more are freed when the caller lets go of them.
_KEPT = 2


#: makes memory of so many elements, of this dtype, on this device
Allocate: TypeAlias = Callable[[int, torch.dtype, torch.device], Tensor]


class BufferPool:
    """Buffers by bucket, from `allocate`; by other keys, those that do not travel."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._lent: dict[Hashable, list[Tensor]] = {}
        self._lenders: Any = extension.load().Lenders()

    def acquire(
        self, key: Hashable, numel: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A buffer of shape `(numel,)` that nobody holds; its contents are undefined."""
        lent = self._lent.get(key, [])
        for position, buffer in enumerate(lent):
            fits = buffer.dtype == dtype and buffer.device == device and buffer.numel() == numel
            if fits and storage_use_count(buffer) == 1:
                return lent.pop(position)
        if isinstance(key, int):
            return self._allocate(numel, dtype, device)
        return torch.empty(numel, dtype=dtype, device=device)

    def lend(self, key: Hashable, buffer: Tensor) -> None:
        """Takes note of a buffer whose views have been handed out."""
        lent = self._lent.setdefault(key, [])
        lent.append(buffer)
        del lent[:-_KEPT]
        self._lenders.add(buffer)

    def take_back(self, bucket: int, is_free: Callable[[Tensor], bool]) -> Tensor | None:
        """The buffer that was lent last, whoever holds views of it, if the caller knows that it may
        be written; None if not."""
        lent = self._lent.get(bucket, [])
        if not (lent and is_free(lent[-1])):
            return None
        # No other is wanted, while gradients stay where they are.
        return self._lent.pop(bucket)[-1]

    def has_lent(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of the views that were handed out."""
        return bool(self._lenders.lent(tensor))

    def clear(self) -> None:
        """Lets go of all buffers."""
        self._lent.clear()


def vacate(tensors: Iterable[Tensor], text: str) -> None:
    """Takes the memory away from views that a pool has lent: using one raises, with this text."""
    extension.load().vacate(list(tensors), text)
