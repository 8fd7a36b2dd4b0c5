"""Frameworks with fddp: the examples, and Accelerate's own scripts. Run by `make integrations`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.frameworks import accelerate_script, assert_rows_ok, needs, on_two_ranks
from tests.support.pages import ROOT

pytestmark = pytest.mark.slow

EXAMPLES = {
    "accelerate_loop": "accelerate",
    "ignite_loop": "ignite",
    "lightning_loop": "lightning",
    "trainer_loop": "transformers",
}
SCRIPTS = ("test_sync", "test_script", "test_ops", "test_ddp_comm_hook")

# Runs a script with torch's class or with fddp's.
_SWAPPED = """
import runpy, sys
from fddp.integrations import install
if sys.argv.pop(1) == "fddp":
    install()
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_every_example_is_here() -> None:
    found = {path.stem for path in (ROOT / "examples" / "integrations").glob("*_loop.py")}
    assert found == EXAMPLES.keys()


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example: str) -> None:
    needs(EXAMPLES[example])
    done = on_two_ranks("-m", f"examples.integrations.{example}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_rows_ok(done.stdout)


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_stock_passes_in_accelerates_scripts(script: str, tmp_path: Path) -> None:
    needs("accelerate")
    copy = accelerate_script(script, tmp_path)
    runner = tmp_path / "swapped.py"
    runner.write_text(_SWAPPED)
    stock, ours = (on_two_ranks(str(runner), kind, str(copy)) for kind in ("stock", "fddp"))
    assert "is now fddp's" in ours.stderr
    assert ours.returncode == 0, ours.stdout + ours.stderr
    if stock.returncode != 0:
        assert script == "test_ddp_comm_hook"  # its bf16 hook needs a GPU
        assert "BF16 all reduce communication hook required" in stock.stderr


# Ranks with different numbers of batches

PROGRAMS = {
    "accelerate": ("uneven_accelerate", 18),
    "lightning": ("uneven_lightning", 8),
    "transformers": ("uneven_trainer", 18),
}


@pytest.mark.parametrize("framework", PROGRAMS)
def test_parameters_of_one_process(framework: str) -> None:
    needs(framework)
    program, number = PROGRAMS[framework]
    done = on_two_ranks("-m", f"tests.integrations.{program}")
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(re.findall(r"case (.*): (\S+e[+-]\d\d)", done.stdout))
    assert len(found) == number, done.stdout
    assert {name: value for name, value in found.items() if float(value) > 1e-12} == {}
