"""Private names of torch: each in one file `torch_private.py`, and in the table of the docs."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from tests.support.pages import read
from tests.support.rooms import MODULES

if TYPE_CHECKING:
    from collections.abc import Iterator

PRIVATE = re.compile(r"torch(\.\w+)*\._(?!_)\w+(\.\w+)*")


def private_names(text: str) -> set[str]:
    """Private names of torch that a file imports or uses, by their full names."""
    tree = ast.parse(text)
    bound = {"torch": "torch"}
    imported = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names = {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            bound |= names
            imported += names.values()
    found = {name for name in (*imported, *_used(tree, bound)) if PRIVATE.fullmatch(name)}
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def _used(tree: ast.AST, bound: dict[str, str]) -> Iterator[str]:
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            first, _, rest = ast.unparse(node).partition(".")
            yield f"{bound.get(first, '')}.{rest}"


@pytest.mark.slow
def test_each_is_in_one_file_for_them() -> None:
    used = {
        module: names
        for module, path in MODULES.items()
        if (names := private_names(path.read_text()))
    }
    assert {module.rpartition(".")[2] for module in used} == {"torch_private"}
    assert sum(map(len, used.values())) == len(set().union(*used.values()))


def test_cuda_is_not_named() -> None:
    assert not [module for module, path in MODULES.items() if "torch.cuda" in path.read_text()]


@pytest.mark.slow
def test_the_table_of_the_docs_names_them() -> None:
    lines = read("docs/dependencies.md").splitlines()
    rows = [line.split("|") for line in lines if "torch_private.py`" in line]
    listed = [name for row in rows for name in re.findall(r"`(torch[.\w]+)`", row[1])]
    used = set().union(*(private_names(path.read_text()) for path in MODULES.values()))
    assert sorted(listed) == sorted(used)


def test_they_are_found() -> None:
    lines = (
        "import torch, torch.distributed as dist",
        "from torch._guards import A",
        "torch._C.f(1); dist.Backend._plugins; torch.__version__; self._own; torch.nn",
    )
    found = {"torch._guards.A", "torch._C.f", "torch.distributed.Backend._plugins"}
    assert private_names("\n".join(lines)) == found
