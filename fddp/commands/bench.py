"""`python -m fddp bench`."""

from __future__ import annotations

import argparse

from fddp.bench.models import WORKLOADS
from fddp.commands.common import (
    Commands,
    Printer,
    add_ranks,
    launched,
    output,
    require,
    whole,
)


def add(commands: Commands) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "bench",
        help="measure steps of fddp beside torch DDP",
        description="Measures steps of fddp, of torch DDP in its modes, and of one flat "
        "all-reduce: in turn, on the same ranks of one thread each. torch's DDP goes over gloo; "
        "fddp over the transport that it takes by itself, and over gloo.",
    )
    add_ranks(parser, most=64)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=tuple(WORKLOADS),
        default=tuple(WORKLOADS),
        metavar="MODEL",
        help=f"some of: {', '.join(WORKLOADS)} (default: all)",
    )
    parser.add_argument(
        "--rounds",
        type=whole(1),
        metavar="N",
        help="times that each is measured (default: 9, or 2 with --quick)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few steps: shows that it runs, measures nothing well"
    )
    parser.add_argument("--json", type=output, metavar="PATH", help="write the results there too")
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    require("rich", "sklearn")
    from fddp.bench.figures import WIDTH
    from fddp.bench.rank import Options, run_rank
    from fddp.bench.report import tables, to_json, warning

    rounds = args.rounds or (2 if args.quick else 9)
    options = Options(tuple(dict.fromkeys(args.models)), rounds, args.quick)
    report = launched("bench", args.ranks, run_rank, options)
    assert report is not None  # it is rank 0's
    printer = Printer(width=WIDTH)
    for table in tables(report):
        printer.show(table)
    if warning(report):
        printer.show(warning(report))
    printer.write_text(args.json, to_json(report))
    return 0
