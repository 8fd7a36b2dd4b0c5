"""Loops that keep replicas equal pass, and mutants of them don't; `mutants.py` judges all."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.testing.replication.loops import Loop, loops
from tests.testing.replication.mutants import judge, main, mutants

EVERY = 9  # mutants


@pytest.mark.slow
@pytest.mark.parametrize("loop", loops(), ids=lambda loop: loop.fn.__name__)
def test_loops_keep_replicas_equal(loop: Loop) -> None:
    assert judge(loop).text == ""


@pytest.mark.slow
def test_most_mutants_are_caught_with_their_line() -> None:
    judged = [(m, judge(m.loop)) for m in islice(mutants(), 0, None, EVERY)]
    missed = [(m.name, m.fault) for m, v in judged if v.is_valid and not (v.text and v.line)]
    assert len(judged) >= 20
    assert len(missed) <= 1, missed


@pytest.mark.nightly
def test_all_mutants() -> None:
    assert main() == 0
