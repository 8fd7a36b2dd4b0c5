"""torch's own tests of groups whose ranks change, over the backend "fddp".

`FAULT_TOLERANCE_TESTS` is the path of the file with these tests, of the version of torch that is
installed; `FAULT_TOLERANCE_CLASS=GlooFaultToleranceTest` runs them over gloo.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.transport.backend.torch_suite import fault_tolerance

_SOURCE = os.environ.get("FAULT_TOLERANCE_TESTS", "")
_CLASS = os.environ.get("FAULT_TOLERANCE_CLASS", fault_tolerance.CLASS)
_FOR_NCCL = 1  # test_reconfigure_after_timeout skips itself over other backends


@pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch 2.14 has added the interface")
@pytest.mark.skipif(
    not _SOURCE, reason="torch's wheel lacks these tests; set FAULT_TOLERANCE_TESTS to their file"
)
@pytest.mark.timeout(1200)
def test_torch_fault_tolerance(tmp_path: Path) -> None:
    done = fault_tolerance.run(Path(_SOURCE), tmp_path, _CLASS)
    assert done.returncode == 0, done.stdout
    names = set(re.findall(r"^    def (test_\w+)\(self\):$", Path(_SOURCE).read_text(), re.M))
    passed = set(re.findall(r"^(test_\w+) .*\.\.\. ok$", done.stdout, re.M))
    assert len(passed) >= 10, done.stdout
    assert len(names - passed) == _FOR_NCCL, (names - passed, done.stdout)


def test_an_edit_that_does_not_apply_is_an_error() -> None:
    source = "".join(edit.old for edit in fault_tolerance.EDITS)
    assert '("fddp", "cpu")' in fault_tolerance.edited(source)
    with pytest.raises(ValueError, match="occurs 0 times in torch's tests"):
        fault_tolerance.edited(source.replace("gloo", "mpi"))
