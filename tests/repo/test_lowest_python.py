"""The code runs on the lowest Python that the package allows.

`make lint` has ruff find newer syntax and vermin find newer modules, names and parameters of the
standard library. What neither of them knows is found here.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("fddp", "tests", "benchmarks", "distribution", "examples")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

# They have no other base before Python 3.11.
RECORDS = ("typing.TypedDict", "typing.NamedTuple")


def lowest() -> str:
    (found,) = re.findall(r'^requires-python = ">=(3\.\d+)"$', text("pyproject.toml"), re.MULTILINE)
    return str(found)


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def generic_records(tree: ast.Module) -> list[str]:
    """Names of the classes that derive from a record of `typing` and from `Generic`."""
    full_names = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names = [ast.unparse(base).partition("[")[0] for base in node.bases]
            bases = {full_names.get(name, name) for name in names}
            if "typing.Generic" in bases and bases.intersection(RECORDS):
                found.append(node.name)
    return found


def test_tools_check_the_version_that_the_package_promises() -> None:
    version, project = lowest(), text("pyproject.toml")
    assert f'target-version = "py{version.replace(".", "")}"' in project
    assert f'python_version = "{version}"' in project
    assert f"vermin --target={version}-" in text("Makefile")


@pytest.mark.nightly
@pytest.mark.slow
def test_no_newer_features() -> None:
    minor = int(lowest().partition(".")[2])
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source, str(path), feature_version=(3, minor))
        found = generic_records(tree) if "Generic" in source else []
        assert found == [], f"{path}: import TypedDict of typing_extensions"


def test_generic_records_are_found() -> None:
    for source, found in {
        "from typing import Generic, TypedDict\nclass A(TypedDict, Generic[S]): x: S": ["A"],
        "import typing\nclass A(typing.NamedTuple, typing.Generic[S]): x: S": ["A"],
        "from typing import TypedDict as T, Generic\nclass A(T, Generic[S]): x: S": ["A"],
        "from typing import Generic\nclass A(Generic[S]): x: S": [],
        "from typing import TypedDict\nclass A(TypedDict): x: int": [],
        "from typing_extensions import TypedDict\nclass A(TypedDict, Generic[S]): x: S": [],
    }.items():
        assert generic_records(ast.parse(source)) == found, source
