"""`python -m fddp simulate` for sharded updates, whose all-gathers may overlap with forward."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fddp.cli import common
from fddp.core.check import check_schedule
from fddp.core.plan.plan import BucketPlan
from fddp.core.schedule.builder import make_schedule
from fddp.core.schedule.sharded import GatherAt, make_sharded_schedule
from fddp.core.sim.optimal import Target
from fddp.core.sim.sharded import ComputeTimes, ShardedTimeline, simulate_sharded
from fddp.core.sim.simulator import ReadyTimes

_GATHERS: Mapping[GatherAt, str] = {
    "step_end": "at the end of the step",
    "next_forward": "during the next forward",
}


class _Case(NamedTuple):
    name: str
    plan: BucketPlan
    gather: GatherAt
    timeline: ShardedTimeline


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the options of sharded updates."""
    parser.add_argument(
        "--forward-ms",
        type=common.positive,
        metavar="MS",
        help="with --algorithm reduce_scatter: duration of forward; simulate whole steps in which "
        "each rank updates its shards and all-gathers the parameters",
    )


def is_sharded(args: argparse.Namespace) -> bool:
    """Return True if the arguments are for sharded updates."""
    return args.forward_ms is not None


def check(args: argparse.Namespace) -> None:
    """Raise if other options do not go with --forward-ms."""
    if args.algorithm != "reduce_scatter":
        raise common.CallError("--forward-ms needs --algorithm reduce_scatter")
    for name in ("step_ms", "trace", "jitter"):
        if getattr(args, name) is not None:
            raise common.CallError(f"--forward-ms does not go with --{name.replace('_', '-')}")


def run(
    args: argparse.Namespace,
    plans: Iterable[tuple[str, BucketPlan]],
    target: Target,
    ready_times_s: ReadyTimes,
) -> int:
    """Simulate steps of each plan, with both places of the all-gathers."""
    forward_s = args.forward_ms / 1e3
    cases = []
    for name, plan in plans:
        times = ComputeTimes(forward_s, _use_times_s(plan, forward_s), ready_times_s)
        reduce = make_schedule(plan, target.topology, algorithm=target.algorithm)
        for gather in _GATHERS:
            schedule = make_sharded_schedule(reduce, gather)
            check_schedule(schedule)
            timeline = simulate_sharded(schedule, target.cost, times)
            cases.append(_Case(name, plan, gather, timeline))
    best = min(cases, key=lambda case: case.timeline.step_s)
    printer = common.Printer(args.json)
    printer.show(_table(cases, best, target))
    printer.write_text(args.json, _json(cases, best))
    if args.png:
        from fddp.viz import plot_sharded

        printer.write_png(args.png, plot_sharded(best.timeline))
    return 0


def _use_times_s(plan: BucketPlan, forward_s: float) -> list[float]:
    """Return times of first uses by leaf, in the reverse of the plan's order and in proportion to
    size."""
    times_s = [math.nan] * len(plan.leaves)
    total = max(sum(plan.leaves[leaf].numel for leaf in plan.order), 1)
    passed = 0
    for leaf in reversed(plan.order):
        times_s[leaf] = forward_s * passed / total
        passed += plan.leaves[leaf].numel
    return times_s


def _table(cases: Sequence[_Case], best: _Case, target: Target) -> str:
    columns = ("plan", "buckets", "all-gathers", "step ms", "ratio")
    rows = [
        (
            case.name,
            str(len(case.plan.buckets)),
            _GATHERS[case.gather],
            f"{case.timeline.step_s * 1e3:.3f}",
            f"{case.timeline.ratio:.3f}",
        )
        for case in cases
    ]
    timeline = best.timeline
    title = f"sharded updates on {target.topology}; fastest: {best.name}, {_GATHERS[best.gather]}"
    caption = (
        f"ratio: to the larger of compute, {timeline.compute_s * 1e3:.3f} ms, and communication, "
        f"{timeline.communication_s * 1e3:.3f} ms in the fastest case"
    )
    return common.titled_table(title, caption, columns, rows, left=("plan", "all-gathers"))


def _json(cases: Sequence[_Case], best: _Case) -> str:
    results = [
        {
            "plan": case.name,
            "buckets": len(case.plan.buckets),
            "digest": case.plan.digest,
            "gather": case.gather,
            "step_s": case.timeline.step_s,
            "compute_s": case.timeline.compute_s,
            "communication_s": case.timeline.communication_s,
        }
        for case in cases
    ]
    document = {
        "results": results,
        "fastest": {"plan": best.name, "gather": best.gather},
        "fastest_plan": json.loads(best.plan.to_json()),
    }
    return json.dumps(document, indent=2)
