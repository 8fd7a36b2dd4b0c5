"""The page for those who come from DDP or JAX runs as printed, and names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest

import fddp
import fddp.jax
from fddp import hooks, numerics
from tests.support.collectives import OPERATORS
from tests.support.pages import read, run_script

PAGE = "docs/coming_from.md"


@pytest.mark.nightly
def test_the_page_runs_on_two_ranks(tmp_path: Path) -> None:
    run_script(PAGE, tmp_path)


def test_named_objects_exist() -> None:
    named = set(re.findall(r"\bfddp\.([\w.]+)", read(PAGE)))
    places = {"jax.": fddp.jax, "hooks.": hooks, "numerics.": numerics, "": fddp}
    for name in named - {"jax"}:
        prefix = next(p for p in places if name.startswith(p))
        assert hasattr(places[prefix], name.removeprefix(prefix)), name


def test_named_jax_objects_exist() -> None:
    named = set(re.findall(r"\blax\.(\w+)", read(PAGE)))
    assert {"pmean", "psum_scatter", "axis_index"} <= named
    assert not [name for name in named if not hasattr(jax.lax, name)]
    assert hasattr(jax, "shard_map")


def test_methods_of_a_sync_exist() -> None:
    named = set(re.findall(r"\bsync\.(\w+)", read(PAGE)))
    assert {"value_and_grad", "reduce_scatter", "donate"} <= named
    assert not [name for name in named if not hasattr(fddp.GradSync, name)]


def test_every_operator_has_a_row() -> None:
    table = "\n".join(line for line in read(PAGE).splitlines() if line.startswith("| "))
    for name in (*OPERATORS, "as_transform"):
        assert f"`fddp.{name}" in table, name
