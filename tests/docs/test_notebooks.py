"""The notebooks run from top to bottom, and are kept with the kinds of outputs that a run gives."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from tests.support.notebooks import METADATA, NOTEBOOKS, executed, kinds

LARGEST_BYTES = 200_000  # of a figure


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def run_by_nightly(path: Path) -> object:
    """All but one, which is the sample in `make test`."""
    marks = [] if path.stem == "02_schedules" else [pytest.mark.nightly]
    return pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", [*map(run_by_nightly, NOTEBOOKS)])
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = executed(path, tmp_path)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert outputs
    warned = [output.text for output in outputs if output.get("name") == "stderr"]
    assert not warned
    assert kinds(notebook) == kinds(read(path)), "run: python -m tests.support.notebooks"
    left = {path.name for path in tmp_path.iterdir()} - {".hypothesis"}  # which git ignores
    assert not left


def test_notebooks_are_found() -> None:
    """Numbered from 1 without gaps."""
    numbers = [int(path.stem.partition("_")[0]) for path in NOTEBOOKS]
    assert numbers == [*range(1, len(NOTEBOOKS) + 1)]
    assert len(numbers) >= 8


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_with_small_outputs_and_links_that_resolve(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert dict(notebook.metadata) == METADATA
    prose = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for file in re.findall(r"\]\(([^)]*)\)", prose):
        assert "://" in file or (path.parent / file).exists(), f"{path.name} links to {file}"
    for number, cell in enumerate(notebook.cells):
        assert cell.id == f"cell-{number:02d}", "cells are numbered, so that ids do not change"
        assert cell.metadata == {}
        if cell.cell_type == "code":
            assert cell.execution_count is None
            for output in cell.outputs:
                assert output.output_type != "error"
                assert len(str(output)) < LARGEST_BYTES
    assert any(kinds(notebook)), "run: python -m tests.support.notebooks"


RAW = re.compile(r"\b\w+=(?:\d+\.\d{6,}|\d[\d.]*e[+-]?\d+)")


def test_the_pattern_of_raw_reprs() -> None:
    assert RAW.search("Sample(nbytes=4, time_s=3.87e-05)")
    assert RAW.search("CostModel(overlap=0.3799709803504337)")
    assert not RAW.search("BucketPlan(cap_mb=1.5, leaves=3)")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_have_no_raw_reprs(path: Path) -> None:
    """Numbers of values that are shown have few digits, and a unit."""
    for cell in read(path).cells:
        for output in cell.get("outputs", []):
            shown = output.get("text", "") or output.get("data", {}).get("text/plain", "")
            assert not RAW.search(shown), shown
