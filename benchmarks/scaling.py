"""Cost by leaves, buckets and ranks, with fitted exponents: `python -m benchmarks.scaling`.

All figures are CPU seconds of the whole process, so that other programs hardly disturb them. Leaves
and buckets are counted on one rank, where no other takes part: what remains is the cost of the
library on the host. Ranks are threads of this process, and figures are per rank.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import fddp
from benchmarks.bounds import console
from benchmarks.scripts import numbers_table, options
from fddp.cli.progress import Stages
from fddp.core.check import check_schedule
from fddp.core.plan.plan import rebucket
from fddp.core.schedule.builder import make_schedule
from fddp.transport.base import Transport
from fddp.transport.loopback import LoopbackTransport
from fddp.transport.shm.host_discovery import discover_hosts
from fddp.tree.planner import plan_buckets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

_LEAVES = (1_000, 10_000, 100_000)
_BUCKETS = (10, 100, 1_000, 10_000)
_RANKS = (2, 4, 8, 16, 32, 64)
_NUMEL = 4  # elements of a leaf
_STEPS = 5
_FLOAT_BYTES = 4

Costs = dict[str, float]
"""Seconds, or a number, by name."""


def main() -> None:
    """Measure and print; about two minutes."""
    args = options(__doc__, rounds=3).parse_args()
    torch.set_num_threads(1)
    cases: dict[str, dict[int, Callable[[], Costs]]] = {
        "leaves, in 10 buckets": {n: partial(_host_costs, n, 10) for n in _LEAVES},
        "buckets, of 10,000 leaves": {n: partial(_host_costs, 10_000, n) for n in _BUCKETS},
        "ranks, 100 leaves in 4 buckets": {n: partial(_rank_costs, n) for n in _RANKS},
    }
    results = {}
    with Stages(shown=True) as stages:
        for title, by_size in cases.items():
            stages.begin(title, len(by_size) * args.rounds)
            results[title] = {
                size: _least(measured, args.rounds, stages.advance)
                for size, measured in by_size.items()
            }
    for title, costs in results.items():
        console().print(_table(title, costs))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2))


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return the exponent of the power law that fits best.

    Example:
        >>> round(exponent([10, 100, 1000], [2.0, 20.0, 200.0]), 3)
        1.0
    """
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(costs, 1e-9)), 1)[0])


def _least(measure: Callable[[], Costs], rounds: int, after_round: Callable[[], None]) -> Costs:
    """Return the lowest cost of some rounds, by name."""
    found: list[Costs] = []
    for _ in range(rounds):
        found.append(measure())
        after_round()
    return {name: min(costs[name] for costs in found) for name in found[0]}


def _cpu_s(call: Callable[[], Any]) -> tuple[float, Any]:
    start_s = time.process_time()
    result = call()
    return time.process_time() - start_s, result


def _tree(leaves: int) -> dict[str, Tensor]:
    return {f"layers.{i}.weight": torch.zeros(_NUMEL) for i in range(leaves)}


def _cap_mb(leaves: int, buckets: int) -> list[float]:
    return [_FLOAT_BYTES * _NUMEL * leaves / buckets / 2**20]


def _host_costs(leaves: int, buckets: int) -> Costs:
    tree = _tree(leaves)
    costs: Costs = {}
    cap_mb = _cap_mb(leaves, buckets)
    costs["plan_buckets"], plan = _cpu_s(lambda: plan_buckets(tree, bucket_cap_mb=cap_mb))
    costs["make_schedule"], schedule = _cpu_s(lambda: make_schedule(plan, 8))
    costs["check_schedule"], _ = _cpu_s(lambda: check_schedule(schedule))
    costs["rebuild: plan, schedule, proof"], _ = _cpu_s(
        lambda: check_schedule(make_schedule(rebucket(plan, plan.order[::-1]), 8))
    )
    costs |= fddp.loopback(1, _one_rank, tree, plan)[0]
    return costs


def _one_rank(group: Any, tree: dict[str, Tensor], plan: fddp.BucketPlan) -> Costs:
    costs: Costs = {}
    costs["GradSync(plan)"], sync = _cpu_s(lambda: fddp.GradSync(plan, group=group))
    with sync:
        costs["first step"], _ = _cpu_s(lambda: sync(tree))
        costs["step"] = min(_cpu_s(lambda: sync(tree))[0] for _ in range(_STEPS))
    return costs


def _rank_costs(ranks: int) -> Costs:
    tree = _tree(100)
    plan = plan_buckets(tree, bucket_cap_mb=_cap_mb(100, 4))
    counts: Counter[str] = Counter()
    lock = threading.Lock()
    barrier = threading.Barrier(ranks)

    def run(group: Any) -> Costs:
        costs: Costs = {}
        with LoopbackTransport(group) as transport, _counting(transport, counts, lock):
            discover_hosts(transport)
        barrier.wait()
        build_s, sync = _cpu_s(lambda: fddp.GradSync(plan, group=group))
        barrier.wait()
        with sync:
            sync(tree)
            barrier.wait()
            step_s, _ = _cpu_s(lambda: [sync(tree) for _ in range(_STEPS)])
            barrier.wait()
        # The time of the process is that of all its threads.
        costs["GradSync(plan)"], costs["step"] = build_s / ranks, step_s / ranks / _STEPS
        return costs

    costs = fddp.loopback(ranks, run)[0]
    costs["all-gathers to find who shares a host"] = counts["all_gather"] / ranks
    costs["bytes received in them"] = counts["bytes"] / ranks
    return costs


@contextmanager
def _counting(transport: Transport, counts: Counter[str], lock: threading.Lock) -> Iterator[None]:
    """Count the all-gathers of a transport in the block, and the bytes that they give."""
    gather = transport.all_gather

    def counted(tensor: Tensor, **how: Any) -> Any:
        with lock:
            counts["all_gather"] += 1
            counts["bytes"] += tensor.nbytes * transport.world_size
        return gather(tensor, **how)

    transport.all_gather = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        del transport.all_gather


def _table(title: str, costs: Mapping[int, Costs]) -> Table:
    sizes = list(costs)
    table = numbers_table(
        f"by {title}",
        [*(f"{size:,}" for size in sizes), "exponent"],
        caption="CPU ms (lowest of the rounds), or a number; cost ~ size ** exponent",
    )
    for name in costs[sizes[0]]:
        values = [costs[size][name] for size in sizes]
        is_count = "all-gathers" in name or "bytes" in name
        shown = [f"{value:,.0f}" if is_count else f"{value * 1e3:.3g}" for value in values]
        table.add_row(name, *shown, f"{exponent(sizes, values):.2f}")
    return table


if __name__ == "__main__":
    main()
