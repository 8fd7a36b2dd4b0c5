"""Frameworks over the backend "fddp". Run by `make integrations`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.frameworks import accelerate_script, assert_rows_ok, needs, on_two_ranks

pytestmark = pytest.mark.slow

# Runs a script or module in a default group that is there before the framework asks for one.
_OVER_FDDP = """
import runpy, sys
import torch.distributed as dist
from fddp.transport.backend import backend_choice
dist.init_process_group("fddp")
if dist.get_rank() == 0:
    print("over", backend_choice().name, flush=True)
name = sys.argv.pop(1)
run = runpy.run_path if name.endswith(".py") else runpy.run_module
run(name, run_name="__main__")
"""


def _run(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    runner = folder / "runner.py"
    runner.write_text(_OVER_FDDP)
    done = on_two_ranks(str(runner), name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("over shm\n") == 1
    assert "No backend of type" not in done.stderr  # torch warns, if a group has no default one
    return done


# Not Ignite: its `auto_model` wraps modules only over backends that it knows.
@pytest.mark.parametrize(
    ("framework", "example"),
    [
        ("accelerate", "accelerate_loop"),
        ("lightning", "lightning_loop"),
        ("transformers", "trainer_loop"),
    ],
)
def test_example(framework: str, example: str, tmp_path: Path) -> None:
    needs(framework)
    assert_rows_ok(_run(f"examples.integrations.{example}", tmp_path).stdout)


@pytest.mark.parametrize("script", ["test_sync", "test_script", "test_ops"])
def test_accelerates_scripts(script: str, tmp_path: Path) -> None:
    needs("accelerate")
    _run(str(accelerate_script(script, tmp_path)), tmp_path)


@pytest.mark.parametrize("strategy", ["DDPStrategy", "ModelParallelStrategy"])
def test_lightnings_strategies(strategy: str) -> None:
    needs("lightning")
    results = []
    for backend, over in (("gloo", "gloo"), ("fddp", "shm")):
        done = on_two_ranks("-m", "tests.integrations.backend_lightning", strategy, backend)
        assert done.returncode == 0, done.stdout + done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("over ")]
        before, _, result = line.partition(": ")
        assert before == f"over {over}"
        results.append(result)
    assert results[0] == results[1]  # a sum of two ranks has the same bits in both orders
