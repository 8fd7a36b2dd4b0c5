"""`python -m fddp plan`."""

from __future__ import annotations

import argparse

from fddp.cli import common
from fddp.cli.sources import SOURCE_HELP, is_plan_file, load_plan


def add(commands: common.Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "plan",
        help="show the buckets in which gradients are reduced",
        description="Show the bucket plan of a tree of parameters or of an nn.Module.",
    )
    parser.add_argument("source", metavar="SOURCE", help=SOURCE_HELP)
    parser.add_argument(
        "--bucket-cap-mb",
        type=common.cap,
        metavar="MIB",
        help="size at which a bucket is closed, in MiB (default: 25)",
    )
    parser.add_argument(
        "--first-bucket-mb",
        type=common.cap,
        metavar="MIB",
        help="the same for the first bucket (default: 1)",
    )
    common.add_outputs(parser, json="the plan", png="the plan")
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    common.require(*(["matplotlib"] if args.png else []))
    if is_plan_file(args.source) and (args.bucket_cap_mb or args.first_bucket_mb):
        raise common.CallError(f"{args.source!r} is a plan, so its caps are fixed")
    plan = load_plan(args.source, args.bucket_cap_mb or 25.0, args.first_bucket_mb or 1.0)
    printer = common.Printer(args.json)
    printer.show(f"{plan.to_text(printer.width)}\n\ndigest {plan.digest}")
    printer.write_text(args.json, plan.to_json())
    if args.png:
        from fddp.viz import plot_plan

        printer.write_png(args.png, plot_plan(plan))
    return 0
