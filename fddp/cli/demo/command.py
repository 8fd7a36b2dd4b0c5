"""`python -m fddp demo`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fddp.cli import common

if TYPE_CHECKING:
    from fddp.cli.demo.train import Options

_MAX_RANKS = 16  # with many more, some would have no images


def add(commands: common.Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "demo",
        help="train a small network on several ranks and check the result",
        description="Train a small convolutional network on scikit-learn's digits, and compare it "
        "with one process. Exit code 1 if a check fails.",
    )
    common.add_ranks(parser, _MAX_RANKS)
    common.add_value(parser, "--epochs", common.whole(1), 8, "number of passes over the data")
    common.add_value(
        parser, "--bucket-cap-mb", common.cap, 0.25, "size at which a bucket is closed, in MiB"
    )
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    common.require("rich", "sklearn")
    from fddp.cli.demo.train import Options

    return run_demo(Options(args.ranks, args.epochs, args.bucket_cap_mb), args.parser.prog)


def run_demo(options: Options, prog: str = "fddp demo") -> int:
    """Run the demo, print its table, and return the exit code; `prog` names it in messages."""
    from fddp.cli.demo.report import checks, table
    from fddp.cli.demo.train import run_rank

    report = common.launched(prog, options.ranks, run_rank, options)
    assert report is not None  # it is rank 0's
    common.Printer().show(table(report))
    return 0 if all(check.passed for check in checks(report).values()) else 1
