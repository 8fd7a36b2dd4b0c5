"""Command lines of the project behind one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks import cli as benchmarks_cli
from fddp.cli import main as fddp_cli

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run `python -m fddp *argv`, or `python -m benchmarks` if the first word is "bench"."""
    if argv and argv[0] == "bench":
        return benchmarks_cli.main(argv[1:])
    return fddp_cli.main(argv, prog="python -m fddp")


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line of error with which a call exits, with code 2."""
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.endswith("\n")
    assert printed.err.count("\n") == 1
    return printed.err
