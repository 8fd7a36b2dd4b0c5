"""The memory traffic of a synchronisation alone: a bound for what a step costs beyond computing.

Each gradient is read and written once when it is packed into a bucket, and each element of the
buckets is read and written once when they are reduced. Both passes are run here on their own, on
all ranks at once, over all of a model's gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.measure import Series
from fddp.transport.base import Transport

PACK = "pass that packs"
REDUCE = "pass that reduces"


def memory_passes(
    gradients: Sequence[Tensor], transport: Transport
) -> dict[str, Callable[[], object]]:
    """Return both passes over float32 gradients, by name. The second returns the buckets."""
    numel = sum(gradient.numel() for gradient in gradients)
    buffer = transport.empty(numel, torch.float32, torch.device("cpu")).zero_()
    sizes = [gradient.numel() for gradient in gradients]
    slots = [
        slot.view_as(gradient)
        for slot, gradient in zip(buffer.split(sizes), gradients, strict=True)
    ]

    def reduce() -> Tensor:
        transport.all_reduce(buffer, wait_soon=True).wait("the gradients")
        return buffer

    return {PACK: lambda: torch._foreach_copy_(slots, list(gradients)), REDUCE: reduce}


def both_passes(series: dict[str, Series]) -> Series:
    """Return the sum of both passes in each round."""
    pairs = zip(series[PACK].rounds_s, series[REDUCE].rounds_s, strict=True)
    return Series(tuple(pack + reduce for pack, reduce in pairs))
