"""Command lines: those of the project behind one call, and others in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks import cli as benchmarks_cli
from fddp.cli import main as fddp_cli
from tests.support.polling import HANG_S

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]


def run_python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run this Python with one thread, and with the repository on its path."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def torchrun(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a script, or a module after `-m`, on two ranks; see `run_python`."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run_python(*launcher, *arguments, cwd=cwd)


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
