"""Classes and functions of the package stay small enough to read."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tests.support.rooms import MODULES

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_METHODS, MOST_LINES, MOST_PARAMETERS = 20, 300, 6

# Public signatures that mirror torch's or JAX's, and three that mirror the extension's.
WIDE = {
    *("next_loss_scale", "make_schedule", "measure_cost", "plan_optimal"),
    *("GradSync.__init__", "DistributedDataParallel.__init__"),
    "VirtualSampler.__init__",
    *("make_shm_backend", "ShmBackend.start", "new_executor"),
    "_in_graph",  # of flat constants, which dynamo traces
}
LARGE = {
    "DistributedDataParallel",  # the names of torch's class, which do nothing themselves
    *("Steps", "Engine"),  # each is the one place where steps are executed
}


def is_overload(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "overload" for decorator in function.decorator_list)


def parameters(function: ast.FunctionDef) -> list[str]:
    found = function.args
    names = [one.arg for one in (*found.posonlyargs, *found.args, *found.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def too_large(source: str) -> Iterator[str]:
    """Classes and functions of a module that are over a limit."""
    tree = ast.parse(source)
    owners = {}
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef):
            methods = [item for item in owner.body if isinstance(item, ast.FunctionDef)]
            owners.update(dict.fromkeys(methods, f"{owner.name}."))
            if owner.name in LARGE:
                continue
            if len(methods) > MOST_METHODS:
                yield f"{owner.name} has {len(methods)} methods"
            lines = (owner.end_lineno or 0) - owner.lineno + 1
            if lines > MOST_LINES:
                yield f"{owner.name} has {lines} lines"
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and not is_overload(function):
            name, count = f"{owners.get(function, '')}{function.name}", len(parameters(function))
            if count > MOST_PARAMETERS and name not in WIDE:
                yield f"{name} has {count} parameters"


def test_classes_and_signatures_are_small() -> None:
    found = [
        f"{module}: {problem}"
        for module, path in MODULES.items()
        for problem in too_large(path.read_text())
    ]
    assert found == []


def test_large_ones_are_found() -> None:
    methods = "".join(f"    def f{n}(self): ...\n" for n in range(21))
    assert [*too_large(f"class A:\n{methods}")] == ["A has 21 methods"]
    assert [*too_large("class A:\n" + "    x = 1\n" * 300)] == ["A has 301 lines"]
    wide = "class A:\n    def f(self, a, b, c, d, *, e, f, g): ...\n"
    assert [*too_large(wide)] == ["A.f has 7 parameters"]
    assert [*too_large(wide.replace("    def", "    @overload\n    def"))] == []
