"""The benchmark of trees of JAX arrays averages the same in all of its ways."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks import jax_trees
from benchmarks.measure import Series

if TYPE_CHECKING:
    from tests.support.ranks import RankPool


def run(rank: int, world_size: int) -> jax_trees.Results:
    return jax_trees.run_rank(rounds=1, sides=(2,), leaves=5)


def test_every_way_is_timed(ranks: RankPool) -> None:
    for results in ranks.run(2, run):
        assert set(results) == {"5 leaves of 2 x 2, shm", "5 leaves of 2 x 2, c10d"}
        for series in results.values():
            assert list(series) == ["tensors", "arrays", "JAX alone", "pmean in jit"]
            assert all(each.median_s > 0 for each in series.values())


def test_figures_are_those_of_the_largest_tree() -> None:
    ways = {"tensors": Series((1.0, 2.0)), "arrays": Series((1.5, 2.0))}
    titles = ["300 leaves of 32 x 32, shm", "300 leaves of 256 x 256, shm"]
    (figure,) = jax_trees.figures(dict.fromkeys(titles, ways))
    assert figure.case == titles[1]
    assert (figure.value, figure.bound) == (pytest.approx(1.25), 1.2)
    assert not figure.reached
