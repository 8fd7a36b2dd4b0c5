"""`GradSync`s that are rebuilt on threads."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import fddp
from tests.support.endings import ending
from tests.support.models import batch, mlp, mlp_loss

SMALL = {"bucket_cap_mb": 0.001, "first_bucket_mb": 0.0003}


def scrambled() -> Any:
    """Parameters that are registered in another order than they are used in."""
    params = mlp()
    return {f"layer{i}": params[f"layer{i}"] for i in (2, 0, 3, 1)}


def sorted_loss(p: Any, x: Tensor) -> Tensor:
    return mlp_loss(dict(sorted(p.items())), x)


def made(world_size: int, *, steps: int = 0, tree: Any = None, **options: Any) -> list[Any]:
    """A `GradSync` of each rank of a group, after some steps; the group is gone."""

    def run(group: Any) -> fddp.GradSync:
        sync = fddp.GradSync(tree or scrambled(), group=group, **{**SMALL, **options})
        step = sync.value_and_grad(sorted_loss)
        for number in range(steps):
            step(scrambled(), batch(group.rank, number))
        return sync

    return fddp.loopback(world_size, run)


def rebuilt(syncs: list[Any], then: Any = lambda sync: sync, **options: Any) -> list[Any]:
    """Return the results of `then` by rank of a new group; None in `syncs` stands for a rank that
    joins."""

    def run(group: Any) -> Any:
        sync = syncs[group.rank]
        if sync is None:
            return then(fddp.GradSync.join(group, **options))
        return then(sync.rebuild(group))

    return fddp.loopback(len(syncs), run)


def refused(syncs: list[Any], **options: Any) -> list[Any]:
    def run(group: Any) -> Any:
        sync = syncs[group.rank]
        mesh = options.get("mesh")
        return ending(
            lambda: (
                fddp.GradSync.join(group, **options)
                if sync is None
                else sync.rebuild(group, mesh=mesh)
            )
        )

    return fddp.loopback(len(syncs), run)
