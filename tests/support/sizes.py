"""Sizes of the package's rooms, classes and functions: `python -m tests.support.sizes`.

Figures for those who read or change the code. None of them has a limit.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from statistics import mean
from typing import NamedTuple

from tests.support.rooms import MODULES, room_of

_SHOWN = 10  # of the largest classes, functions and signatures


class Size(NamedTuple):
    """Size of a function or class.

    Attributes:
        lines: from its first line to its last.
        parts: parameters of a function, methods of a class.
    """

    name: str
    lines: int
    parts: int


def sizes(module: str) -> tuple[list[Size], list[Size]]:
    """Return the sizes of a module's classes and functions."""
    classes, functions = [], []
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
            classes.append(Size(f"{module}.{node.name}", _lines(node), len(methods)))
        elif isinstance(node, ast.FunctionDef):
            of = node.args
            parameters = [*of.posonlyargs, *of.args, *of.kwonlyargs]
            own = [one for one in parameters if one.arg not in ("self", "cls")]
            functions.append(Size(f"{module}.{node.name}", _lines(node), len(own)))
    return classes, functions


def _lines(node: ast.ClassDef | ast.FunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def main() -> None:
    rooms, classes, functions = defaultdict[str, list[Size]](list), [], []
    for module in MODULES:
        of_classes, of_functions = sizes(module)
        classes += of_classes
        functions += of_functions
        rooms[room_of(module)] += of_functions
    for room, own in rooms.items():
        if own:
            average = mean(one.lines for one in own)
            print(f"{room:<14}{len(own):6} functions of {average:5.1f} lines on average")
    for title, found, key in (
        ("lines of a class", classes, "lines"),
        ("methods of a class", classes, "parts"),
        ("lines of a function", functions, "lines"),
        ("parameters of a function", functions, "parts"),
    ):
        print(f"\n{title}")
        for one in sorted(found, key=lambda one: -getattr(one, key))[:_SHOWN]:
            print(f"{getattr(one, key):6}  {one.name}")


if __name__ == "__main__":
    main()
