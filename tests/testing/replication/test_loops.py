"""Loops that keep replicas equal pass, and mutants of them don't; `mutants.py` judges all."""

from __future__ import annotations

import inspect
from itertools import islice

import pytest

from tests.testing.replication.loops import Loop, loops
from tests.testing.replication.loops.inputs import EVEN
from tests.testing.replication.mutants import judge, judge_beside, judged, main, mutants
from tests.testing.replication.truth import unlike_one_device

LOOPS = loops()
SOME_LOOPS = LOOPS[::6]
EVERY = 61  # mutants


@pytest.mark.slow
@pytest.mark.parametrize("loop", SOME_LOOPS, ids=str)
def test_loops_keep_replicas_equal(loop: Loop) -> None:
    assert bool(judge(loop).text) == bool(loop.alarm)


@pytest.mark.slow
@pytest.mark.parametrize("loop", SOME_LOOPS, ids=str)
def test_loops_do_on_ranks_what_they_do_on_one_device(loop: Loop) -> None:
    assert_alike(loop)


@pytest.mark.nightly
@pytest.mark.parametrize("loop", LOOPS, ids=str)
def test_all_loops_do_on_ranks_what_they_do_on_one_device(loop: Loop) -> None:
    assert_alike(loop)


def assert_alike(loop: Loop) -> None:
    """Compare ranks with one device, unless there is a reason why they are not alike."""
    batch = tuple(v(0) if inspect.isroutine(v) else v for v in loop.varying)
    if loop.is_forward:
        return
    if not loop.unlike:
        for ranks in (2, 3):
            assert unlike_one_device(loop.fn, loop.replicated, batch, ranks) == ""
    elif loop.unlike in EVEN:
        assert unlike_one_device(loop.fn, loop.replicated, batch, 2, is_even=True) == ""


@pytest.mark.nightly
@pytest.mark.parametrize("loop", LOOPS, ids=str)
def test_loops_pass_check_equivalence(loop: Loop) -> None:
    assert_passes(loop)


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS[5::20], ids=str)
def test_some_loops_pass_check_equivalence(loop: Loop) -> None:
    assert_passes(loop)


def assert_passes(loop: Loop) -> None:
    """Check that ranks do what one device does, unless there is a reason why not."""
    verdict = judge_beside(loop)
    assert verdict is None or verdict.text == ""


def test_loops_are_many() -> None:
    assert len({loop.fn.__code__ for loop in LOOPS}) >= 100


@pytest.mark.slow
def test_wrong_mutants_are_caught_with_plain_values() -> None:
    found = [judged(mutant) for mutant in islice(mutants(), 0, None, EVERY)]
    wrong = [one for one in found if one.truth.is_wrong]
    missed = [(one.mutant.name, one.mutant.fault) for one in wrong if not one.is_caught]
    assert len(wrong) >= 8
    assert len(missed) <= 1, missed
    assert not [one.mutant.name for one in found if one.is_refused]


@pytest.mark.nightly
def test_all_mutants() -> None:
    assert main() == 0
