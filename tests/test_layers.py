"""Imports run one way, core <- edge <- shell, as read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fddp"

# A package stands for the modules in it.
LAYERS = {
    "core": """
        build check containers control cost errors expect flight_log heard leafspec loss_scale
        methods monitor_report optimal options parting peaks phases plan plan_text reading reducer
        ride scaling schedule schedule_text sides simulate spikes stragglers tables timeline
        topology traces
    """,
    "edge": """
        arrays digests ext jax_nodes known_trees layout leaves native_ops nonfinite pack
        pack_foreach pack_reference planning shards traced_trees tree untraced
    """,
    "shell": """
        __init__ __main__ agree averaging backward bench buffers cli collectives commands
        contributions ddp demo donating engine examples exporters failures flight
        flight_dumps functionalize held hooks info inputs interop judging launch measuring
        meshes monitor observe passing program progress rebuilding reconcile replicas
        request results session setting sparse step_memory sync terms_text testing transforms
        transports tuning uneven value_and_grad viz waiting
    """,
}
LAYER_OF_LISTED = {module: layer for layer, names in LAYERS.items() for module in names.split()}
ORDER = ("core", "edge", "shell")

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def layer_of(module: str) -> str | None:
    return LAYER_OF_LISTED.get(module.split(".")[0])


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
    assert [module for module in MODULES if layer_of(module) is None] == [], "add to LAYERS"


@pytest.mark.parametrize("module", [*filter(layer_of, MODULES)])
def test_imports_run_one_way(module: str) -> None:
    layer = layer_of(module)
    assert layer is not None
    for name in imports(module):
        imported = own_module(name)
        if is_of(name, "fddp._C"):
            assert module == "ext", f"{module} imports {name}; only ext may"
        elif imported is not None:
            imported_layer = layer_of(imported)
            assert imported_layer is not None, f"add {imported} to LAYERS"
            above = ORDER.index(imported_layer) > ORDER.index(layer)
            assert not above, f"{module} ({layer}) imports {name} ({imported_layer})"
        if layer == "core":
            outside = [package for package in ("torch", "optree", "jax") if is_of(name, package)]
            assert not outside, f"{module} is core and imports {name}"
        if layer != "shell":
            assert not is_of(name, "torch.distributed"), f"{module} ({layer}) imports {name}"
