"""The tests of process groups that torch ships, found in its source without importing it."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

_PATH = Path(torch.__path__[0]) / "testing/_internal/distributed/distributed_test.py"
_CLASS = "_DistTestBase"


def torch_tests() -> list[str]:
    """The names of all test methods of the class that torch runs over each backend."""
    tree = ast.parse(_PATH.read_text())
    owner = next(
        node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == _CLASS
    )
    return [
        child.name
        for child in owner.body
        if isinstance(child, ast.FunctionDef) and child.name.startswith("test_")
    ]
