"""`python -m fddp simulate`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fddp import BucketPlan, Jitter, make_schedule, simulate
from fddp.cli import common
from fddp.cli.link_arguments import COST_HELP, axis_cost, cost_of, topology
from fddp.cli.sources import SOURCE_HELP, is_plan_file, load_plan, read
from fddp.errors import FddpError
from fddp.extend import (
    MIB,
    ReadyTimes,
    Target,
    Timeline,
    optimal_plan,
    plan_leaves,
    preset_or_model,
    ready_seconds,
    size_text,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIRST_CAP_MB = 1.0


class _Case(NamedTuple):
    name: str
    cap_mb: float | None  # None for plans without a single cap
    plan: BucketPlan
    timeline: Timeline


def add(commands: common.Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "simulate",
        help="estimate the time of a step, and find the best buckets",
        description="Simulate steps with buckets of several caps and with the best buckets found. "
        "Starts no ranks.",
    )
    parser.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
    parser.add_argument(
        "--topology",
        type=topology,
        required=True,
        metavar="AXIS=N,...",
        help="the ranks as named axes, outermost first, such as host=12,local=8",
    )
    parser.add_argument(
        "--cost", type=axis_cost, required=True, action="append", metavar="COST", help=COST_HELP
    )
    parser.add_argument(
        "--algorithm",
        choices=("all_reduce", "hierarchical", "reduce_scatter"),
        default="all_reduce",
        metavar="NAME",
        help="algorithm of the reduction: %(choices)s (default: %(default)s)",
    )
    parser.add_argument(
        "--caps",
        type=_caps,
        default=(1.0, 5.0, 25.0, 100.0),
        metavar="MIB,...",
        help="bucket caps to try, in MiB (default: 1,5,25,100); first buckets close at 1 MiB",
    )
    ready = parser.add_mutually_exclusive_group(required=True)
    ready.add_argument(
        "--backward-ms",
        type=common.positive,
        metavar="MS",
        help="duration of backward; gradients arrive in the order of the plan, each after a time "
        "in proportion to its size",
    )
    ready.add_argument(
        "--ready",
        metavar="FILE",
        help="JSON of measured times: an object from paths to seconds since the start of the step "
        "(null: no gradient), or a list with one for each leaf of the plan",
    )
    parser.add_argument(
        "--jitter",
        type=_jitter,
        metavar="SPREAD[,RATE,FACTOR]",
        help="variation between ranks: standard deviation of the logarithm of their slowdown, and "
        "the rate of stragglers and their factor",
    )
    common.add_value(parser, "--seed", common.whole(0), 0, "seed of the jitter")
    parser.add_argument(
        "--trace",
        type=common.output,
        metavar="FILE",
        help="write the fastest step to a file for Perfetto",
    )
    common.add_outputs(
        parser, json="all results and the fastest plan", png="step times and the fastest step"
    )
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    common.require(*(["matplotlib"] if args.png else []))
    given = load_plan(args.source)
    target = Target(cost_of(args.cost, args.topology), args.topology, args.algorithm)
    times = (
        _ready_file(args.ready)
        if args.ready is not None
        else _spread(given, args.backward_ms / 1e3)
    )
    cases = []
    try:
        plans = _plans(given, is_plan_file(args.source), args.caps, target, times)
        for name, cap_mb, plan in plans:
            schedule = make_schedule(plan, target.topology, algorithm=target.algorithm)
            timeline = simulate(schedule, target.cost, times, jitter=args.jitter, seed=args.seed)
            cases.append(_Case(name, cap_mb, plan, timeline))
    except (FddpError, ValueError) as error:
        raise common.CallError(str(error)) from error
    best = min(cases, key=lambda case: case.timeline.step_s)
    printer = common.Printer(args.json)
    source = (
        f"read from {args.ready}" if args.ready is not None else "assumed: in proportion to size"
    )
    printer.show(_table(cases, best, target, f"ready times {source}"))
    printer.write_text(args.json, _json(cases, best, target))
    printer.write_text(args.trace, best.timeline.to_chrome_trace())
    if args.png:
        printer.write_png(args.png, _figure(cases, best))
    return 0


def _spread(plan: BucketPlan, backward_s: float) -> list[float]:
    """Return ready times by leaf, in the plan's order and in proportion to size."""
    numels = np.array([plan.leaves[leaf].numel for leaf in plan.order], dtype=np.float64)
    shares = np.cumsum(numels) / max(numels.sum(), 1.0)
    times_s = [math.nan] * len(plan.leaves)
    for leaf, share in zip(plan.order, shares.tolist(), strict=True):
        times_s[leaf] = backward_s * share
    for leaf in plan.order[-1:]:
        times_s[leaf] = backward_s  # also if all leaves are empty
    return times_s


