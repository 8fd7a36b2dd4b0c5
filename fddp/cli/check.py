"""`python -m fddp check`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from fddp.cli import common
from fddp.cli.sources import call, described, find
from fddp.errors import EquivalenceError, ReplicationError
from fddp.extend import plain_table

_PARTS = "3:5,1:2:5"


def add(commands: common.Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "check",
        help="check that a training step is right on several ranks",
        description="Run fddp.testing.check_replication and check_equivalence on a training step.",
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="package.module:name or file.py:name of the step, called as step(*state, *batch)",
    )
    parser.add_argument(
        "--inputs",
        metavar="NAME",
        default="check_inputs",
        help="function beside the step that returns (state, batch), two tuples (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--parts",
        type=_parts,
        metavar="RATIOS",
        default=_PARTS,
        help="rows of ranks in relation to each other, for each number of ranks; 1:1,1:1:1 for "
        "steps whose ranks always have as many (default: %(default)s)",
    )
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    common.require("hypothesis")
    from fddp.testing import check_equivalence, check_replication

    step = find(args.source, "a training step")
    if not callable(step):
        raise common.CallError(f"{args.source} is a {type(step).__name__}, not a training step")
    state, batch = _inputs(args.source.rpartition(":")[0] + ":" + args.inputs)
    checks: dict[str, tuple[str, Callable[[], None]]] = {
        "check_replication": (
            "replicas stay equal",
            lambda: check_replication(step, replicated=state, varying=batch),
        ),
        "check_equivalence": (
            "ranks do what one device does with all rows",
            lambda: check_equivalence(step, state, batch, parts=args.parts),
        ),
    }
    rows, errors = [], []
    for name, (text, check) in checks.items():
        result = "FAILED"
        try:
            check()
            result = "passed"
        except (EquivalenceError, ReplicationError) as error:
            errors.append(f"{name}: {error}")
        except Exception as error:
            raised = f"raised {described(error)}"
            if not errors:  # which would explain it, as collectives that differ do
                raise common.CallError(f"{name} of {args.source} {raised}") from error
            errors.append(f"{name} {raised}")
        rows.append((name, text, result))
    printer = common.Printer()
    printer.show("\n\n".join([plain_table(("check", "law", "result"), rows), *errors]))
    return 1 if errors else 0


def _inputs(source: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """State and batch that a function returns.

    Raises:
        CallError: there is no such function, or it returns something else.
    """
    wanted = "a function that returns (state, batch)"
    found = find(source, wanted)
    inputs = call(found, source) if callable(found) else found
    if not isinstance(inputs, tuple) or [*map(type, inputs)] != [tuple, tuple]:
        raise common.CallError(
            f"{source} must be {wanted}, two tuples of what the step is called with: "
            f"step(*state, *batch)"
        )
    return inputs


def _parts(text: str) -> tuple[tuple[int, ...], ...]:
    """Parse the parts of ranks."""
    try:
        parts = (*((*map(int, ratios.split(":")),) for ratios in text.split(",")),)
    except ValueError:
        parts = ()
    if not parts or any(len(ratios) < 2 or min(ratios) < 1 for ratios in parts):
        raise argparse.ArgumentTypeError(f"must be ratios such as {_PARTS}, got {text!r}")
    return parts
