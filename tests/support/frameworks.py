"""Programs of training frameworks, run on two ranks under torchrun."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

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


def accelerate_script(name: str, folder: Path) -> Path:
    """Copy one of Accelerate's own scripts, without devices of GPUs.

    Stock's class refuses these for modules on the CPU, and so does fddp's.
    """
    spec = importlib.util.find_spec(f"accelerate.test_utils.scripts.{name}")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    copy = folder / f"{name}.py"
    copy.write_text(re.sub(r"(?m)^ *(device_ids|output_device)=.*\n", "", source))
    return copy


def assert_rows_ok(printed: str) -> None:
    """Check that an example has printed rows, and that none has failed."""
    rows = re.findall(r"^\w+: .*(ok|FAILED)$", printed, re.MULTILINE)
    assert len(rows) >= 2
    assert set(rows) == {"ok"}
