"""Where in the caller's code an operator was called."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import torch

_OWN = str(Path(__file__).parent.parent) + "/"
_INSIDE = (_OWN, str(Path(torch.__file__).parent) + "/")
# Programs that come with fddp are callers like any other.
_CALLERS = tuple(f"{_OWN}{name}/" for name in ("examples", "demo", "bench"))


class Site(NamedTuple):
    """A line of the caller's; two calls from one place in the code are equal."""

    code: CodeType
    instruction: int
    line: int

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.line}"


def call_site(*inside: str) -> Site:
    """The innermost line that is neither fddp's nor torch's, nor in files below `inside`.

    >>> str(call_site()).rpartition(":")[2]
    '1'
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and is_inside(frame.f_code.co_filename, inside):
        frame = frame.f_back
    return Site(frame.f_code, frame.f_lasti, frame.f_lineno)


def is_inside(filename: str, more: tuple[str, ...]) -> bool:
    return filename.startswith((*_INSIDE, *more)) and not filename.startswith(_CALLERS)
