"""`python -m fddp flight`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fddp.cli.common import CallError, Commands, Printer
from fddp.extend import Flight, counted, find_divergences

_MOST_BYTES = 64 * 2**20  # of one file; one of a hundred GradSyncs has 2 MiB


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "flight",
        help="read ranks' flight recorder dumps and report where they diverge",
        description="Align flight recorder dumps of several ranks, written by fddp.dump_flights.",
    )
    parser.add_argument(
        "source",
        nargs="+",
        type=Path,
        metavar="SOURCE",
        help="a JSON file of a flight, or a directory with files flight-*.json",
    )
    parser.add_argument("--all", action="store_true", help="print every operation, too")
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    flights, unreadable = _all(args.source)
    processes = len({(f.host, f.pid) for _, f in flights})
    print(f"{counted(len(flights), 'flight')} of {counted(processes, 'process')}")
    for problem in unreadable:
        print(f"left out: {problem}")
    for divergence in find_divergences(flight for _, flight in flights):
        print(f"\n{divergence.text}")
    if args.all:
        width = Printer().width
        for path, flight in flights:
            print(f"\n{path}\n{flight.to_text(width)}")
    return 0


def _all(sources: Sequence[Path]) -> tuple[list[tuple[Path, Flight]], list[CallError]]:
    """Return the flights by file, and the errors of files in directories.

    An incomplete file in a directory does not prevent the report on the others.
    """
    flights, unreadable = [], []
    for source in sources:
        for path in _files(source):
            try:
                flights.append((path, _read(path)))
            except CallError as error:
                if path is source:
                    raise
                unreadable.append(error)
    if not flights:
        raise unreadable[0]
    return flights, unreadable


def _files(source: Path) -> list[Path]:
    if not source.is_dir():
        return [source]
    found = sorted(source.glob("flight-*.json"))
    if not found:
        raise CallError(f"there is no flight-*.json in {str(source)!r}")
    return found


def _read(path: Path) -> Flight:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise CallError(f"{str(path)!r} is no flight: it has more than {_MOST_BYTES} bytes")
        return Flight.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CallError(f"can't read {str(path)!r}: {error.strerror}") from error
    except ValueError as error:
        raise CallError(f"{str(path)!r}: {error}") from error
