"""Whole steps in graphs, over links and shared memory: `sudo python -m benchmarks.graphs`.

Forward, backward, the mean over two ranks and the update are compiled, in one graph or as far as
that goes, and run beside each other. What counts is the time that a step takes beyond the compiled
step of one rank. The ranks are in network namespaces of their own, whose link `tc` limits; without
root, `ip` and `tc` only shared memory is measured.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo as dynamo
import torch._inductor as inductor
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from rich.table import Table
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fddp
from benchmarks import simulator_accuracy
from benchmarks.bounds import Figure, at_most
from benchmarks.measure import Ratio, Series, added_ratio, difference, measure
from benchmarks.models import WORKLOADS, Workload, stack
from benchmarks.scripts import numbers_table, options, publish
from benchmarks.slow_link import run_ranks
from fddp.cli.launch import launch
from fddp.core.text import size_text

MODELS: Mapping[str, Workload] = {
    "wide": stack("8 layers of 768 x 768, 512 rows", layers=8, width=768, rows=512),
    "mlp": WORKLOADS["mlp"],
    "small": stack("60 layers of 48 x 48, 16 rows", layers=60, width=48, rows=16),
    "transformer": WORKLOADS["transformer"],
}
SHARED_MEMORY = "shared memory"
LINKS = {"4 Gbit/s": ("4gbit", "512kb"), "1 Gbit/s": ("1gbit", "128kb")}

LOCAL, GRAPH, PMEAN = "local", "GradSync, one graph", "pmean, one graph"
EAGER, COMPILED_LOSS = "GradSync, eager", "GradSync, compiled loss"
DDP_EAGER, DDP_COMPILED = "DDP, eager", "DDP, compiled"
DDP_IN_PYTHON = "DDP, compiled, reducer in Python"
FUNCTIONAL = "torch's all_reduce, one graph"
_CAP_MB = 2.25  # of the wide model, a bucket for each layer
_RATE = 0.01

Step = Callable[[], object]


class Case(NamedTuple):
    """Steps of one model over one link, by contestant. And the time beyond the local step that is
    simulated for the plan of the graph, from measured costs of the link and eager ready times, and
    the peak of the tensors' bytes in a step of rank 0."""

    link: str
    model: str
    steps: dict[str, Series]
    simulated_s: float
    peak: dict[str, int]

    def added(self, name: str) -> Series:
        """Time beyond the local step."""
        return difference(self.steps[name], self.steps[LOCAL])


def main() -> None:
    """Measure and print; some minutes for each link, most of them in the compiler."""
    parser = options(__doc__, rounds=9)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], metavar="NAME")
    args = parser.parse_args()
    given = args.rounds, args.models
    cases = launch(2, run_rank, SHARED_MEMORY, *given)[0]
    for link, (rate, burst) in LINKS.items():
        with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
            more = (link, str(args.rounds), file.name, *args.models)
            if run_ranks("benchmarks.graphs", rate, burst, *more):
                sys.exit(1)
            text = file.read()
        cases += [_case(values) for values in json.loads(text or "[]")]
    links = dict.fromkeys(case.link for case in cases)
    tables = [_table(link, [case for case in cases if case.link == link]) for link in links]
    publish(tables, figures(cases), {"cases": [*map(_values, cases)]}, args.json)


def run_rank(link: str, rounds: int, models: Sequence[str]) -> list[Case]:
    """All contestants on the ranks of the default group."""
    torch.set_num_threads(1)
    cases = []
    for name in models:
        dynamo.reset()
        with ExitStack() as opened:
            steps = contestants(MODELS[name], link == SHARED_MEMORY, opened)
            for step in steps.values():
                for _ in range(3):  # graphs are compiled, and plans rebuilt
                    step()
            found = measure(steps, rounds, 3, lambda: None)
            peak = {name: peak_bytes(step) for name, step in steps.items()}
        simulated_s = _simulated_s(MODELS[name], _transport(link == SHARED_MEMORY))
        cases.append(Case(link, name, found, simulated_s, peak))
    return cases


def _transport(in_memory: bool) -> Any:
    return "auto" if in_memory else "c10d"


def _simulated_s(about: Workload, transport: Any) -> float:
    """Seconds that communication takes beyond backward."""
    cost = fddp.CostModel.fit(fddp.measure_cost(transport=transport))
    params, loss_fn = _function(about.build())
    one = fddp.GradSync(params, transport=transport, bucket_cap_mb=1e6, first_bucket_mb=1e6)
    ready_s, _ = simulator_accuracy.profile(one, params, loss_fn, about.batch(dist.get_rank()))
    plan = fddp.plan_buckets(params, bucket_cap_mb=_CAP_MB, first_bucket_mb=_CAP_MB)
    schedule = fddp.make_schedule(plan, fddp.Topology(world=dist.get_world_size()))
    return fddp.simulate(schedule, cost, ready_s).step_s - max(ready_s)


def _function(module: torch.nn.Module) -> tuple[dict[str, Tensor], Callable[..., Tensor]]:
    """Parameters of a module, and its loss as a function of them and a batch."""
    params = {name: p.detach().clone() for name, p in module.named_parameters()}

    def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        loss: Tensor = torch.func.functional_call(module, params, (x,))
        return loss

    return params, loss_fn


