"""torch's own tests of groups whose ranks change, edited to run over the backend "fddp".

torch's wheel lacks them. They are test/distributed/test_c10d_fault_tolerance.py of its source.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

CLASS = "FddpFaultToleranceTest"
_ROOT = Path(__file__).resolve().parents[4]


class Edit(NamedTuple):
    """A text of the file, which occurs once, and the one in its place."""

    old: str
    new: str
    reason: str


EDITS = (
    Edit(
        "import torch.distributed as dist\n\n",
        "import torch.distributed as dist\nimport fddp\n\n",
        "Registers the backend, also in the processes that the tests start.",
    ),
    Edit(
        '    ("gloo", "cpu"),\n',
        '    ("gloo", "cpu"),\n    ("fddp", "cpu"),\n',
        "The list of backends that are tested.",
    ),
)


def edited(source: str) -> str:
    """Return the source of the tests with these edits.

    Raises:
        ValueError: it does not have a text that is edited exactly once.
    """
    for edit in EDITS:
        if source.count(edit.old) != 1:
            raise ValueError(f"{edit.old!r} occurs {source.count(edit.old)} times in torch's tests")
        source = source.replace(edit.old, edit.new)
    return source


def run(source: Path, folder: Path, cases: str = CLASS) -> subprocess.CompletedProcess[str]:
    """Run the tests of the class `cases` of this file of torch; a copy is written to `folder`."""
    copy = folder / source.name
    copy.write_text(edited(source.read_text()))
    variables = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(copy), "-v", cases],
        cwd=folder,
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
