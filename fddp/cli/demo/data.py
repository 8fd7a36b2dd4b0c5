"""The handwritten digits of scikit-learn, divided among ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # ships no types
from torch import Tensor

_PER_RANK = 32  # images in a batch, except the last one
_HELD_OUT = 360  # of 1797 images


class Batch(NamedTuple):
    """Images with their labels.

    Attributes:
        images: float64 of shape (n, 1, 8, 8), from 0 to 1.
        labels: int64 of shape (n,), from 0 to 9.
    """

    images: Tensor
    labels: Tensor

    @property
    def size(self) -> int:
        """Number of images."""
        return len(self.labels)

    def pick(self, index: slice | Tensor) -> Batch:
        """Return the images at `index` with their labels."""
        return Batch(self.images[index], self.labels[index])


def load() -> tuple[Batch, Batch]:
    """Return the training set and the held-out set, in a fixed order.

    Example:
        >>> [part.size for part in load()]
        [1437, 360]
    """
    digits = load_digits()
    images = torch.from_numpy(digits.images).to(torch.float64).unsqueeze(1) / 16
    everything = Batch(images, torch.from_numpy(digits.target).to(torch.int64))
    shuffled = everything.pick(_order(everything.size, seed=0))
    return shuffled.pick(slice(_HELD_OUT, None)), shuffled.pick(slice(_HELD_OUT))


def own_batches(data: Batch, epoch: int, rank: int, ranks: int) -> Iterator[Batch]:
    """Yield a rank's shuffled batches of an epoch.

    Each rank has its own shard. Shards differ in size: lower ranks have more images.

    Example:
        >>> data, _ = load()
        >>> for rank in (0, 1):
        ...     sizes = [batch.size for batch in own_batches(data, epoch=0, rank=rank, ranks=2)]
        ...     print(len(sizes), "batches, the last of", sizes[-1])
        24 batches, the last of 13
        22 batches, the last of 16
    """
    shard = data.pick(_shard(data.size, rank, ranks))
    shuffled = shard.pick(_order(shard.size, seed=epoch * ranks + rank))
    for start in range(0, shuffled.size, _PER_RANK):
        yield shuffled.pick(slice(start, start + _PER_RANK))


def whole_batches(data: Batch, epoch: int, ranks: int) -> Iterator[Batch]:
    """Yield the union of all ranks' batches in each round of an epoch."""
    shares = (own_batches(data, epoch, rank, ranks) for rank in range(ranks))
    for parts in zip_longest(*shares):
        present = [part for part in parts if part is not None]
        yield Batch(*(torch.cat(tensors) for tensors in zip(*present, strict=True)))


def _shard(size: int, rank: int, ranks: int) -> slice:
    portions = [10 + ranks - r for r in range(ranks)]
    start, end = (size * sum(portions[:r]) // sum(portions) for r in (rank, rank + 1))
    return slice(start, end)


def _order(size: int, seed: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))