def contestants(about: Workload, in_memory: bool, opened: ExitStack) -> dict[str, Step]:
    """Steps by name; a collective call. What they hold open is closed with `opened`."""
    module, x = about.build(), about.batch(dist.get_rank())
    params, loss_fn = _function(module)
    transport = _transport(in_memory)
    compiled = partial(torch.compile, fullgraph=True)

    def updated(grads: Any) -> Any:
        return fddp.tree_map(lambda p, g: p - _RATE * g, params, grads)

    def sync() -> fddp.GradSync:
        made = fddp.GradSync(
            params, transport=transport, bucket_cap_mb=_CAP_MB, first_bucket_mb=_CAP_MB
        )
        return opened.enter_context(made)

    def stepping(take: Callable[..., Any]) -> Callable[[Any, Tensor], Any]:
        return lambda params, x: updated(take(params, x)[1])

    communicator = opened.enter_context(
        fddp.Communicator(transport=transport, bucket_cap_mb=_CAP_MB)
    )

    def local(params: Any, x: Tensor) -> Any:
        return updated(torch.func.grad(loss_fn)(params, x))

    def pmean(params: Any, x: Tensor) -> Any:
        return updated(fddp.pmean(torch.func.grad(loss_fn)(params, x), communicator))

    def all_reduce(params: Any, x: Tensor) -> Any:
        grads, count = torch.func.grad(loss_fn)(params, x), dist.get_world_size()
        group: Any = dist.group.WORLD
        return updated(
            fddp.tree_map(lambda g: functional.all_reduce(g, "sum", group) / count, grads)
        )

    steps: dict[str, Callable[[Any, Tensor], Any]] = {
        LOCAL: compiled(local),
        EAGER: stepping(sync().value_and_grad(loss_fn)),
        COMPILED_LOSS: stepping(sync().value_and_grad(compiled(loss_fn))),
        GRAPH: compiled(stepping(sync().value_and_grad(loss_fn))),
        PMEAN: compiled(pmean),
        FUNCTIONAL: torch.compile(
            all_reduce, fullgraph=True, options={"reorder_for_compute_comm_overlap": True}
        ),
    }
    found: dict[str, Step] = {name: partial(step, params, x) for name, step in steps.items()}
    for name in (DDP_EAGER, DDP_COMPILED):
        ddp = DistributedDataParallel(
            about.build(), bucket_cap_mb=_CAP_MB, gradient_as_bucket_view=True
        )
        run = torch.compile(ddp) if name == DDP_COMPILED else ddp
        found[name] = partial(_step_of_module, run, ddp, x)
    # Read when the module is made, when it is compiled and when backward runs.
    in_python = dynamo.config.patch(optimize_ddp="python_reducer", compiled_autograd=True)
    in_buckets = inductor.config.patch(_fuse_ddp_communication=True, _fuse_ddp_bucket_size=_CAP_MB)
    with in_python:
        ddp = DistributedDataParallel(about.build(), bucket_cap_mb=_CAP_MB)
    run = partial(_step_of_module, torch.compile(ddp), ddp, x)
    found[DDP_IN_PYTHON] = in_buckets(in_python(run))
    return found


def _step_of_module(run: Callable[..., Tensor], ddp: torch.nn.Module, x: Tensor) -> None:
    ddp.zero_grad(set_to_none=False)
    run(x).backward()
    with torch.no_grad():
        params: list[Tensor] = [*ddp.parameters()]
        # In place of the update, which would change what is computed.
        torch._foreach_add(params, [p.grad for p in params if p.grad is not None], alpha=-_RATE)


def peak_bytes(step: Step) -> int:
    """Peak of the bytes that tensors of the CPU have beyond those before the step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    changes.sort(key=lambda event: event["ts"])
    sizes: list[int] = [event["args"]["Bytes"] for event in changes]
    return max(accumulate(sizes, initial=0))


def figures(cases: Sequence[Case]) -> list[Figure]:
    """Figures with a bound."""
    found = []
    for case in cases:
        where = f"{case.model}, {case.link}"

        def beside(other: str, bound: float, case: Case = case, where: str = where) -> Figure:
            own = added_ratio(case.added(GRAPH), case.added(other))
            return at_most(bound, f"added by {GRAPH} / {other}", where, own)

        if case.link == SHARED_MEMORY:
            found.append(beside(PMEAN, 1.1))
            ratio = case.peak[GRAPH] / case.peak[EAGER]
            peak = Ratio(ratio, ratio, ratio)
            found.append(at_most(1.0, f"peak bytes of {GRAPH} / {EAGER}", where, peak))
        else:
            found += [beside(DDP_COMPILED, 0.9), beside(EAGER, 1.05)]
    return found


def _table(link: str, cases: Sequence[Case]) -> Table:
    table = numbers_table(
        f"{link}, 2 ranks: ms of the local step, and ms that others take beyond it",
        [case.model for case in cases],
        caption="medians of rounds (lowest-highest)",
    )
    for name in cases[0].steps:
        row = []
        for case in cases:
            series = case.steps[name] if name == LOCAL else case.added(name)
            low_s, high_s = min(series.rounds_s), max(series.rounds_s)
            row.append(Ratio(1e3 * series.median_s, 1e3 * low_s, 1e3 * high_s).text(1))
        table.add_row(name, *row)
    table.add_row("simulated", *[f"{1e3 * case.simulated_s:.1f}" for case in cases])
    for name in (EAGER, GRAPH):
        table.add_row(f"peak of {name}", *[size_text(case.peak[name]) for case in cases])
    return table


def _values(case: Case) -> dict[str, Any]:
    rounds_s = {name: series.rounds_s for name, series in case.steps.items()}
    return {**case._asdict(), "steps": rounds_s}


def _case(values: dict[str, Any]) -> Case:
    steps = {name: Series(tuple(rounds)) for name, rounds in values["steps"].items()}
    return Case(**{**values, "steps": steps})


def _rank(link: str, rounds: str, path: str, *models: str) -> None:
    dist.init_process_group("gloo")
    cases = run_rank(link, int(rounds), models)
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps([*map(_values, cases)]))
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        _rank(*sys.argv[2:])
    else:
        main()
