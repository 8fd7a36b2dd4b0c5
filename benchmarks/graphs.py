"""Ways to write a mean over ranks into a graph: `python -m benchmarks.graphs`.

The operator of the library takes leaves and packs them itself, into the memory that its transport
likes best. Instead, an operator could pack the leaves, another one reduce the buffer, and a third
unpack it; and torch's functional collectives could reduce the buffer, over gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

import fddp
from benchmarks.measure import Series, measure, ratio
from fddp.cli.launch import launch
from fddp.collectives.communicator import Communicator

Mean: TypeAlias = Callable[[list[Tensor]], list[Tensor]]

MODELS = {"300 leaves of 32 x 32": (300, 32), "8 leaves of 768 x 768": (8, 768)}
ROUNDS, STEPS = 15, 5


def packed(leaves: list[Tensor], reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Leaves through one buffer that `reduce` gives back averaged."""
    ops = torch.ops.fddp
    offsets = [0]
    for leaf in leaves:
        offsets.append(offsets[-1] + leaf.numel())
    numel = offsets.pop()
    buffer = reduce(ops.pack(leaves, offsets, numel, leaves[0].dtype, 1.0))
    sizes = [size for leaf in leaves for size in leaf.shape]
    averaged: list[Tensor] = ops.unpack(buffer, offsets, [leaf.dim() for leaf in leaves], sizes)
    return averaged


def torchs(buffer: Tensor) -> Tensor:
    """The mean over the default group, by torch's functional collectives."""
    ops = torch.ops._c10d_functional
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]  # there is one
    total: Tensor = ops.wait_tensor(ops.all_reduce(buffer, "sum", name))
    return total / dist.get_world_size()


def forms(auto: Communicator, gloo: Communicator) -> dict[str, Mean]:
    """The ways, by name."""
    return {
        "fddp.pmean": lambda leaves: fddp.pmean(leaves, auto),
        "pack, fddp.pmean, unpack": lambda leaves: packed(leaves, lambda b: fddp.pmean(b, auto)),
        "fddp.pmean over gloo": lambda leaves: fddp.pmean(leaves, gloo),
        "pack, torch's all_reduce over gloo, unpack": lambda leaves: packed(leaves, torchs),
    }


def run() -> dict[str, dict[str, Series]]:
    """Times each way on each model; a collective call."""
    found: dict[str, dict[str, Series]] = {}
    with fddp.Communicator() as auto, fddp.Communicator(transport="c10d") as gloo:
        for model, (count, width) in MODELS.items():
            leaves = [torch.randn(width, width) for _ in range(count)]
            steps: dict[str, Callable[[], object]] = {}
            for name, mean in forms(auto, gloo).items():
                torch._dynamo.reset()
                in_graph = torch.compile(mean, backend="aot_eager", fullgraph=True)
                steps[name] = partial(in_graph, leaves)
            found[model] = measure(steps, ROUNDS, STEPS, lambda: None)
    return found


if __name__ == "__main__":
    for model, times in launch(2, run)[0].items():
        print(model)
        first = next(iter(times.values()))
        for name, series in times.items():
            print(f"  {1e3 * series.median_s:7.2f} ms  {ratio(series, first).median:5.2f}  {name}")
