"""Time of the host in a step on a device: `python -m benchmarks.host_time`.

On the device of the tests (`tests/lag`), without its delays. It begins with a step once the host
has issued all of it, so that its threads take no time from the host's: what is measured is what an
accelerator has to hide. torch's DDP runs on the same device in its modes, of which the fastest is
the reference. Parameters are tiny, and a loss touches all of them in one operation.

An operation of this device takes the host longer than one of an accelerator does, so who issues
fewer has a larger advantage here. The last row is the time of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fddp
from benchmarks.bounds import Figure, at_most
from benchmarks.competitors import LOCAL_FUNCTION, LOCAL_MODULE
from benchmarks.measure import Series, medians_in_turns, ratio
from benchmarks.per_parameter import workload
from benchmarks.scripts import numbers_table, options, publish
from fddp.cli.launch import launch
from fddp.cli.progress import Stages
from fddp.core.text import counted
from tests import lag

_COUNTS = (1, 40, 400)
_RANKS = (1, 2)
_STEPS = 20
_WARM_UP = 12  # wrappers measure their first steps, which waits for the device
_BOUND = 0.9
_OPERATION = "one operation"
_VIEW: dict[str, Any] = {"gradient_as_bucket_view": True}
_MODES = {"default": {}, "view": _VIEW, "view, static": {**_VIEW, "static_graph": True}}

#: options of fddp's contestants, each with the end of their names
_OURS: dict[str, dict[str, Any]] = {"": {}, ", report next": {"report": "next"}}
_VALUE_AND_GRAD, _WRAPPER = "value_and_grad", "fddp.DDP"


@dataclass(frozen=True)
class Case:
    """Steps of one number of leaves on some ranks, by contestant, in time of the host."""

    ranks: int
    leaves: int
    steps: dict[str, Series]

    @property
    def best_ddp(self) -> Series:
        """The mode of torch's DDP with the lowest median."""
        theirs = (series for name, series in self.steps.items() if name.startswith("DDP "))
        return min(theirs, key=lambda series: series.median_s)


def main() -> None:
    """Measures and prints; about a minute."""
    args = options(__doc__, rounds=15).parse_args()
    lag.build()
    cases = [case for ranks in _RANKS for case in launch(ranks, run_rank, args.rounds)[0]]
    tables = [_table(ranks, [c for c in cases if c.ranks == ranks]) for ranks in _RANKS]
    values = {"cases": [_values(case) for case in cases]}
    publish(tables, figures(cases), values, args.json)


def run_rank(rounds: int, counts: tuple[int, ...] = _COUNTS) -> list[Case]:
    """All contestants on the ranks of the default group."""
    lag.load().seed(0, scale=0.0)
    group, device = dist.new_group(backend="cpu:gloo,lag:lag"), torch.device("lag", 0)
    cases = []
    with Stages(shown=dist.get_rank() == 0) as stages:
        for count in counts:
            stages.begin(counted(count, "leaf"), rounds)
            with ExitStack() as stack:
                steps = _contestants(count, group, device, stack)
                cases.append(_case(count, steps, rounds, stages.advance))
    return cases


def _case(
    count: int, steps: Mapping[str, Callable[[], object]], rounds: int, advance: Callable[[], None]
) -> Case:
    for step in steps.values():
        for _ in range(_WARM_UP):
            step()
    series = medians_in_turns(list(steps), rounds, lambda name: _median_s(steps[name]), advance)
    return Case(dist.get_world_size(), count, series)


def _median_s(step: Callable[[], object]) -> float:
    """Median of the host's time for steps that the device begins when the host has issued them."""
    times_s = []
    for _ in range(1 + _STEPS):  # the first does not count: caches hold another's data
        issued = lag.load().Moment()
        lag.load().hold(0, issued)
        start_s = time.perf_counter()
        step()
        times_s.append(time.perf_counter() - start_s)
        issued.end()
        torch.accelerator.synchronize()
    return sorted(times_s[1:])[_STEPS // 2]


def _contestants(
    count: int, group: dist.ProcessGroup, device: torch.device, stack: ExitStack
) -> dict[str, Callable[[], object]]:
    about = workload(count)
    factor = about.batch(0).to(device)

    def of_module(wrap: Callable[..., Any] | None = None, **given: Any) -> Callable[[], object]:
        with device:
            module = about.build()
        wrapped: Any = module
        if wrap is not None:
            wrapped = wrap(module, process_group=group, **given)
            # Measured steps wait for the device.
            wrapped._set_ddp_runtime_logging_sample_rate(1 << 30)

        def step() -> None:
            module.zero_grad()
            wrapped(factor).backward()

        return step

    with device:
        params, loss_fn, _ = about.to_function(about.build())
    found: dict[str, Callable[[], object]] = {
        LOCAL_MODULE: of_module(),
        LOCAL_FUNCTION: _held(partial(_local, params, loss_fn, factor)),
        _OPERATION: lambda: factor * 2.0,
    }
    for mode, given in _MODES.items():
        found[f"DDP {mode}"] = of_module(DistributedDataParallel, **given)
    for end, given in _OURS.items():
        sync = stack.enter_context(fddp.GradSync(params, group=group, **given))
        found[_VALUE_AND_GRAD + end] = _held(partial(sync.value_and_grad(loss_fn), params, factor))
        for mode, more in (("", {}), (" view", _VIEW)):
            ours = fddp.DistributedDataParallel
            found[_WRAPPER + mode + end] = of_module(ours, **given, **more)
    return found


def _local(params: list[Tensor], loss_fn: Callable[..., Tensor], factor: Tensor) -> object:
    leaves = [leaf.detach().requires_grad_() for leaf in params]
    torch.autograd.backward(loss_fn(leaves, factor))
    return [leaf.grad for leaf in leaves]


def _held(step: Callable[[], object]) -> Callable[[], object]:
    """A step that holds its results until its next has returned, as a loop holds gradients."""
    held: list[object] = [None]

    def run() -> None:
        held[0] = step()

    return run


def figures(cases: list[Case]) -> list[Figure]:
    """Figures with a bound."""
    return [
        at_most(
            _BOUND,
            "time of the host / best DDP",
            f"{counted(case.ranks, 'rank')}, {counted(case.leaves, 'leaf')}, {name}",
            ratio(series, case.best_ddp),
        )
        for case in cases
        for name, series in case.steps.items()
        if name.startswith((_VALUE_AND_GRAD, _WRAPPER))
    ]


def _table(ranks: int, cases: list[Case]) -> Table:
    table = numbers_table(
        f"{counted(ranks, 'rank')}, leaves of 8 floats: us of the host in a step",
        [heading for case in cases for heading in (counted(case.leaves, "leaf"), "/ DDP")],
        caption="medians of rounds; / DDP: ratio to the fastest mode of torch's DDP",
    )
    for name in cases[0].steps:
        row = []
        for case in cases:
            series = case.steps[name]
            is_step = name != _OPERATION
            share = ratio(series, case.best_ddp).text() if is_step else ""
            row += [f"{1e6 * series.median_s:.0f}", share]
        table.add_row(name, *row)
    return table


def _values(case: Case) -> dict[str, Any]:
    rounds_s = {name: series.rounds_s for name, series in case.steps.items()}
    return {"ranks": case.ranks, "leaves": case.leaves, "rounds_s": rounds_s}


if __name__ == "__main__":
    main()
