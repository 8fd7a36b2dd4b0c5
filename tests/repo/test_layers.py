"""Imports between rooms run one way, and no files import each other; read from the source."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import fddp
from tests.support.rooms import CAPABILITIES, MODULES, ROOMS, room_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# Modules that list public names, and rooms of which users import what `__init__` binds.
NAMES = ("__init__", "__main__", "averaging", "extend", "numerics")
PUBLIC = ("averaging", "errors", "extend", "hooks", "numerics", *CAPABILITIES)
# By package, the rooms that import it.
ONLY_IN = {"optree": {"tree"}}
CORE_IMPORTS_NONE_OF = ("torch", "optree", "jax")
WITHOUT_PROCESS_GROUPS = {"core", "native", "tree"}


def imports(module: str) -> Iterator[str]:
    """Full names of what a module imports, also inside functions and under `TYPE_CHECKING`."""
    return imported_by(ast.parse(MODULES[module].read_text()))


def imported_by(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{ast.unparse(node)} is relative"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes(module: str) -> Iterator[str]:
    """Full names of what a module uses as `fddp.name`."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "fddp":
            yield f"fddp.{node.attr}"


def own_module(name: str) -> str | None:
    """The module of fddp that an imported name is or lies in; `None` for others' names."""
    parts = name.split(".")
    if parts[0] != "fddp":
        return None
    if is_of(name, "fddp._C"):
        return "native.extension"  # which loads it
    while parts[1:] and ".".join(parts[1:]) not in MODULES:
        parts.pop()
    return ".".join(parts[1:]) or "__init__"


def is_of(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that reach each other."""
    reached: dict[str, set[str]] = {}
    for start in edges:
        found, pending = set[str](), [start]
        while pending:
            for target in edges.get(pending.pop(), ()):
                if target not in found:
                    found.add(target)
                    pending.append(target)
        reached[start] = found
    groups = {
        tuple(sorted(other for other in edges if other in reached[m] and m in reached[other]))
        for m in edges
        if m in reached[m]
    }
    return [list(group) for group in sorted(groups)]


def is_public(name: str) -> bool:
    """True for `fddp`, public names of it, and names that a public module binds."""
    _, *parts = name.split(".")
    return not parts or (parts[0] in (*fddp.__all__, *PUBLIC, "__version__") and len(parts) <= 2)


def problem(module: str, name: str) -> str | None:
    """The rule that an import breaks; `None` if it keeps all."""
    room, imported = room_of(module), own_module(name)
    for package, importers in ONLY_IN.items():
        if is_of(name, package) and room not in importers:
            return f"only {', '.join(importers)} may import {package}"
    if room == "core" and any(is_of(name, other) for other in CORE_IMPORTS_NONE_OF):
        return "core imports the standard library and NumPy only"
    if room in WITHOUT_PROCESS_GROUPS and is_of(name, "torch.distributed"):
        return f"{room} knows no process groups"
    if is_of(name, "fddp.integrations") and room not in ("integrations", *NAMES):
        return "frameworks are imported by those who ask for them"
    if imported is None or room in NAMES or room_of(imported) == room:
        return None
    if room in CAPABILITIES:
        return None if is_public(name) else "it is no public name"
    if room_of(imported) not in ROOMS:
        return "only capabilities stand on public names"
    if ROOMS.index(room_of(imported)) > ROOMS.index(room):
        return "it is of a later room"
    return None


def test_every_module_has_a_room() -> None:
    assert {*map(room_of, MODULES)} == {*ROOMS, *CAPABILITIES, *NAMES}


@pytest.mark.slow
def test_imports_run_one_way() -> None:
    broken = [
        f"{module} imports {name}: {rule}"
        for module in MODULES
        for name in (*imports(module), *attributes(module))
        if (rule := problem(module, name))
    ]
    assert broken == []


@pytest.mark.slow
def test_no_circle_of_files() -> None:
    """The list of public names loads capabilities on first use, and has no edges here."""
    edges = {m: {own for name in imports(m) if (own := own_module(name))} - {m} for m in MODULES}
    assert circles({**edges, "__init__": set()}) == []


class WithoutTypes(ast.NodeTransformer):
    """Removes what is imported for types alone."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        return node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else node


@pytest.mark.slow
def test_others_import_types_of_the_extension_alone() -> None:
    """At run time `native/extension.py` loads it, and checks that it fits the installed torch."""
    for module, path in MODULES.items():
        used = imported_by(WithoutTypes().visit(ast.parse(path.read_text())))
        assert not [name for name in used if is_of(name, "fddp._C")], module


@pytest.mark.slow
def test_test_modules_do_not_import_each_other() -> None:
    """They share what is in `tests/support`."""
    tests = Path(__file__).parents[1]
    for path in sorted(tests.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            assert not (name.startswith("tests.") and ".test_" in name), f"{path} imports {name}"


def test_broken_rules_are_found() -> None:
    for module, name in (
        ("core.text", "fddp.errors"),
        ("native.pack", "fddp._C.pack"),
        ("sync.engine", "fddp._C.LeafSet"),
        ("watch.monitor", "fddp"),
        ("watch.monitor", "fddp.GradSync"),
        ("watch.monitor", "fddp.extend.exchange"),
        ("watch.monitor", "fddp.watch.trace.chrome_trace"),
        ("__init__", "fddp.integrations"),
    ):
        assert problem(module, name) is None, (module, name)
    for module, name, rule in (
        ("sync.engine", "optree.tree_map", "only tree may import optree"),
        ("core.plan.plan", "fddp._C.Layout", "it is of a later room"),
        ("watch.monitor", "fddp._C.Layout", "it is no public name"),
        ("core.text", "torch.Tensor", "core imports the standard library"),
        ("tree.pytree", "torch.distributed.init_process_group", "tree knows no process groups"),
        ("cli.main", "fddp.integrations.lightning", "frameworks are imported by"),
        ("sync.engine", "fddp.GradSync", "only capabilities stand on public names"),
        ("sync.engine", "fddp.watch.Monitor", "only capabilities stand on public names"),
        ("core.text", "fddp.sync.engine.Engine", "it is of a later room"),
        ("watch.monitor", "fddp.sync.grad_sync.GradSync", "it is no public name"),
        ("watch.monitor", "fddp.core", "it is no public name"),
        ("viz.ranks", "fddp.watch.trace.chrome_trace", "it is no public name"),
    ):
        assert rule in str(problem(module, name)), (module, name)


def test_circles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert circles(edges) == [["b", "c"]]
