"""Rooms of the package, which are its folders, and the modules in them."""

from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "fddp"

# Each may import those before it. The folders of the package are these rooms and capabilities.
ROOMS = (
    *("errors", "core", "native", "tree", "telemetry", "transport", "hooks", "runtime"),
    *("collectives", "sync", "ddp"),
)
# Rooms that import what users may import.
CAPABILITIES = (*("periodic", "watch", "jax", "testing", "viz", "cli", "integrations"),)
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def room_of(module: str) -> str:
    return module.split(".")[0]
