"""The command line, `python -m fddp`.

Exit codes: 0 all went well, 1 a check or a rank failed, 2 the call makes no sense or a library is
missing, 128 + n ended by signal n.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from fddp.bench.models import WORKLOADS
from fddp.launch import launch

if TYPE_CHECKING:
    from fddp.demo.rank import Options as DemoOptions

T = TypeVar("T")

_PROG = "python -m fddp"
_MAX_DEMO_RANKS = 16  # with many more, some would have no images at all
#: modules of the `demo` extra, by the name of their package
_EXTRA = {"rich": "rich", "sklearn": "scikit-learn"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit code.

    Args:
        argv: arguments without the program's name; None for those of the process.

    Raises:
        SystemExit: a wrong argument or a missing library (code 2), or help was asked for (0).
    """
    parser = _Parser(prog=_PROG, description="Functional distributed data parallelism.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_demo, _add_bench):
        add(commands)
    args = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


class _Parser(argparse.ArgumentParser):
    """Tells of a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


# Commands: one function that declares each, one that runs it.


def _add_demo(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="train a small network on several ranks and check the result",
        description="Trains a small convolutional network on scikit-learn's digits, and checks it "
        "against one process. Exit code 1 if a check fails.",
    )
    parser.add_argument(
        "--ranks",
        type=_whole(1, _MAX_DEMO_RANKS),
        default=2,
        metavar="N",
        help="processes, one thread each (default: %(default)s)",
    )
    parser.add_argument(
        "--epochs",
        type=_whole(1),
        default=8,
        metavar="N",
        help="times to go over the data (default: %(default)s)",
    )
    parser.add_argument(
        "--bucket-cap-mb",
        type=_positive,
        default=0.25,
        metavar="MIB",
        help="size at which a bucket is closed, in MiB (default: %(default)s)",
    )
    parser.set_defaults(run=_demo, prog=parser.prog)


def _demo(args: argparse.Namespace) -> int:
    _require_extra(args.prog)
    from fddp.demo.rank import Options

    return run_demo(Options(args.ranks, args.epochs, args.bucket_cap_mb))


def run_demo(options: DemoOptions) -> int:
    """Runs the demo and prints its table; the exit code."""
    from rich.console import Console

    from fddp.demo.rank import run_rank
    from fddp.demo.report import checks, table

    report = _launched("demo", options.ranks, run_rank, options)
    assert report is not None  # it is rank 0's
    Console(highlight=False).print(table(report))
    return 0 if all(check.passed for check in checks(report).values()) else 1


def _add_bench(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure steps of fddp beside torch DDP",
        description="Measures steps of fddp, of torch DDP in its modes, and of one flat "
        "all-reduce: in turn, on the same 2 ranks of one thread each, over gloo.",
    )
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
        type=_whole(1),
        metavar="N",
        help="times that each is measured (default: 9, or 2 with --quick)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few steps: shows that it runs, measures nothing well"
    )
    parser.add_argument("--json", type=_output, metavar="PATH", help="write the results there too")
    parser.set_defaults(run=_bench, prog=parser.prog)


def _bench(args: argparse.Namespace) -> int:
    _require_extra(args.prog)
    from rich.console import Console

    from fddp.bench.rank import Options, run_rank
    from fddp.bench.report import tables, to_json

    rounds = args.rounds or (2 if args.quick else 9)
    options = Options(tuple(dict.fromkeys(args.models)), rounds, steps=1 if args.quick else 10)
    report = _launched("bench", 2, run_rank, options)
    assert report is not None  # it is rank 0's
    console = Console(highlight=False)
    for table in tables(report):
        console.print(table)
    if args.json is not None:
        args.json.write_text(to_json(report), encoding="utf-8")
        console.print(f"written to {args.json}", soft_wrap=True, markup=False)
    return 0


def _launched(command: str, ranks: int, fn: Callable[..., T], *args: Any) -> T:
    """What `fn` returned on rank 0; ends this process with one line where a rank failed."""
    try:
        return launch(ranks, fn, *args)[0]
    except ChildFailedError:
        print(f"{_PROG} {command}: a rank failed; its error is above", file=sys.stderr)
        sys.exit(1)
    except SignalException as error:
        print(f"{_PROG} {command}: ended by {error.sigval.name}", file=sys.stderr)
        sys.exit(128 + error.sigval)


# Arguments


def _require_extra(prog: str) -> None:
    missing = [name for module, name in _EXTRA.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(
            f"{prog}: error: needs {' and '.join(missing)}: pip install fddp[demo]", file=sys.stderr
        )
        sys.exit(2)


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    wanted = f"a whole number of at least {least}" + (f" and at most {most}" if most else "")

    def parse(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
        if value is None or value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
        return value

    return parse


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _output(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a directory that exists, got {text!r}")
    return path
