"""Cost of a step by itself, whatever the model: `python -m benchmarks.fixed_cost`.

One rank over gloo's group and one leaf of 16 elements, so that almost nothing is computed, copied
or communicated. What remains is the bookkeeping of a step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fddp
from benchmarks.bounds import console
from benchmarks.measure import difference, measure

_NUMEL = 16
_ROUNDS = 100
_STEPS = 20


def main() -> None:
    """Measure and print the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    params, factor = {"w": torch.ones(_NUMEL)}, torch.ones(())
    with (
        fddp.GradSync(params, transport="c10d") as called,
        fddp.GradSync(params, transport="c10d") as differentiated,
    ):
        step = differentiated.value_and_grad(_loss)
        series = measure(
            {
                "sync(grads)": lambda: called(params),
                "value_and_grad": lambda: step(params, factor),
                "function": lambda: _local(params, factor),
                "fddp.DistributedDataParallel": _module_step(fddp.DistributedDataParallel),
                "torch DDP": _module_step(DistributedDataParallel),
                "module": _module_step(lambda module: module),
            },
            rounds=_ROUNDS,
            steps_per_round=_STEPS,
            after_round=_nothing,
        )
    table = Table("Contestant", "us per step", "less the local step", box=box.SIMPLE)
    locals_ = {"value_and_grad": "function", "fddp.DistributedDataParallel": "module"}
    locals_["torch DDP"] = "module"
    for name, taken in series.items():
        twin = locals_.get(name)
        own = "" if twin is None else f"{1e6 * difference(taken, series[twin]).median_s:.0f}"
        table.add_row(name, f"{1e6 * taken.median_s:.0f}", own)
    console().print(table)
    dist.destroy_process_group()


def _nothing() -> None:
    pass


def _loss(params: dict[str, Tensor], factor: Tensor) -> Tensor:
    return (params["w"] * factor).sum()


def _local(params: dict[str, Tensor], factor: Tensor) -> Tensor | None:
    leaf = params["w"].detach().requires_grad_()
    torch.autograd.backward(_loss({"w": leaf}, factor))
    return leaf.grad


def _module_step(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], object]:
    linear = nn.Linear(_NUMEL, 1, bias=False)
    wrapped, sample = wrap(linear), torch.ones(1, _NUMEL)

    def step() -> None:
        wrapped(sample).sum().backward()
        linear.weight.grad = None

    return step


if __name__ == "__main__":
    main()
