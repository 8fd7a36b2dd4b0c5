"""Means of gradients over ranks that are threads, and the mean as DDP computes it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

import fddp


def synced(
    world_size: int, grads_of: Callable[[int], Any], *, params: Any = None, **options: Any
) -> list[Any]:
    """Return `sync(grads_of(rank))` of each rank, with `GradSync(params, **options)`.

    Without `params`, a rank's own gradients stand for them.
    """

    def run(group: Any) -> Any:
        grads = grads_of(group.rank)
        with fddp.GradSync(grads if params is None else params, group=group, **options) as sync:
            return sync(grads)

    return fddp.loopback(world_size, run)


def ddp_mean(grads: list[Tensor]) -> Tensor:
    """Return the mean with DDP's bits: scaled by 1/N in its own dtype, summed in rank order."""
    return functools.reduce(operator.add, [grad * (1.0 / len(grads)) for grad in grads])
