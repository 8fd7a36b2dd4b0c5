"""The command lines of the project behind one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import cli as benchmarks_cli
from fddp.cli import main as fddp_cli

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run `python -m fddp *argv`, or `python -m benchmarks` if the first word is "bench"."""
    if argv and argv[0] == "bench":
        return benchmarks_cli.main(argv[1:])
    return fddp_cli.main(argv)
