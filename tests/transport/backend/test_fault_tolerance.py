"""torch's own tests of groups whose ranks change, over the backend "fddp".

`FAULT_TOLERANCE_TESTS` is the path of the file with these tests, of the version of torch that is
installed. `TORCH_TESTS_BACKEND=gloo` runs them over gloo.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.ranks import RankPool
from tests.transport.backend.torch_suite.fault_tolerance import (
    EDITS,
    RANKS,
    edited,
    names_of_tests,
    run,
)

_BACKEND = os.environ.get("TORCH_TESTS_BACKEND", "fddp")
_PATH = os.environ.get("FAULT_TOLERANCE_TESTS", "")
_NAMES = names_of_tests(Path(_PATH).read_text()) if _PATH else ["none"]


@pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch 2.14 has added the interface")
@pytest.mark.skipif(
    not _PATH, reason="torch's wheel lacks these tests: set FAULT_TOLERANCE_TESTS to their file"
)
@pytest.mark.parametrize("name", _NAMES)
def test_torch_fault_tolerance(name: str, own_ranks: RankPool, tmp_path: Path) -> None:
    outcomes = own_ranks.run(RANKS, run, name, _BACKEND, _PATH, str(tmp_path))
    skips = [outcome for outcome in outcomes if outcome != "passed"]
    if skips:
        pytest.skip(skips[0])


def test_an_edit_that_does_not_apply_is_an_error() -> None:
    source = "".join(edit.old for edit in EDITS)
    assert '("fddp", "cpu")' in edited(source)
    with pytest.raises(ValueError, match="occurs 0 times in torch's tests"):
        edited(source.replace("gloo", "mpi"))