def _plans(
    given: BucketPlan,
    is_fixed: bool,
    caps_mb: Sequence[float],
    target: Target,
    ready_times_s: ReadyTimes,
) -> Iterator[tuple[str, float | None, BucketPlan]]:
    """Yield name, cap and plan: the given one (if fixed), one for each cap, and the best."""
    leaves = given.leaves
    times_s = ready_seconds(leaves, given.reduced, ready_times_s)
    order = sorted(given.order, key=lambda leaf: times_s[leaf])
    if is_fixed:
        yield "as given", None, given
    for cap_mb in caps_mb:
        caps_bytes = [int(cap * MIB) for cap in (min(_FIRST_CAP_MB, cap_mb), cap_mb)]
        plan = plan_leaves(leaves, order=order, caps_bytes=caps_bytes)
        yield f"cap {size_text(cap_mb * MIB)}", cap_mb, plan
    yield "optimal", None, optimal_plan(leaves, given.order, times_s.tolist(), target)


def _table(cases: Sequence[_Case], best: _Case, target: Target, caption: str) -> str:
    columns = ("plan", "buckets", "step ms", "backward ms", "exposed ms", "hidden")
    rows = []
    for case in cases:
        timeline = case.timeline
        rows.append(
            (
                case.name,
                str(len(case.plan.buckets)),
                f"{timeline.step_s * 1e3:.3f}",
                f"{timeline.backward_end_s * 1e3:.3f}",
                f"{timeline.exposed_s * 1e3:.3f}",
                f"{timeline.hidden_fraction:.0%}",
            )
        )
    title = f"{target.algorithm} on {target.topology}; fastest: {best.name}"
    return common.titled_table(title, caption, columns, rows)


def _json(cases: Sequence[_Case], best: _Case, target: Target) -> str:
    cost = target.cost
    models = cost if isinstance(cost, Mapping) else {"": cost}
    document: dict[str, Any] = {
        "topology": dict(target.topology.axes),
        "algorithm": target.algorithm,
        "cost": {axis: asdict(preset_or_model(model)) for axis, model in models.items()},
        "results": [
            {
                "plan": case.name,
                "cap_mb": case.cap_mb,
                "buckets": len(case.plan.buckets),
                "digest": case.plan.digest,
                "step_s": case.timeline.step_s,
                "backward_s": case.timeline.backward_end_s,
                "exposed_s": case.timeline.exposed_s,
                "hidden_fraction": case.timeline.hidden_fraction,
            }
            for case in cases
        ],
        "fastest": best.name,
        "fastest_plan": json.loads(best.plan.to_json()),
    }
    return json.dumps(document, indent=2)


def _figure(cases: Sequence[_Case], best: _Case) -> Figure:
    from matplotlib.figure import Figure

    from fddp.viz import plot_caps, plot_timeline

    figure = Figure(figsize=(8.0, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1)
    by_cap = {case.cap_mb: case.timeline.step_s for case in cases if case.cap_mb is not None}
    others = {case.name: case.timeline.step_s for case in cases if case.cap_mb is None}
    plot_caps(by_cap, levels_s=others, ax=above)
    plot_timeline(best.timeline, ax=below)
    return figure


def _ready_file(path: str) -> ReadyTimes:
    try:
        times = json.loads(read(path))
    except (ValueError, RecursionError) as error:
        raise common.CallError(f"{path}: not a JSON document: {error}") from error
    values = list(times.values()) if isinstance(times, dict) else times
    if not isinstance(values, list) or not all(_is_time(value) for value in values):
        raise common.CallError(f"{path}: must hold an object or a list of seconds (or null)")
    seconds = [math.nan if value is None else float(value) for value in values]
    return dict(zip(times, seconds, strict=True)) if isinstance(times, dict) else seconds


def _is_time(value: object) -> bool:
    # Integers in JSON may exceed the range of floats.
    is_number = isinstance(value, float) or (type(value) is int and abs(value) < 2**63)
    return value is None or is_number


def _caps(text: str) -> tuple[float, ...]:
    return tuple(dict.fromkeys(map(common.cap, text.split(","))))


def _jitter(text: str) -> Jitter:
    parts = text.split(",")
    try:
        if len(parts) not in (1, 3):
            raise ValueError("expected one number or three")
        return Jitter(*map(float, parts))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be SPREAD or SPREAD,RATE,FACTOR: {error}") from None
