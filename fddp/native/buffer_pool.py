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
from typing import TypeAlias

import torch
from torch import Tensor

from fddp.native import extension
from fddp.native.capture import is_capturing

_WITHOUT_STREAMS = ("cpu", "meta")
_KEPT = 2  # buffers kept per key; older ones are freed with their last view

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
        self._released: dict[Hashable, list[Tensor]] = {}
        self._first_free = extension.compiled.first_free
        self._live_views = extension.compiled.LiveViews()
        self._streams: dict[Hashable, set[torch.Stream]] = {}  # by key, on which it was released

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
            position = self._first_free(released, numel, dtype, device)
            if position >= 0:
                if self._streams:
                    self._await_streams(key, device)
                return released.pop(position)
        return (allocate or self._allocate)(numel, dtype, device)

    def release(self, key: Hashable, buffer: Tensor) -> None:
        """Return a buffer to the pool. Views of it may still be in use."""
        has_streams = buffer.device.type not in _WITHOUT_STREAMS
        if has_streams and is_capturing(buffer.device.type):
            return
        released = self._released.pop(key, None)
        if released is None:
            released = []
            if self._max_keys is not None and len(self._released) >= self._max_keys:
                oldest = next(iter(self._released))
                del self._released[oldest]
                self._streams.pop(oldest, None)
        self._released[key] = released  # the last key is the most recent
        released.append(buffer)
        if len(released) > _KEPT:
            del released[0]
        self._live_views.add(buffer)
        if has_streams:
            stream = torch.accelerator.current_stream(buffer.device)
            self._streams.setdefault(key, set()).add(stream)
            # The pool may drop the buffer, or be dropped, while work on this stream is in flight.
            buffer.record_stream(stream)

    def _await_streams(self, key: Hashable, device: torch.device) -> None:
        if key in self._streams:
            current = torch.accelerator.current_stream(device)
            for stream in self._streams[key] - {current}:
                current.wait_stream(stream)

    def reclaim(self, key: Hashable, is_free: Callable[[Tensor], bool]) -> Tensor | None:
        """Return the last released buffer if `is_free(buffer)`, even if views of it are in use;
        None otherwise."""
        released = self._released.get(key, [])
        if not (released and is_free(released[-1])):
            return None
        self._await_streams(key, released[-1].device)
        # The caller keeps this buffer, so the key needs no other.
        return self._released.pop(key)[-1]

    def is_view(self, tensor: Tensor) -> bool:
        """Return True if a tensor is a view of a released buffer."""
        return self._live_views.contains(tensor)

    def held_bytes(self) -> int:
        """Return the bytes of released buffers that views outside use."""
        released = [buffer for buffers in self._released.values() for buffer in buffers]
        return self._live_views.held_bytes(released)

    def trim(self) -> None:
        """Drop the buffers that no view uses."""
        owners = extension.compiled.storage_use_count
        for key, buffers in self._released.items():
            self._released[key] = [buffer for buffer in buffers if owners(buffer) > 1]

    def clear(self) -> None:
        """Drop all buffers."""
        self._released = {}


def new_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate ordinary memory of shape `(numel,)`."""
    return torch.empty(numel, dtype=dtype, device=device)


def invalidate(tensors: Iterable[Tensor], text: str) -> None:
    """Detach views from their memory. Any later use of one raises a RuntimeError with `text`."""
    extension.compiled.invalidate(list(tensors), text)
