"""The memory traffic of a synchronisation alone: a bound for what a step costs beyond computing.

Each gradient is read and written once when it is packed into a bucket, and each element of the
buckets is read and written once when they are reduced. Both are run here on their own, on all ranks
at once, over all of a model's gradients. Forward and backward evict gradients and buckets of the
last step from the caches, so each call takes other memory than the last ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import torch
from torch import Tensor

from fddp.transport.base import Transport

PASSES = "pack + reduce alone"
_CYCLE_BYTES = 2**27  # several times the caches of a core
_MOST_COPIES = 100


def memory_passes(gradients: Sequence[Tensor], transport: Transport) -> Callable[[], Tensor]:
    """Return a function that packs copies of float32 gradients, and returns their reduced bucket.

    Args:
        gradients: gradients of this rank.
        transport: transport of the reduction.
    """
    sizes = [gradient.numel() for gradient in gradients]
    copies = min(_MOST_COPIES, -(-_CYCLE_BYTES // (4 * sum(sizes))))
    buffers = transport.empty(copies * sum(sizes), torch.float32, torch.device("cpu")).zero_()
    turns = cycle([_turn(gradients, buffer, sizes) for buffer in buffers.chunk(copies)])

    def run() -> Tensor:
        own, slots, buffer = next(turns)
        torch._foreach_copy_(slots, own)
        transport.all_reduce(buffer, wait_soon=True).wait("the gradients")
        return buffer

    return run


def _turn(
    gradients: Sequence[Tensor], buffer: Tensor, sizes: Sequence[int]
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return copies of the gradients, their places in a buffer, and the buffer."""
    own = [gradient.clone() for gradient in gradients]
    return own, [s.view_as(g) for s, g in zip(buffer.split(sizes), own, strict=True)], buffer
