"""Programs of training frameworks, run on two ranks under torchrun."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.support.pages import ROOT


def needs(framework: str) -> None:
    """Skip the test where a framework is not installed."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed; `make integrations` installs it")


def on_two_ranks(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    own = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *launcher, *arguments],
        cwd=ROOT,
        env={**os.environ, **own, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
