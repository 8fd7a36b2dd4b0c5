"""Training in JAX, and in torch and JAX at once: what one process does, and no mistake hides."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from examples.common import Report
from tests.support.pages import run_script

if TYPE_CHECKING:
    from tests.support.ranks import RankPool

NAMES = (pytest.param("jax_digits", marks=pytest.mark.nightly), "mixed")


def run(rank: int, world_size: int, name: str, options: dict[str, Any]) -> Report:
    report: Report = importlib.import_module(f"examples.{name}").example(**options)
    return report


def uniform(batch: Any) -> float:
    """Each rank counts the same, however many images it has."""
    return 1.0


@pytest.mark.parametrize("name", NAMES)
def test_ranks_match_one_process(ranks: RankPool, name: str) -> None:
    for report in ranks.run(2, run, name, {"epochs": 1}):
        assert report.passed, report.checks
        assert len(report.checks) >= 2


@pytest.mark.nightly
def test_torch_on_several_ranks_and_jax_on_one(ranks: RankPool) -> None:
    for report in ranks.run(3, run, "mixed", {"epochs": 1}):
        assert report.passed, report.checks
        assert ("libraries", "torch, JAX, torch", "over shm") in report.rows


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_weight_fails_the_checks(ranks: RankPool, name: str) -> None:
    for report in ranks.run(2, run, name, {"weight_of": uniform, "epochs": 1}):
        failed = [name for name, check in report.checks.items() if not check.passed]
        assert failed == ["parameters, from one process"], report.checks


@pytest.mark.nightly  # XLA compiles for most of a minute; tests/jax has each of its parts
def test_the_page_on_jax(tmp_path: Path) -> None:
    run_script("docs/jax.md", tmp_path)
