"""Fixed cost of a parameter: `python -m benchmarks.per_parameter`.

One rank, so that nothing is communicated; tiny parameters, so that little is copied; a loss that
touches all of them in one operation. A step's time beyond the local step grows with the number of
parameters, and the slope of that is what hooks and bookkeeping take for each. `sync(grads)` has no
local step: its slope is that of the whole call. `torch.split` of one buffer makes as many tensors
as a step has results, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

import fddp
from benchmarks.bounds import Figure, at_most
from benchmarks.competitors import FDDP, LOCAL_FUNCTION, LOCAL_MODULE, makers
from benchmarks.measure import Ratio, Series, difference, holding_results, measure, spread
from benchmarks.models import Functional, Workload
from benchmarks.scripts import numbers_table, options, publish
from fddp.cli.launch import launch
from fddp.cli.progress import Stages
from fddp.core.text import counted

_COUNTS = (250, 500, 1000, 2000)
_FLOATS = 8
_STEPS = 20
_WARM_UP = 4
_SYNC, _SPLIT = "sync(grads)", "torch.split"
_WRAPPED = (FDDP, "fddp.DDP default", "fddp.DDP view")
_THEIRS = ("DDP default", "DDP view")
_BOUNDS_US = {_SYNC: 0.3} | dict.fromkeys(_WRAPPED, 0.8)


class _Leaves(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        own = [nn.Parameter(torch.randn(_FLOATS)) for _ in range(count)]
        for number, leaf in enumerate(own):
            self.register_parameter(f"p{number:05}", leaf)
        self._own = tuple(own)  # reading thousands of attributes would be most of the step

    def forward(self, factor: Tensor) -> Tensor:
        return _loss(list(self._own), factor)


def _loss(leaves: list[Tensor], factor: Tensor) -> Tensor:
    return (torch.cat(leaves) * factor).sum()


def workload(count: int) -> Workload:
    """As many parameters, of a few elements each."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return _Leaves(count)

    def to_function(module: nn.Module) -> Functional:
        return Functional([leaf.detach().clone() for leaf in module.parameters()], _loss)

    name = counted(count, "parameter")
    return Workload(name, build, to_function, lambda rank: torch.tensor(2.0))


@dataclass(frozen=True)
class Case:
    """Steps with one number of parameters: by contestant, beyond the local step of its form."""

    count: int
    local_s: float
    added: dict[str, Series]


def main() -> None:
    """Measures and prints; about half a minute."""
    args = options(__doc__, rounds=7).parse_args()
    cases = launch(1, run_rank, args.rounds)[0]
    publish([_table(cases)], figures(cases), {"cases": _values(cases)}, args.json)


def run_rank(rounds: int, counts: tuple[int, ...] = _COUNTS) -> list[Case]:
    """All numbers of parameters."""
    cases = []
    with Stages(shown=True) as stages:
        for count in counts:
            about = workload(count)
            stages.begin(about.title, rounds)
            make, batch = makers(False), about.batch(0)
            names = (LOCAL_MODULE, LOCAL_FUNCTION, *_WRAPPED, *_THEIRS)
            field = [make[name](about, batch) for name in names]
            grads = [torch.ones(_FLOATS) for _ in range(count)]
            with fddp.GradSync(grads) as sync:
                alone = {
                    _SYNC: partial(sync, grads),
                    _SPLIT: partial(torch.cat(grads).split, _FLOATS),
                }
                steps = {c.name: c.step for c in field} | holding_results(alone)
                for step in steps.values():
                    for _ in range(_WARM_UP):
                        step()
                series = measure(steps, rounds, _STEPS, stages.advance)
            local = {"module": series[LOCAL_MODULE], "function": series[LOCAL_FUNCTION]}
            added = {c.name: difference(series[c.name], local[c.form]) for c in field[2:]}
            added |= {name: series[name] for name in alone}
            cases.append(Case(count, series[LOCAL_MODULE].median_s, added))
            for contestant in field:
                contestant.close()
    return cases


def slope_us(cases: list[Case], name: str) -> Ratio:
    """Microseconds for each parameter: the slope of a straight line, round by round.

    Example:
        >>> cases = [Case(n, 0.0, {"x": Series((1e-3 + 2e-6 * n,))}) for n in (100, 200, 400)]
        >>> round(slope_us(cases, "x").median, 6)
        2.0
    """
    counts = [case.count for case in cases]
    rounds = zip(*(case.added[name].rounds_s for case in cases), strict=True)
    return spread(float(np.polyfit(counts, added_s, 1)[0]) * 1e6 for added_s in rounds)


def figures(cases: list[Case]) -> list[Figure]:
    """Figures with a bound."""
    what = "us a parameter, hook and bookkeeping"
    return [at_most(us, what, name, slope_us(cases, name)) for name, us in _BOUNDS_US.items()]


def _table(cases: list[Case]) -> Table:
    table = numbers_table(
        "One rank, parameters of 8 floats: ms beyond the local step",
        (*(str(case.count) for case in cases), "slope"),
        caption="median of rounds; slope: us a parameter (lowest-highest round)",
    )
    table.add_row("local step", *(f"{case.local_s * 1e3:.2f}" for case in cases), "")
    for name in (_SPLIT, *_BOUNDS_US, *_THEIRS):
        added_ms = (f"{case.added[name].median_s * 1e3:.2f}" for case in cases)
        table.add_row(name, *added_ms, slope_us(cases, name).text())
    return table


def _values(cases: list[Case]) -> list[dict[str, Any]]:
    return [
        {
            "parameters": case.count,
            "local_s": case.local_s,
            "added_s": {name: series.rounds_s for name, series in case.added.items()},
        }
        for case in cases
    ]


if __name__ == "__main__":
    main()
