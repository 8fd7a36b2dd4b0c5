"""Pool of flat buffers, which are reused once nothing outside holds a view of them.

[Note: results are values]
A synchronisation returns views of bucket memory. Each view has a storage of its own that keeps the
bucket's memory alive. A buffer is reused only when the pool is the only owner of its storage. In a
usual loop two buffers alternate for each bucket: the gradients of one step are still held when the
next step begins. A loop that donates its gradients, or drops them before the next step, needs one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fddp.native import extension

_KEPT = 2  # buffers of one key that a loop holds in turn; more are freed with their last view


#: Allocator of `numel` elements of a dtype on a device.
Allocate: TypeAlias = Callable[[int, torch.dtype, torch.device], Tensor]


class BufferPool:
    """Released buffers by key.

    Args:
        allocate: allocates a buffer of shape `(numel,)`.
        max_keys: number of keys whose buffers are kept, the most recently released; None for all.
    """

    def __init__(self, allocate: Allocate, max_keys: int | None = None) -> None:
        self._allocate = allocate
        self._max_keys = max_keys
        self._released: dict[Hashable, list[Tensor]] = {}
        self._use_count: Callable[[Tensor], int] = extension.load().storage_use_count
        self._live_views: Any = extension.load().LiveViews()

    def acquire(
        self,
        key: Hashable,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        allocate: Allocate | None = None,
    ) -> Tensor:
        """Return a buffer of shape `(numel,)` without other owners; its contents are undefined.

        Args:
            key: buffers are reused under the key that they were released with.
            numel: elements.
            dtype: dtype of the elements.
            device: device of the memory.
            allocate: allocator in place of the pool's.
        """
        released = self._released.get(key, ())
        for position, buffer in enumerate(released):
            if buffer.dtype != dtype or buffer.device != device or buffer.numel() != numel:
                continue
            if self._use_count(buffer) == 1:
                del self._released[key][position]
                return buffer
        return (allocate or self._allocate)(numel, dtype, device)

    def release(self, key: Hashable, buffer: Tensor) -> None:
        """Take a buffer back, also while views of it are in use."""
        released = self._released.pop(key, None)
        if released is None:
            released = []
            if self._max_keys is not None and len(self._released) >= self._max_keys:
                del self._released[next(iter(self._released))]
        self._released[key] = released  # the last key is the most recent
        released.append(buffer)
        del released[:-_KEPT]
        self._live_views.add(buffer)

    def reclaim(self, key: Hashable, is_free: Callable[[Tensor], bool]) -> Tensor | None:
        """Return the buffer that was released last if `is_free(buffer)`, whatever views of it are
        in use; None otherwise."""
        released = self._released.get(key, [])
        if not (released and is_free(released[-1])):
            return None
        # No other buffer of this key is needed while the caller keeps this one.
        return self._released.pop(key)[-1]

    def is_view(self, tensor: Tensor) -> bool:
        """Return True if a tensor is a view of a released buffer."""
        return bool(self._live_views.contains(tensor))

    def clear(self) -> None:
        """Drop all buffers."""
        self._released.clear()


def new_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate ordinary memory of shape `(numel,)`."""
    return torch.empty(numel, dtype=dtype, device=device)


def invalidate(tensors: Iterable[Tensor], text: str) -> None:
    """Detach views from their memory. Any later use of one raises a RuntimeError with `text`."""
    extension.load().invalidate(list(tensors), text)
