"""Where in the caller's code an operator was called."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

_OWN = str(Path(__file__).parent.parent) + "/"
_INSIDE = (_OWN, str(Path(torch.__file__).parent) + "/")
# Programs that come with fddp are callers like any other.
_CALLERS = tuple(f"{_OWN}{name}/" for name in ("examples", "demo", "bench"))
_LIBRARY = str(Path(threading.__file__).parent) + "/"
_INSTALLED = "-packages/"


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


def call_chain() -> str:
    """Where in the caller's own code a call stands, and who called that.

    To walk the frames costs some microseconds. Where calls are told by their place in each step,
    `call_site` has to do.

    >>> def helper():
    ...     return call_chain()
    >>> helper()
    '<doctest ...>:2 in helper, from <doctest ...>:1 in <module>...'
    """
    return own_lines(sys._getframe(1))


def own_lines(frame: FrameType | None, most: int = 3) -> str:
    """The innermost lines of the user's own code, innermost first; empty where there is none.

    A line of a helper that synchronises for everybody says little without who called it. Of what is
    installed, frameworks and launchers, only the innermost line counts.

    Args:
        frame: where to begin.
        most: how many lines.
    """
    lines: list[str] = []
    while frame is not None and len(lines) < most:
        code = frame.f_code
        if _is_users(code.co_filename) and not (lines and _INSTALLED in code.co_filename):
            lines.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return ", from ".join(lines)


def _is_users(filename: str) -> bool:
    """Whether it is neither fddp's, nor torch's, nor of the standard library."""
    if filename.startswith(_LIBRARY):
        return _INSTALLED in filename and not is_inside(filename, ())
    return not filename.startswith("<frozen ") and not is_inside(filename, ())


def is_inside(filename: str, more: tuple[str, ...]) -> bool:
    return filename.startswith((*_INSIDE, *more)) and not filename.startswith(_CALLERS)
