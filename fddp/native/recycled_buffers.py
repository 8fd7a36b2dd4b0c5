"""Memory of operators' buckets, used again once nobody holds it; see [Note: results are values]."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from fddp.native.pack import storage_use_count

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fddp.native.buffer_pool import Allocate

_KEPT = 2  # of one size; a loop holds two in turn
_SIZES = 32  # the sizes that were asked for last


class Memory:
    """Buffers by size, from `allocate`."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._lent: OrderedDict[tuple[int, torch.dtype, torch.device], list[Tensor]] = OrderedDict()

    def acquire(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of shape `(numel,)` that nobody holds; its contents are undefined."""
        lent = self._lent.get((numel, dtype, device), ())
        for position, buffer in enumerate(lent):
            if storage_use_count(buffer) == 1:
                return lent.pop(position)  # type: ignore[union-attr]  # not the empty tuple
        return self._allocate(numel, dtype, device)

    def lend(self, buffer: Tensor) -> None:
        """Takes note of a buffer that is done with, or whose slices were handed out."""
        key = (buffer.numel(), buffer.dtype, buffer.device)
        lent = self._lent.setdefault(key, [])
        self._lent.move_to_end(key)
        lent.append(buffer)
        del lent[:-_KEPT]
        if len(self._lent) > _SIZES:
            self._lent.popitem(last=False)

    def clear(self) -> None:
        """Lets go of all buffers."""
        self._lent.clear()
