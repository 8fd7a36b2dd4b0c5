"""Installation, README, DDP beside torch's, groups whose ranks change, and quick tests in pairs of
Python and torch.

`python -m distribution.matrix 3.10:2.11.0 3.13:2.15.0` gives each pair an environment of its own
under `build/matrix`, kept for the next run. Each is built as a user would, by `pip install`. The
output ends with a table; the exit status is 1 if anything failed. A Python that this machine lacks
is left out, and the table says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from distribution import interpreters

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "matrix"
# What the tests import. Those that need more, such as JAX on Python 3.10, are not collected.
TEST_TOOLS = (
    *("pytest", "pytest-timeout", "pytest-xdist", "expecttest", "nbclient", "nbformat"),
    "setuptools",  # torch.utils.cpp_extension
    "scikit-build-core",  # the build backend, which has tests of its own
)
EXTRAS = "demo,jax,examples,testing,viz,watch"
README = ("tests/docs/test_readme.py", "tests/docs/test_pages.py", "-k", "loop_runs or README")
# Calls that depend on torch's version, on processes.
BESIDE_STOCK = ("tests/ddp/test_manual_finalization.py", "tests/ddp/test_arguments.py")
# By torch's interface from torch 2.14 on, and with FAULT_TOLERANCE_TESTS by torch's own tests.
RECONFIGURE = (
    "tests/transport/backend/test_reconfiguration.py",
    "tests/transport/backend/test_fault_tolerance.py",
)
QUICK = ("-m", "quick", "-n", "2", "--dist", "worksteal")


@dataclass
class Row:
    """Result of one pair.

    Attributes:
        python: minor version.
        torch: version.
        results: by step, "passed", "failed" or the reason why it was left out.
        build_s: seconds that `pip install` took, with the compilation of the extension.
    """

    python: str
    torch: str
    results: dict[str, str] = field(default_factory=dict)
    build_s: float = 0.0


STEPS = ("torch", "build", "import", "README", "beside stock", "reconfigure", "quick tests")


def run(row: Row) -> None:
    """Carry out the steps, until one fails that others need."""
    python = interpreters.find(row.python)
    if python is None:
        row.results["torch"] = "no such Python"
        return
    folder = FOLDER / f"py{row.python}-torch{row.torch}"
    inside = interpreters.environment(python, folder)
    pip = [inside, "-m", "pip", "install", "--quiet"]
    if not _step(row, "torch", [*pip, f"torch=={row.torch}", "numpy", *TEST_TOOLS]):
        return
    start = time.monotonic()
    build_folder = f"--config-settings=build-dir={folder}/cmake"
    build = [build_folder, "--editable", f".[{EXTRAS}]", f"torch=={row.torch}"]
    built = _step(row, "build", [*pip, *build])
    row.build_s = time.monotonic() - start
    load = "import fddp; from fddp.native.extension import load; print(load().torch_version)"
    if built and _step(row, "import", [inside, "-c", load]):
        test = [inside, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        _step(row, "README", [*test, *README])
        _step(row, "beside stock", [*test, *BESIDE_STOCK])
        _step(row, "reconfigure", [*test, *RECONFIGURE])
        _step(row, "quick tests", [*test, *QUICK])


def _step(row: Row, name: str, command: list[str]) -> bool:
    print(f"== Python {row.python}, torch {row.torch}: {name}", flush=True)
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables)
    row.results[name] = "passed" if done.returncode == 0 else "failed"
    return done.returncode == 0


def table(rows: list[Row]) -> str:
    head = ["Python", "torch", *STEPS[1:], "build, s"]
    lines = [head]
    for row in rows:
        first = row.results.get("torch", "")
        left_out = "not run" if first == "passed" else first
        results = [row.results.get(step, left_out) for step in STEPS[1:]]
        lines.append([row.python, row.torch, *results, f"{row.build_s:.0f}"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def main(pairs: list[str]) -> int:
    rows = [Row(python, torch) for python, torch in (pair.split(":") for pair in pairs)]
    for row in rows:
        run(row)
    print(table(rows))
    failed = any("failed" in row.results.values() for row in rows)
    found = [row for row in rows if "build" in row.results]
    return int(failed or not found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
