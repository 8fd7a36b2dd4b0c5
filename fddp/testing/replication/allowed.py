"""Names that a caller of `check_replication` allows."""

from __future__ import annotations

from collections.abc import Sequence

GROWTH, REPEATS = "growth", "repeats"


def is_allowed(path: str, allow: Sequence[str]) -> bool:
    """Return True for the path of a leaf that is allowed, or of one below such a tree.

    >>> is_allowed("result['hook.residual']", ["result['hook']"])
    True
    """
    trees = [(f"{name}[", name.removesuffix("']") + ".") for name in allow]
    return path in allow or any(map(path.startswith, trees))


def check_names(allow: Sequence[str], paths: Sequence[str]) -> None:
    """Check that all names are those of checks, or paths of leaves that are compared."""
    for name in allow:
        if name not in (GROWTH, REPEATS) and not any(is_allowed(path, [name]) for path in paths):
            raise ValueError(
                f"allow={[*allow]}: {name!r} is neither {GROWTH!r}, {REPEATS!r} nor a path of what "
                f"is compared: {', '.join(paths)}"
            )
