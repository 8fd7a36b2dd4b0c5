"""Steps of torch's DDP, `fully_shard` and `replicate` over the backend "fddp" and over gloo:
`python -m benchmarks.backend_steps`.

Two ranks of one thread, with both backends in the same processes. Each contestant has a model of
its own, with the same values, and takes turns with the others and with a step without
communication. A step is forward and backward, without an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fddp  # noqa: F401 - registers the backend
from benchmarks.bounds import Figure, at_most
from benchmarks.competitors import LOCAL_MODULE, Contestant, local_module, of_module
from benchmarks.measure import Ratio, Series, added_ratio, difference, measure, ratio, rounds_s
from benchmarks.models import WORKLOADS, Workload
from benchmarks.scripts import numbers_table, options, publish
from benchmarks.steps import WARM_UP, check_gradients
from fddp.cli.launch import launch
from fddp.cli.progress import Stages

FDDP, GLOO = "fddp", "gloo"
ADDED = 0.5  # bound of fddp's added time, relative to gloo's
_WORKLOADS = {name: WORKLOADS[name] for name in ("mlp", "transformer")}

Group = dist.ProcessGroup


def _ddp(module: nn.Module, group: Group) -> nn.Module:
    return DistributedDataParallel(module, process_group=group)


def _replicated(module: nn.Module, group: Group) -> nn.Module:
    return replicate(module, process_group=group)


def _sharded(module: nn.Module, group: Group) -> Any:
    """Shard each layer of each list of layers, and the rest as one."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for child in module.children():
        for layer in child if isinstance(child, nn.ModuleList) else ():
            fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def _sharded_in_groups_memory(module: nn.Module, group: Group) -> Any:
    """With buffers from the allocator of the group, where it has one: gloo has none."""
    sharded = _sharded(module, group)
    if dist.get_backend(group) == FDDP:
        sharded.set_allocate_memory_from_process_group_for_comm(True)
    return sharded


WRAPPERS: dict[str, Callable[[nn.Module, Group], nn.Module]] = {
    "DDP": _ddp,
    "fully_shard": _sharded,
    "fully_shard, memory of the group": _sharded_in_groups_memory,
    "replicate": _replicated,
}


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        title: of the model.
        series: by contestant.
    """

    title: str
    series: dict[str, Series]

    def added(self, wrapper: str, backend: str) -> Series:
        """Its steps beyond the same round's local step."""
        return difference(self.series[_name(wrapper, backend)], self.series[LOCAL_MODULE])

    def added_ratio(self, wrapper: str) -> Ratio:
        """Added time over fddp, relative to that over gloo."""
        return added_ratio(self.added(wrapper, FDDP), self.added(wrapper, GLOO))


def main() -> None:
    """Measures and prints; about a minute."""
    args = options(__doc__, rounds=9).parse_args()
    cases = launch(2, run_rank, args.rounds)[0]
    found = {name: case.series for name, case in cases.items()}
    values = {"torch": torch.__version__, "rounds_s": rounds_s(found)}
    publish([_table(cases.values())], figures(cases), values, args.json)


def run_rank(rounds: int, workloads: Mapping[str, Workload] = _WORKLOADS) -> dict[str, Case]:
    """All models, by name; a collective call. The same on all ranks."""
    groups: dict[str, Any] = {name: dist.new_group(backend=name) for name in (FDDP, GLOO)}
    with Stages(shown=dist.get_rank() == 0) as stages:
        cases = {
            name: _case(workload, groups, rounds, stages) for name, workload in workloads.items()
        }
    for group in groups.values():
        dist.destroy_process_group(group)
    return cases


def _case(workload: Workload, groups: dict[str, Group], rounds: int, stages: Stages) -> Case:
    stages.begin(workload.title, rounds)
    batch = workload.batch(dist.get_rank())
    field = [local_module(workload, batch)]
    for wrapper in WRAPPERS:
        for backend, group in groups.items():
            field.append(_contestant(wrapper, backend, group, workload, batch))
    for contestant in field:
        for _ in range(WARM_UP):
            contestant.step()
    check_gradients(field, _name("DDP", GLOO))
    steps = {contestant.name: contestant.step for contestant in field}
    return Case(workload.title, measure(steps, rounds, workload.steps, stages.advance))


def _contestant(
    wrapper: str, backend: str, group: Group, workload: Workload, batch: Tensor
) -> Contestant:
    module = workload.build()
    wrapped = WRAPPERS[wrapper](module, group)
    name = _name(wrapper, backend)
    return of_module(name, module, wrapped, batch, is_ddp=wrapper == "DDP", transport=backend)


def _name(wrapper: str, backend: str) -> str:
    return f"{wrapper}, {backend}"


def figures(cases: dict[str, Case]) -> list[Figure]:
    """Figures with a bound."""
    return [
        at_most(ADDED, "added, fddp / gloo", f"{name}, {wrapper}", case.added_ratio(wrapper))
        for name, case in cases.items()
        for wrapper in WRAPPERS
    ]


def _table(cases: Iterable[Case]) -> Table:
    table = numbers_table(
        "Steps over backends of torch.distributed, 2 ranks",
        ("fddp", "gloo", "added, fddp", "added, gloo", "step, fddp / gloo"),
        caption="ms: median of rounds; added: less the local step, round by round; ratios round "
        "by round (lowest-highest)",
    )
    for case in cases:
        table.add_row(case.title)
        table.add_row(f"  {LOCAL_MODULE}", *[_ms(case.series[LOCAL_MODULE])] * 2)
        for wrapper in WRAPPERS:
            steps = [case.series[_name(wrapper, backend)] for backend in (FDDP, GLOO)]
            added = [case.added(wrapper, backend) for backend in (FDDP, GLOO)]
            table.add_row(f"  {wrapper}", *map(_ms, steps + added), ratio(*steps).text())
    return table


def _ms(series: Series) -> str:
    return f"{series.median_s * 1e3:.1f}"


if __name__ == "__main__":
    main()
