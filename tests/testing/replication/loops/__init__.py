"""Correct training loops: of the README, the guide, examples, recipes, optimizers and papers, and
the right steps beside public faults."""

from __future__ import annotations

from tests.testing.faults import clips, counts, losses
from tests.testing.replication.loops import guide, models, optimizers, sharded, training, wrapped
from tests.testing.replication.loops.inputs import (
    GROWS,
    Loop,
    descend,
    init_params,
    jax_batches,
    jax_loss,
    jax_params,
    loss_fn,
    make_batch,
    make_module,
)

__all__ = [
    "Loop",
    "descend",
    "init_params",
    "jax_batches",
    "jax_loss",
    "jax_params",
    "loops",
    "loss_fn",
    "make_batch",
    "make_module",
]

STYLES = (guide, training, models, sharded, wrapped, optimizers)


def loops() -> list[Loop]:
    """All loops with new inputs."""
    made = [loop for style in STYLES for loop in style.loops()]
    faults = [fault for kind in (losses, clips, counts) for fault in kind.faults()]
    right = {fault.right.__name__: fault for fault in faults}
    return made + [
        Loop(f.right, f.state, f.batch, alarm=GROWS if f.right is losses.sum_of_sums else "")
        for f in right.values()
    ]
