"""The tests of DistributedDataParallel that torch ships, found in its source.

The source is read, not imported: importing takes seconds, and happens on ranks only.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path(torch.__path__[0]) / "testing" / "_internal" / "distributed"
_PACKAGE = "torch.testing._internal.distributed"
_WITH_RPC = f"{_PACKAGE}.ddp_under_dist_autograd_test"
_WRAPPER = "DistributedDataParallel"
_RANKS = 2
# Where the class says it, and no decorator.
_RANKS_OF_CLASS = {
    "DdpUnderDistAutogradTest": 6,
    "DdpComparisonTest": 4,
    "CudaDdpComparisonTest": 4,
    "RpcTest": 4,
}
_RANK_DECORATORS = {"skip_if_lt_x_gpu", "require_world_size"}


class TorchTest(NamedTuple):
    """One test method."""

    module: str
    owner: str  # the class, dotted where it is nested
    name: str
    world_size: int
    commented_out: str | None  # source; torch keeps some tests in a string literal

    @property
    def pool(self) -> str:
        """Tests for which this is the same can run in the same processes, one after the other.

        An RPC agent knows its number of ranks; references to wrappers on other ranks may outlive
        the test that made them.
        """
        if self.module != _WITH_RPC:
            return ""
        return self.name if self.owner == "DdpUnderDistAutogradTest" else "RPC"


def torch_tests() -> list[TorchTest]:
    """Every test that makes a DistributedDataParallel, itself or through what it calls."""
    return [
        test
        for path in _paths()
        if _WRAPPER in (source := path.read_text())
        for test in _tests_of(_module_name(path), source)
    ]


def through_functions(functions: set[str]) -> set[str]:
    """The names of tests that are among `functions`, or call one of them."""
    return {
        function.name
        for path in _paths()
        for _, function, _ in _methods(ast.parse(path.read_text()), "")
        if function.name.startswith("test_")
        if function.name in functions or functions & {*_names(function)}
    }


def wrapper_test_names() -> set[str]:
    """The names of tests that have the wrapper in them."""
    pattern = re.compile(r"def (test_\w*(?:ddp|DDP|DistributedDataParallel)\w*)\(")
    return {name for path in _paths() for name in pattern.findall(path.read_text())}


def _paths() -> list[Path]:
    return sorted(_ROOT.rglob("*.py"))


def _module_name(path: Path) -> str:
    return ".".join([_PACKAGE, *path.relative_to(_ROOT).with_suffix("").parts])


def _tests_of(module: str, source: str) -> Iterator[TorchTest]:
    tree = ast.parse(source)
    makers = _makers(tree)
    for owner, function, literal in _methods(tree, ""):
        if function.name.startswith("test_") and (function.name in makers or literal):
            yield TorchTest(module, owner, function.name, _ranks(owner, function), literal)


def _methods(
    node: ast.Module | ast.ClassDef, owner: str
) -> Iterator[tuple[str, ast.FunctionDef, str | None]]:
    """Each method below `node`, with its class, and the string literal it was found in."""
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from _methods(child, f"{owner}.{child.name}".lstrip("."))
        elif isinstance(child, ast.FunctionDef) and owner:
            yield owner, child, None
        elif (literal := _code_in_string(child)) and owner:
            for function in ast.parse(literal).body:
                if isinstance(function, ast.FunctionDef):
                    yield owner, function, literal


def _code_in_string(node: ast.stmt) -> str | None:
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return None
    text = node.value.value
    if not (isinstance(text, str) and "def test_" in text):
        return None
    # The literal opens at the indent of the class body, its first line may not be code.
    return textwrap.dedent(text[text.index("\n") + 1 :])


def _makers(tree: ast.Module) -> set[str]:
    """Names of functions and classes that name the wrapper, or one that does."""
    names_in: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) or _is_helper(node):
            names_in.setdefault(node.name, set()).update(_names(node))
    makers = {_WRAPPER}
    while True:
        more = {name for name, used in names_in.items() if used & makers} - makers
        if not more:
            return makers
        makers |= more


def _is_helper(node: ast.AST) -> TypeGuard[ast.ClassDef]:
    """Return True for a class without tests of its own."""
    return isinstance(node, ast.ClassDef) and not any(
        isinstance(child, ast.FunctionDef) and child.name.startswith("test_")
        for child in ast.walk(node)
    )


def _names(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            yield child.id
        elif isinstance(child, ast.Attribute):
            yield child.attr


def _ranks(owner: str, function: ast.FunctionDef) -> int:
    asked = [
        decorator.args[0].value
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Name)
        and decorator.func.id in _RANK_DECORATORS
        and isinstance(decorator.args[0], ast.Constant)
    ]
    return max([_RANKS_OF_CLASS.get(owner, _RANKS), *asked])
