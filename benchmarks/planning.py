"""Planning, proving, simulating, in one process: `python -m benchmarks.planning`."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Series, ratio, rounds_s
from benchmarks.packing import ROUNDS, Calls, in_turn
from benchmarks.scripts import options
from fddp.cli.progress import Stages
from fddp.core.check import check_schedule
from fddp.core.plan.bucket import assign_buckets
from fddp.core.plan.plan import BucketPlan, LeafSpec, plan_leaves
from fddp.core.schedule.builder import make_schedule
from fddp.core.schedule.topology import Topology
from fddp.core.sim.cost import CostModel
from fddp.core.sim.optimal import Target, optimal_plan
from fddp.core.sim.simulator import Jitter, simulate
from fddp.tree.planner import plan_buckets

_LEAVES = 100_000
_CAPS_BYTES = (1 << 20, 25 << 20)


def main() -> None:
    """Measures and prints; about half a minute."""
    args = options(__doc__).parse_args()
    torch.set_num_threads(1)
    cases = {
        f"planning {_LEAVES} leaves": _planning(),
        "1,000 buckets: proving, simulating, planning": _schedules(),
    }
    results = {}
    with Stages(shown=True) as stages:
        for title, calls in cases.items():
            stages.begin(title, ROUNDS)
            results[title] = in_turn(calls, stages.advance)
    for title, series in results.items():
        Console().print(_table(title, series))
    if args.json is not None:
        args.json.write_text(json.dumps({"rounds_s": rounds_s(results)}, indent=2))


def _planning() -> Calls:
    tensors = [torch.empty(3, 4, device="meta") for _ in range(_LEAVES)]
    order = list(range(_LEAVES))
    flat = {f"layers.{i}.weight": tensor for i, tensor in enumerate(tensors)}
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    nested = {f"layer{i}": {"weight": w, "bias": b} for i, (w, b) in enumerate(pairs)}
    leaves = plan_buckets(flat).leaves
    text = plan_buckets(dict(list(flat.items())[:10_000])).to_json()
    sparse = [False] * _LEAVES
    return {
        "torch's assignment, C++": lambda: dist._compute_bucket_assignment_by_size(
            tensors, list(_CAPS_BYTES), sparse, order
        ),
        "assign_buckets": lambda: assign_buckets(leaves, order, _CAPS_BYTES),
        "plan_buckets, flat dict": lambda: plan_buckets(flat),
        "plan_buckets, 50,000 dicts of 2": lambda: plan_buckets(nested),
        "JSON both ways, 10,000 leaves": lambda: BucketPlan.from_json(text).to_json(),
    }


def _schedules() -> Calls:
    leaves = [LeafSpec(f"p{i:04}", (1000,), "float32") for i in range(2000)]
    plan = plan_leaves(leaves, order=range(2000), caps_bytes=[5000])
    near, far = Topology(host=2, local=4), Topology(host=12_500, local=8)
    many = Topology(host=1250, local=8)
    on_near, on_far, on_many = (
        make_schedule(plan, topology, algorithm="hierarchical") for topology in (near, far, many)
    )
    flat = make_schedule(plan, Topology(world=10_000))
    cost, jitter = CostModel(1e-6, 1e-10, "tree"), Jitter(spread=0.05)
    ready_s = [1e-4 * (i + 1) for i in range(2000)]
    return {
        "check_schedule, 8 ranks": lambda: check_schedule(on_near),
        "check_schedule, 100,000 ranks": lambda: check_schedule(on_far),
        "simulate 10,000 ranks, jitter, flat": lambda: simulate(flat, cost, ready_s, jitter=jitter),
        "simulate 10,000 ranks, jitter, two axes": lambda: simulate(
            on_many, cost, ready_s, jitter=jitter
        ),
        "optimal plan, 2,000 leaves": lambda: optimal_plan(
            tuple(leaves), range(2000), ready_s, Target(cost, many)
        ),
    }


def _table(title: str, series: dict[str, Series]) -> Table:
    base = next(iter(series))
    table = Table(title=title, caption="median of rounds; ratio round by round (lowest-highest)")
    for heading in ("", "ms", f"/ {base}"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, times in series.items():
        table.add_row(name, f"{times.median_s * 1e3:.3g}", ratio(times, series[base]).text())
    return table


if __name__ == "__main__":
    main()
