"""Programs that a test starts: one that ends otherwise than it should is shown with its output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.polling import HANG_S

ROOT = Path(__file__).resolve().parents[2]


def run_program(
    *command: str, code: int | None = 0, env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program, whose exit code must be `code`; None takes any.

    Args:
        command: the program and its arguments.
        code: of the exit; negative for a signal.
        env: variables in addition to those of this process.
        options: of `subprocess.run`.
    """
    given = {
        "cwd": ROOT,
        "env": {**os.environ, **(env or {})},
        "capture_output": True,
        "text": True,
        "timeout": HANG_S,
        "check": False,
        **options,
    }
    try:
        done = subprocess.run(command, **given)
    except subprocess.TimeoutExpired as error:
        # The program has been killed; those that it started show whether one of them hung.
        columns = "pid,ppid,etimes,stat,wchan:24,args"
        left = subprocess.run(["ps", "-eo", columns], capture_output=True, text=True, check=False)
        raise AssertionError(f"{error}\n{error.stdout}\n{error.stderr}\n{left.stdout}") from error
    assert code is None or done.returncode == code, (
        f"{' '.join(command)[:200]} ended with {done.returncode} instead of {code}\n"
        f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    )
    return done


def run_python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this Python with one thread, and with the repository on its path; see `run_program`."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(options.pop("env", None) or {})}
    return run_program(sys.executable, *arguments, env=own, **options)


def torchrun(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script, or a module after `-m`, on two ranks; see `run_program`."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run_python(*launcher, *arguments, **options)
