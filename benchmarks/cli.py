"""The command `python -m benchmarks`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.models import WORKLOADS
from fddp.cli.common import Printer, add_ranks, launched, output, require, whole
from fddp.cli.main import Parser, run

PROG = "python -m benchmarks"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; the exit code. As `fddp.cli.main.main`."""
    return run(parser(), argv)


def parser() -> Parser:
    """Parser of the command's options."""
    own = Parser(
        prog=PROG,
        description="Measures steps of fddp, of torch DDP in its modes, and of one flat "
        "all-reduce: in turn, on the same ranks of one thread each. torch's DDP goes over gloo; "
        "fddp over the transport that it takes by itself, and over gloo.",
    )
    add_ranks(own, most=64)
    own.add_argument(
        "--models",
        nargs="+",
        choices=tuple(WORKLOADS),
        default=tuple(WORKLOADS),
        metavar="MODEL",
        help=f"some of: {', '.join(WORKLOADS)} (default: all)",
    )
    own.add_argument(
        "--rounds",
        type=whole(1),
        metavar="N",
        help="times that each is measured (default: 9, or 2 with --quick)",
    )
    own.add_argument(
        "--quick", action="store_true", help="few steps: shows that it runs, measures nothing well"
    )
    own.add_argument("--json", type=output, metavar="PATH", help="write the results there too")
    own.set_defaults(run=_run, parser=own)
    return own


def _run(args: argparse.Namespace) -> int:
    require("rich", "sklearn")
    from benchmarks.bounds import WIDTH
    from benchmarks.report import tables, to_json, warning
    from benchmarks.steps import Options, run_rank

    rounds = args.rounds or (2 if args.quick else 9)
    options = Options(tuple(dict.fromkeys(args.models)), rounds, args.quick)
    report = launched(PROG, args.ranks, run_rank, options)
    assert report is not None  # it is rank 0's
    printer = Printer(width=WIDTH)
    for table in tables(report):
        printer.show(table)
    if warning(report):
        printer.show(warning(report))
    printer.write_text(args.json, to_json(report))
    return 0
