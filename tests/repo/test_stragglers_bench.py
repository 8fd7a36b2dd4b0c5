"""The benchmark of stragglers delays what it says, and counts what is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks import stragglers
from benchmarks.stragglers import Case, Outcome

if TYPE_CHECKING:
    from tests.support.ranks import RankPool


def run(rank: int, world_size: int, loop: str) -> list[Outcome]:
    phases = ("communication", "gc")
    return stragglers.run_rank([loop], phases, steps=10, delays_ms=[50])[loop]


@pytest.mark.parametrize(
    "loop",
    ["value_and_grad", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("JAX", "wrapper"))],
)
def test_long_delays_are_named(ranks: RankPool, loop: str) -> None:
    one, *others = ranks.run(3, run, loop)
    assert [found == one for found in others] == [True, True]
    none = Case(stragglers.NONE, 0, -1)
    cases = [none, Case("gc", 50, 1), none, Case("communication", 50, 0)]
    assert [outcome.case for outcome in one] == cases
    for outcome in one:
        assert outcome.is_right or outcome.case == none, outcome


def test_figures_count_the_cases_that_are_named() -> None:
    cases = [Case(p, ms, 0) for p in stragglers.PHASES for ms in stragglers.DELAYS_MS]
    cases.append(Case(stragglers.NONE, 0, -1))
    outcomes = [Outcome(case, n > 2, False, "", 0.1) for n, case in enumerate(cases)]
    (figure,) = stragglers.figures({"wrapper": outcomes, "JAX": outcomes[:4]})
    assert (figure.case, figure.value, figure.bound) == ("wrapper", 18, 19)
    assert not figure.reached
