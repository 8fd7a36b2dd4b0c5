"""The notebooks run from top to bottom, and are kept with the kinds of outputs that a run gives."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.support.notebooks import METADATA, NOTEBOOKS, executed, kinds

LARGEST_BYTES = 200_000  # of a figure


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def test_notebooks_are_found() -> None:
    names = [path.stem for path in NOTEBOOKS]
    assert names == [
        "01_bucket_plans",
        "02_schedules",
        "03_simulate_and_tune",
        "04_training_loop",
        "05_torch_func",
        "06_jax",
        "07_literature",
        "08_few_bytes",
    ]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = executed(path, tmp_path)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert outputs
    warned = [output.text for output in outputs if output.get("name") == "stderr"]
    assert not warned
    assert kinds(notebook) == kinds(read(path)), "run: python -m tests.support.notebooks"
    left = {path.name for path in tmp_path.iterdir()} - {".hypothesis"}  # which git ignores
    assert not left


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_with_small_outputs(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert dict(notebook.metadata) == METADATA
    for number, cell in enumerate(notebook.cells):
        assert cell.id == f"cell-{number:02d}", "cells are numbered, so that ids do not change"
        assert cell.metadata == {}
        if cell.cell_type == "code":
            assert cell.execution_count is None
            for output in cell.outputs:
                assert output.output_type != "error"
                assert len(str(output)) < LARGEST_BYTES
    assert any(kinds(notebook)), "run: python -m tests.support.notebooks"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_links_resolve(path: Path) -> None:
    for cell in read(path).cells:
        for target in cell.source.split("](")[1:]:
            file = target.partition(")")[0]
            if cell.cell_type == "markdown" and "://" not in file:
                assert (path.parent / file).exists(), f"{path.name} links to {file}"
