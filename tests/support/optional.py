"""Tests of libraries that are not installed, such as JAX on Python 3.10, are not collected.

A file belongs to the libraries that it imports at its top, directly or through `tests.support` and
other modules of the tests. Doctests of `fddp.jax` belong to JAX. A line of the report has their
number.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Those without which the rest is tested.
LIBRARIES = ("equinox", "flax", "jax", "optax", "sphinx")

_left_out: list[Path] = []


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.suffix == ".py" and _missing(collection_path):
        _left_out.append(collection_path)
        return True
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _left_out:
        names = ", ".join(sorted({name for path in _left_out for name in _missing(path)}))
        terminalreporter.write_line(f"{len(_left_out)} files need {names}, not installed")


@cache
def _missing(path: Path) -> frozenset[str]:
    """Optional libraries that are not installed and that a file imports."""
    absent = {name for name in LIBRARIES if find_spec(name) is None}
    if not absent:
        return frozenset()
    found, seen, pending = set[str](), {path}, [path]
    while pending:
        for name in _imported(pending.pop()):
            top, place = name.partition(".")[0], ROOT.joinpath(*name.split("."))
            if top in absent:
                found.add(top)
            elif top in ("examples", "tests"):
                modules = {place.with_suffix(".py"), place / "__init__.py"} - seen
                pending += [module for module in modules if module.is_file()]
                seen |= modules
            elif name.startswith("fddp.jax"):
                found |= absent & {"jax"}
    if path.is_relative_to(ROOT / "fddp" / "jax"):  # whose package imports it
        found |= absent & {"jax"}
    return frozenset(found)


def _imported(path: Path) -> list[str]:
    names = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names
