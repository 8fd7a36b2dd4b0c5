"""Classes and functions of the package stay small enough to read."""

from __future__ import annotations

import ast

import pytest

from tests.support.rooms import MODULES

MOST_METHODS, MOST_LINES, MOST_PARAMETERS = 20, 300, 6

# Public signatures that mirror torch's or JAX's, and two that mirror the extension's.
WIDE = {
    *("next_loss_scale", "make_schedule", "measure_cost", "plan_optimal"),
    *("GradSync.__init__", "DistributedDataParallel.__init__"),
    *("PeriodicSync.__init__", "VirtualSampler.__init__"),
    *("make_shm_group", "ShmGroup.start"),
    "_in_graph",  # of flat constants, which dynamo traces
}


def is_overload(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "overload" for decorator in function.decorator_list)


def parameters(function: ast.FunctionDef) -> list[str]:
    found = function.args
    names = [one.arg for one in (*found.posonlyargs, *found.args, *found.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


@pytest.mark.parametrize("module", MODULES)
def test_classes_and_signatures_are_small(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text())
    owners = {}
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef):
            methods = [item for item in owner.body if isinstance(item, ast.FunctionDef)]
            owners.update(dict.fromkeys(methods, f"{owner.name}."))
            assert len(methods) <= MOST_METHODS, owner.name
            assert (owner.end_lineno or 0) - owner.lineno < MOST_LINES, owner.name
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and not is_overload(function):
            name = f"{owners.get(function, '')}{function.name}"
            assert name in WIDE or len(parameters(function)) <= MOST_PARAMETERS, name
