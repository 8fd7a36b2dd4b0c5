"""Command line `fddp`, also as `python -m fddp`.

Exit codes: 0 success, 1 a check or a rank failed, 2 an invalid call or a missing library, 128 + n
ended by signal n.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

import fddp
from fddp.cli import check, flight, plan, simulate
from fddp.cli.common import CallError
from fddp.cli.demo import command as demo
from fddp.extend import suggestion


def main(argv: Sequence[str] | None = None, prog: str = "fddp") -> int:
    """Run a command and return the exit code.

    Args:
        argv: arguments without the program's name; None for those of the process.
        prog: name of the program in messages.

    Raises:
        SystemExit: an invalid argument or a missing library (code 2), `--help` or `--version` (0).
    """
    parser = Parser(prog=prog, description="Functional distributed data parallelism.")
    version = f"fddp {fddp.__version__}, torch {torch.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (demo, plan, simulate, flight, check):
        command.add(commands)
    return run(parser, argv)


def run(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Parse arguments and run their command, as `main`."""
    args = parser.parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.run
    try:
        code = command(args)
        sys.stdout.flush()
    except CallError as error:
        args.parser.exit(2, f"{args.parser.prog}: error: {error}\n")
    except KeyboardInterrupt:  # also while a command imports its source
        args.parser.exit(128 + signal.SIGINT, f"{args.parser.prog}: ended by SIGINT\n")
    except OSError as error:  # of output; the reader of a pipe may have exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing left to flush
        if not isinstance(error, BrokenPipeError):
            args.parser.exit(1, f"{args.parser.prog}: error: {error}\n")
        return 1
    return code


class Parser(argparse.ArgumentParser):
    """Parser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        hint = ""
        wrong = _WRONG_WORD.search(message)
        if wrong is not None:
            hint = suggestion(wrong[1] or wrong[2], _words(self))
        self.exit(2, f"{self.prog}: error: {message}{hint} (see {self.prog} --help)\n")


_WRONG_WORD = re.compile(r"invalid choice: '([^']+)'|unrecognized arguments: ([^\s=]+)")


def _words(parser: argparse.ArgumentParser) -> set[str]:
    """Return the options and choices of a parser and of its commands."""
    words: set[str] = set()
    for action in parser._actions:
        words.update(action.option_strings, map(str, action.choices or ()))
        if isinstance(action, argparse._SubParsersAction):
            words.update(*map(_words, action.choices.values()))
    return words
