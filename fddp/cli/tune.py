"""`python -m fddp tune`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from fddp.cli import common
from fddp.cli.sources import load
from fddp.core.text import counted
from fddp.errors import FddpError
from fddp.sync.autotune import TuneReport
from fddp.sync.grad_sync import GradSync
from fddp.tree.planner import plan_buckets

_MAX_RANKS = 64


class Options(NamedTuple):
    """Options of every rank."""

    source: str  # name of the function that makes the step
    bucket_cap_mb: float  # of the initial plan
    rounds: int


class _Step(NamedTuple):
    loss_fn: Callable[..., Any]
    params: Any
    args: tuple[Any, ...]


def add(commands: common.Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "tune",
        help="measure real steps on ranks of this host, and find faster buckets",
        description="Start ranks on this host, measure links and gradient arrivals, make "
        "a plan, and compare steps with the old and the new plan.",
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="package.module:name or file.py:name of a function that returns (loss_fn, params, "
        "*args); a step is the gradient of loss_fn(params, *args) with respect to params. Every "
        "rank calls it, in its process group",
    )
    common.add_ranks(parser, _MAX_RANKS)
    common.add_value(parser, "--bucket-cap-mb", common.cap, 25.0, "cap of the initial plan, in MiB")
    common.add_value(parser, "--rounds", common.whole(1), 5, "number of trials of each plan")
    common.add_outputs(parser, json="the chosen plan, for GradSync or fddp plan,", png="both plans")
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    common.require(*(["matplotlib"] if args.png else []))
    options = Options(args.source, args.bucket_cap_mb, args.rounds)
    _check(_load_step(options.source), options)
    report = common.launched(args.parser.prog, args.ranks, run_rank, options)
    printer = common.Printer(args.json)
    printer.show(_table(report, args.ranks))
    printer.write_text(args.json, (report.after if report.adopted else report.before).to_json())
    if args.png:
        from fddp.viz import compare_plans

        figure = compare_plans(report.before, report.after, names=("before", "after"))
        printer.write_png(args.png, figure)
    return 0


def run_rank(options: Options) -> TuneReport:
    """Take steps on one rank, and tune them."""
    step = _load_step(options.source)
    with GradSync(step.params, bucket_cap_mb=options.bucket_cap_mb) as sync:
        return sync.tune(
            sync.value_and_grad(step.loss_fn), step.params, *step.args, rounds=options.rounds
        )


def _load_step(source: str) -> _Step:
    found = load(source)
    if not isinstance(found, tuple) or len(found) < 2 or not callable(found[0]):
        raise common.CallError(f"{source} must return (loss_fn, params, *args), got {found!r:.60}")
    loss_fn, params, *args = found
    return _Step(loss_fn, params, tuple(args))


def _check(step: _Step, options: Options) -> None:
    """Raise planning errors before ranks are started."""
    try:
        plan_buckets(step.params, bucket_cap_mb=options.bucket_cap_mb)
    except (FddpError, TypeError, ValueError) as error:
        raise common.CallError(f"{options.source}: {error}") from error


def _table(report: TuneReport, ranks: int) -> str:
    kept = "after" if report.adopted else "before"
    costs = (
        f"{axis}: {model.alpha_s * 1e6:.3g} µs and {model.beta_s_per_byte * 1e9:.3g} ns a byte, "
        f"overlap {model.overlap:.2f}"
        for axis, model in report.costs.items()
    )
    title = f"a step on {counted(ranks, 'rank')} over {report.transport}; kept: {kept}"
    columns = ("plan", "buckets", "simulated ms", "measured ms")
    rows = []
    for name, plan, simulated_s, measured_s in (
        ("before", report.before, report.simulated_before_s, report.measured_before_s),
        ("after", report.after, report.simulated_after_s, report.measured_after_s),
    ):
        times = (f"{seconds * 1e3:.2f}" for seconds in (simulated_s, measured_s))
        rows.append((name, str(len(plan.buckets)), *times))
    rows.append(("gain", "", f"{report.expected_gain:+.1%}", f"{report.measured_gain:+.1%}"))
    return common.titled_table(title, "\n".join(costs), columns, rows)
