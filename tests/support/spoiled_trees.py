"""Trees of gradients with NaN and infinity in them, and ways to average them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import fddp

NAN, INF = math.nan, math.inf
SMALL = {"bucket_cap_mb": 16 / 2**20, "first_bucket_mb": 16 / 2**20}
"""A bucket for each leaf of `tree`."""


TINY = {"bucket_cap_mb": 4 / 2**20, "first_bucket_mb": 4 / 2**20}
"""The same for leaves of one element."""


def tree(value: float = 1.0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Of three leaves."""
    shapes = {"a": (5,), "b": (2, 3), "c": (4,)}
    return {name: torch.full(shape, value, dtype=dtype) for name, shape in shapes.items()}


def spoiled(bad: float, leaf: str = "b", value: float = 1.0) -> dict[str, Tensor]:
    """The same with one element that is not finite."""
    grads = tree(value)
    grads[leaf].view(-1)[-1] = bad
    return grads


def dot(params: dict[str, Tensor], factors: dict[str, Tensor]) -> Tensor:
    """A loss whose gradient is `factors`."""
    return sum((params[name] * factors[name]).sum() for name in params)


def averaged(sync: fddp.GradSync, way: str, grads: dict[str, Tensor]) -> tuple[Any, Any]:
    """The mean by one of the ways to it, and the info."""
    if way == "value_and_grad":
        return sync.value_and_grad(dot, with_info=True)(tree(), grads)[1:]
    if way == "update":
        return sync.update(grads, sync.init_state(), with_info=True)[::2]
    return getattr(sync, way)(grads, with_info=True)


WAYS = ["__call__", "update", "reduce_", "value_and_grad", "reduce_scatter"]


def options(way: str) -> dict[str, Any]:
    return {"algorithm": "reduce_scatter"} if way == "reduce_scatter" else {}


def overflow(
    group: Any, policy: Any, dtype: torch.dtype, way: str, *, with_info: bool = False
) -> Any:
    """Each rank's gradients are finite; their sum isn't, in one element of "b". Without an info
    results are not inspected."""
    large = 0.75 * torch.finfo(dtype).max
    own = tree(1.0, dtype)
    own["b"].view(-1)[-1] = large
    schedule = fddp.make_schedule(
        fddp.plan_buckets(own),
        fddp.Topology(world=2),
        scaling="after",
        **({"algorithm": "reduce_scatter"} if way == "reduce_scatter" else {}),
    )
    with fddp.GradSync(schedule, group=group, nonfinite=policy) as sync:
        try:
            result = getattr(sync, way)(own, with_info=with_info)
            mean, info = result if with_info else (result, None)
        except fddp.NonFiniteError as error:
            mean, info = str(error), (error.ranks, error.paths, error.overflowed)
        after = getattr(sync, way)(tree(1.0, dtype), with_info=True)[1]
        return mean, info, after.all_finite
