"""The list of mutants follows the code."""

from __future__ import annotations

from tests.mutants.catalogue import MUTANTS


def test_each_mutant_applies() -> None:
    """Its text occurs once in its file, its tests exist, and its name is its own."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert not {mutant.name: problem for mutant in MUTANTS if (problem := mutant.problem())}
