"""Steps of a tree of one leaf, so that the bucket is the leaf."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fddp
from fddp.hooks import Hook
from tests.support.models import same_bits


def run_leaf(hook: Hook[Any], inputs: list[list[Tensor]]) -> tuple[list[Tensor], list[Any]]:
    """Means by step and each rank's last state, from gradients by step and rank."""

    def run(group: Any) -> Any:
        with fddp.GradSync({"w": inputs[0][0]}, group=group, hook=hook) as sync:
            means, state = [], sync.init_state()
            for own in inputs:
                mean, state = sync.update({"w": own[group.rank]}, state)
                means.append(mean["w"])
            return means, state

    runs = fddp.loopback(len(inputs[0]), run)
    assert same_bits([[mean.view(torch.uint8) for mean in means] for means, _ in runs])  # NaN, too
    return runs[0][0], [state for _, state in runs]


def random_inputs(world_size: int, *shape: int, steps: int = 4) -> list[list[Tensor]]:
    """Gradients by step and rank."""
    generator = torch.Generator().manual_seed(world_size)
    return [
        [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(world_size)]
        for _ in range(steps)
    ]
