"""Buffers that ranks reduce along the axes of a grid."""

from __future__ import annotations

import torch
from torch import Tensor

from fddp.core.schedule.topology import Topology

SQUARE = Topology(host=2, local=2)
AXES = [("host",), ("local",)]


def part(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return a rank's contribution: small numbers, whose sums are exact in every dtype."""
    values = (torch.arange(numel) + 3 * rank) % 7
    return (values * (1 + 1j) if dtype.is_complex else values).to(dtype)


def total(ranks: tuple[int, ...], numel: int, dtype: torch.dtype) -> Tensor:
    """Return the sum of the ranks' contributions."""
    return torch.stack([part(rank, numel, dtype) for rank in ranks]).sum(0).to(dtype)


def own_chunk(buffer: Tensor, ranks: tuple[int, ...], rank: int) -> Tensor:
    """Return the rank's part of a buffer that `ranks` divide among them."""
    return buffer.tensor_split(len(ranks))[ranks.index(rank)]
