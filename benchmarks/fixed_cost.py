"""Cost of a step by itself, whatever the model: `python -m benchmarks.fixed_cost`.

One leaf of 16 elements, so that almost nothing is computed, copied or communicated. What remains is
the bookkeeping of a step and, on two ranks, the latency of a collective. All contestants take turns
in one run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

import fddp
from benchmarks.bounds import Figure, at_most
from benchmarks.measure import Series, difference, measure, ratio, spread
from benchmarks.scripts import numbers_table, options, publish
from fddp.cli.launch import launch
from fddp.cli.progress import Stages
from fddp.core.text import counted
from fddp.transport import TransportName, open_transport

_NUMEL = 16
_STEPS = 20
_RANKS = (1, 2)

ALL_REDUCE, GLOO_ALL_REDUCE = "all-reduce", "dist.all_reduce, gloo"
SYNC, VALUE_AND_GRAD, FUNCTION = "sync(grads)", "value_and_grad", "function"
WRAPPER, DDP, REPLICATE, MODULE = "fddp.DistributedDataParallel", "torch DDP", "replicate", "module"
SILENT = f'{WRAPPER}, local_gradients="allow"'
_GLOO = ", gloo"
_LOCAL = {VALUE_AND_GRAD: FUNCTION, WRAPPER: MODULE, DDP: MODULE, REPLICATE: MODULE}
_BOUNDS_US = {SYNC: 30.0, VALUE_AND_GRAD: 60.0, WRAPPER: 100.0}
_REPORTS_US = 2.0  # of local gradients


@dataclass(frozen=True)
class Case:
    """Steps on some ranks: by contestant, and less the local step or the bare all-reduce.

    Those of the wrapper with and without reports of local gradients are timed by themselves,
    because their difference is less than what the contestant before a step does to caches.
    """

    ranks: int
    steps: dict[str, Series]
    reporting: Series
    silent: Series

    @property
    def added(self) -> dict[str, Series]:
        """Cost of each contestant beyond its local step, or beyond the bare all-reduce."""
        return {
            name: difference(series, self.steps[_twin(name)])
            for name, series in self.steps.items()
            if _twin(name) in self.steps
        }


def _twin(name: str) -> str:
    plain = name.removesuffix(_GLOO)
    if plain == SYNC:
        return GLOO_ALL_REDUCE if name.endswith(_GLOO) else ALL_REDUCE
    return _LOCAL.get(plain, "")


def main() -> None:
    """Measures and prints; about half a minute."""
    args = options(__doc__, rounds=60).parse_args()
    cases = [launch(ranks, run_rank, args.rounds)[0] for ranks in _RANKS]
    found = [figure for case in cases for figure in figures(case)]
    publish(map(_table, cases), found, {"cases": [_values(case) for case in cases]}, args.json)


def run_rank(rounds: int) -> Case:
    """All contestants on the ranks of the default group."""
    ranks = dist.get_world_size()
    names: list[tuple[TransportName, str]] = [("auto", "")]
    if ranks > 1:
        names.append(("c10d", _GLOO))
    params, factor, number = {"w": torch.ones(_NUMEL)}, torch.ones(()), torch.ones(1)
    steps: dict[str, Callable[[], object]] = {
        FUNCTION: lambda: _local(params, factor),
        MODULE: _module_step(lambda module: module),
        DDP: _module_step(DistributedDataParallel),
        REPLICATE: _module_step(_replicated),
        GLOO_ALL_REDUCE: lambda: dist.all_reduce(number),
    }
    with ExitStack() as stack, Stages(shown=dist.get_rank() == 0) as stages:
        for transport, suffix in names:
            opened = stack.enter_context(open_transport(None, transport, 60.0, "benchmark"))
            called = stack.enter_context(fddp.GradSync(params, transport=transport))
            sync = stack.enter_context(fddp.GradSync(params, transport=transport))
            steps |= _contestants(params, factor, opened, called, sync, suffix)
            steps[WRAPPER + suffix] = _module_step(_wrap(transport))
        pair = {
            WRAPPER: steps[WRAPPER],
            SILENT: _module_step(_wrap("auto", local_gradients="allow")),
        }
        for step in (*steps.values(), pair[SILENT]):
            for _ in range(30):  # wrappers measure their first steps
                step()
        stages.begin(counted(ranks, "rank"), rounds)
        measured = measure(steps, rounds, _STEPS, stages.advance)
        paired = measure(pair, 10 * rounds, _STEPS, lambda: None)
        return Case(ranks, measured, paired[WRAPPER], paired[SILENT])


def _contestants(
    params: dict[str, Tensor],
    factor: Tensor,
    transport: Any,
    called: fddp.GradSync,
    differentiated: fddp.GradSync,
    suffix: str,
) -> dict[str, Callable[[], object]]:
    step = differentiated.value_and_grad(_loss)
    found: dict[str, Callable[[], object]] = {
        SYNC + suffix: lambda: called(params),
        VALUE_AND_GRAD + suffix: lambda: step(params, factor),
    }
    if not suffix:
        buffer = transport.empty(_NUMEL, torch.float32, torch.device("cpu")).zero_()
        found[ALL_REDUCE] = lambda: transport.all_reduce(buffer, wait_soon=True).wait("it")
    return found


def _loss(params: dict[str, Tensor], factor: Tensor) -> Tensor:
    return (params["w"] * factor).sum()


def _local(params: dict[str, Tensor], factor: Tensor) -> Tensor | None:
    leaf = params["w"].detach().requires_grad_()
    torch.autograd.backward(_loss({"w": leaf}, factor))
    return leaf.grad


def _wrap(transport: TransportName, **options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda module: fddp.DistributedDataParallel(module, transport=transport, **options)


def _replicated(module: nn.Module) -> nn.Module:
    replicate(module)
    return module


def _module_step(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], object]:
    linear = nn.Linear(_NUMEL, 1, bias=False)
    wrapped, sample = wrap(linear), torch.ones(1, _NUMEL)

    def step() -> None:
        wrapped(sample).sum().backward()
        linear.weight.grad = None

    return step


def figures(case: Case) -> list[Figure]:
    """Figures with a bound."""
    added, where = case.added, counted(case.ranks, "rank")
    found = []
    for name, bound_us in _BOUNDS_US.items():
        taken_us = spread(1e6 * time_s for time_s in added[name].rounds_s)
        found.append(at_most(bound_us, "us a step, fixed cost", f"{where}, {name}", taken_us))
    reports = difference(case.reporting, case.silent)
    taken_us = spread(1e6 * time_s for time_s in reports.rounds_s)
    found.append(at_most(_REPORTS_US, "us a step, reports of local gradients", where, taken_us))
    for suffix in ("", _GLOO):
        if WRAPPER + suffix in added:
            share = ratio(added[WRAPPER + suffix], added[DDP])
            bound = 1.0 if suffix else 0.5
            found.append(at_most(bound, "wrapper / DDP, fixed cost", f"{where}{suffix}", share))
    return found


def _table(case: Case) -> Table:
    table = numbers_table(
        f"{counted(case.ranks, 'rank')}, one leaf of {_NUMEL}: us a step",
        ("step", "fixed cost"),
        caption="fixed cost: less the local step or the bare all-reduce; medians of rounds",
    )
    added = case.added
    for name, series in sorted(case.steps.items()):
        own = f"{1e6 * added[name].median_s:.0f}" if name in added else ""
        table.add_row(name, f"{1e6 * series.median_s:.0f}", own)
    return table


def _values(case: Case) -> dict[str, Any]:
    rounds_s = {name: series.rounds_s for name, series in case.steps.items()}
    return {"ranks": case.ranks, "rounds_s": rounds_s}


if __name__ == "__main__":
    main()
