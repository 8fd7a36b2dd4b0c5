"""Frameworks whose ranks have different numbers of batches. Run by `make integrations`."""

from __future__ import annotations

import re

import pytest

from tests.support.frameworks import needs, on_two_ranks

pytestmark = pytest.mark.slow

PROGRAMS = {
    "accelerate": ("uneven_accelerate", 7),
    "lightning": ("uneven_lightning", 4),
    "transformers": ("uneven_trainer", 10),
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
