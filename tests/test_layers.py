"""Imports run one way, core <- edge <- shell, as read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fddp"

LAYERS = {
    "core": """
        control errors expect leafspec plan plan_text reducer scaling schedule timeline
    """,
    "edge": """
        arrays ext layout leaves pack pack_foreach pack_reference planning tree
    """,
    "shell": """
        __init__ __main__ agree backward bench buffers cli collectives contributions demo info
        inputs program session sparse sync uneven value_and_grad
        transports transports.base transports.c10d transports.loopback transports.rollcall
    """,
}
LAYER_OF = {module: layer for layer, names in LAYERS.items() for module in names.split()}
ORDER = ("core", "edge", "shell")

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imports(module: str) -> Iterator[str]:
    """Full names of what a module imports, anywhere in it."""
    path = MODULES[module]
    package = ["fddp", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def own_module(name: str) -> str | None:
    """The module of fddp that an imported name is or lies in; `None` for others' names."""
    parts = name.split(".")
    if parts[0] != "fddp":
        return None
    while parts[1:] and ".".join(parts[1:]) not in MODULES:
        parts.pop()
    return ".".join(parts[1:]) or "__init__"


def is_of(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_every_module_has_a_layer() -> None:
    assert sorted(set(MODULES) - set(LAYER_OF)) == [], "add these to LAYERS"


@pytest.mark.parametrize("module", sorted(set(MODULES) & set(LAYER_OF)))
def test_imports_run_one_way(module: str) -> None:
    layer = LAYER_OF[module]
    for name in imports(module):
        imported = own_module(name)
        if name == "fddp._C" or is_of(name, "fddp._C"):
            assert module == "ext", f"{module} imports {name}; only ext may"
        elif imported is not None:
            above = ORDER.index(LAYER_OF[imported]) > ORDER.index(layer)
            assert not above, f"{module} ({layer}) imports {name} ({LAYER_OF[imported]})"
        if layer == "core":
            outside = [package for package in ("torch", "optree", "jax") if is_of(name, package)]
            assert not outside, f"{module} is core and imports {name}"
        if layer != "shell":
            assert not is_of(name, "torch.distributed"), f"{module} ({layer}) imports {name}"
