"""torch's own tests of groups whose ranks change, edited to run over the backend "fddp".

torch's wheel lacks them. They are test/distributed/test_c10d_fault_tolerance.py of its source.
"""

from __future__ import annotations

import ast
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch.distributed as dist

RANKS = 3  # for which the tests are written


class Edit(NamedTuple):
    """A text of the file, which occurs once, and the one in its place."""

    old: str
    new: str
    reason: str


EDITS = (
    Edit(
        '    ("gloo", "cpu"),\n',
        '    ("gloo", "cpu"),\n    ("fddp", "cpu"),\n',
        "The list of backends that are tested.",
    ),
)


def names_of_tests(source: str) -> list[str]:
    """The names of the tests in this source that run over each backend."""
    owner = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "AbstractFaultToleranceTest"
    )
    names = [child.name for child in owner.body if isinstance(child, ast.FunctionDef)]
    return [name for name in names if name.startswith("test_")]


def edited(source: str) -> str:
    """Return the source of the tests with these edits.

    Raises:
        ValueError: it does not have a text that is edited exactly once.
    """
    for edit in EDITS:
        if source.count(edit.old) != 1:
            raise ValueError(f"{edit.old!r} occurs {source.count(edit.old)} times in torch's tests")
        source = source.replace(edit.old, edit.new)
    return source


def run(rank: int, world_size: int, name: str, backend: str, path: str, folder: str) -> str:
    """Run a test on a rank, in a default group of its own.

    Args:
        name: of the test method.
        backend: of the group.
        path: of torch's file.
        folder: empty, the same on all ranks, and used by no other test.

    Returns:
        "passed", or the reason for which torch skips the test.
    """
    dist.destroy_process_group()
    module = ModuleType("torch_fault_tolerance")
    exec(compile(edited(Path(path).read_text()), path, "exec"), vars(module))
    case: Any = getattr(module, f"{backend.capitalize()}FaultToleranceTest")(name)
    case.rank, case.file_name = rank, str(Path(folder) / "store")
    try:
        getattr(case, name)()
    except unittest.SkipTest as skip:
        return str(skip)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return "passed"
