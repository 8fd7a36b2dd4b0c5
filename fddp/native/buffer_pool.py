"""Pool of flat buffers, each reused once no view of it is held outside.

[Note: results are values]
A synchronisation returns views of bucket memory. Each view has a storage of its own that keeps the
bucket's memory alive. A buffer is reused only when the pool is the only owner of its storage. In a
typical loop two buffers alternate for each bucket, as the gradients of one step are still held when
the next begins. A loop that donates or drops its gradients before the next step needs one. On an
accelerator, the stream that takes a buffer first waits for those that had released it: they may
still read it. A step that is captured in a graph has memory of its own, which is never reused: each
replay writes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from fddp.native import extension
from fddp.native.capture import is_capturing

if TYPE_CHECKING:
    from fddp._C import ReleasedBuffers

_WITHOUT_STREAMS = ("cpu", "meta")

#: Allocator of `numel` elements of a dtype on a device.
Allocate: TypeAlias = Callable[[int, torch.dtype, torch.device], Tensor]


class BufferPool:
    """Released buffers by key.

    Args:
        allocate: allocates a buffer of shape `(numel,)`.
        max_keys: number of most recently released keys to keep; None for all.
    """

    def __init__(self, allocate: Allocate, max_keys: int | None = None) -> None:
        self._allocate = allocate
        self._max_keys = max_keys
        self._released: dict[Hashable, ReleasedBuffers] = {}
        self._live_views = extension.compiled.LiveViews()

    def acquire(
        self,
        key: Hashable,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        allocate: Allocate | None = None,
    ) -> Tensor:
        """Return a buffer of shape `(numel,)` without other owners and with undefined contents.

        A buffer released under the same key is reused. `allocate` overrides the pool's allocator.
        """
        released = self._released.get(key)
        if released and (device.type in _WITHOUT_STREAMS or not is_capturing(device.type)):
            buffer = released.take(numel, dtype, device)
            if buffer is not None:
                return buffer
        return (allocate or self._allocate)(numel, dtype, device)

    def release(self, key: Hashable, buffer: Tensor) -> None:
        """Return a buffer to the pool. Views of it may still be in use."""
        device_type = buffer.device.type
        if device_type not in _WITHOUT_STREAMS and is_capturing(device_type):
            return
        released = self._released.pop(key, None)
        if released is None:
            released = extension.compiled.ReleasedBuffers()
            if self._max_keys is not None and len(self._released) >= self._max_keys:
                del self._released[next(iter(self._released))]
        self._released[key] = released  # the last key is the most recent
        released.add(buffer)
        self._live_views.add(buffer)

    def reclaim(self, key: Hashable, is_free: Callable[[Tensor], bool]) -> Tensor | None:
        """Return the last released buffer if `is_free(buffer)`, even if views of it are in use;
        None otherwise."""
        released = self._released.get(key)
        if released is None or not any(map(is_free, released.buffers()[-1:])):
            return None
        return released.take_last()

    def is_view(self, tensor: Tensor) -> bool:
        """Return True if a tensor is a view of a released buffer."""
        return self._live_views.contains(tensor)

    def released(self) -> list[Tensor]:
        """Return the released buffers, by key from the first to the last."""
        return [buffer for entry in self._released.values() for buffer in entry.buffers()]

    def held_bytes(self) -> int:
        """Return the bytes of released buffers that views outside use."""
        return self._live_views.held_bytes(self.released())

    def trim(self) -> None:
        """Drop the buffers that no view uses."""
        for released in self._released.values():
            released.trim()

    def clear(self) -> None:
        """Drop all buffers."""
        self._released = {}


def new_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate ordinary memory of shape `(numel,)`."""
    return torch.empty(numel, dtype=dtype, device=device)


def invalidate(tensors: Iterable[Tensor], text: str) -> None:
    """Detach views from their memory. Any later use of one raises a RuntimeError with `text`."""
    extension.compiled.invalidate(list(tensors), text)
