"""Execution of the notebooks, and what they keep of it: `python -m tests.support.notebooks`."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.support.pages import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# matplotlib warns if it takes more than a second to place a legend, as on a busy machine.
SLOW_LEGEND = "ignore:Creating legend with loc"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def executed(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a run in `folder`; an error in any cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    for is_last in (False, True):
        client = NotebookClient(
            notebook,
            timeout=600,
            startup_timeout=150,
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
        )
        try:
            client.execute(env=os.environ | {"PYTHONWARNINGS": SLOW_LEGEND})
            break
        except RuntimeError as error:
            # Another process took a port between its choice and the start of the kernel.
            if is_last or "Kernel didn't respond" not in str(error):
                raise
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = _joined(cell.outputs)
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = None
    return notebook


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Outputs with the parts of a stream, which arrive by time, as one."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        last = joined[-1] if joined else {}
        if "name" in output and last.get("name") == output.name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    for output in joined:
        if "text" in output:  # the file of a cell has another name in each run
            output.text = re.sub(r"/\S*/ipykernel_\d+/\d+\.py", "<cell>", output.text)
    return joined


def kinds(notebook: nbformat.NotebookNode) -> list[list[Any]]:
    """For each code cell the kinds of its outputs: a stream's name, or the formats of a value."""
    return [
        [output.get("name") or sorted(output["data"]) for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def main(names: list[str]) -> None:
    for path in NOTEBOOKS:
        if not names or path.stem in names:
            with tempfile.TemporaryDirectory() as folder:
                nbformat.write(executed(path, Path(folder)), path)


if __name__ == "__main__":
    main(sys.argv[1:])
