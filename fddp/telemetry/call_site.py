"""Position in the caller's code at which an operator was called."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

_OWN = str(Path(__file__).parent.parent) + "/"
_INSIDE = (_OWN, str(Path(torch.__file__).parent) + "/")
# The demo that comes with fddp counts as a caller.
_CALLERS = f"{_OWN}cli/demo/"
_LIBRARY = str(Path(threading.__file__).parent) + "/"
_INSTALLED = "-packages/"


class Site(NamedTuple):
    """Line of the caller's code. Two calls from one instruction are equal."""

    code: CodeType
    instruction: int
    line: int

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.line}"


def call_site(*inside: str) -> Site:
    """Return the innermost line outside of fddp, torch and files below `inside`.

    >>> str(call_site()).rpartition(":")[2]
    '1'
    """
    frame, within = sys._getframe(1), (*_INSIDE, *inside)
    # As `is_inside`, which would cost a call for each frame.
    while frame.f_back is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(within) or filename.startswith(_CALLERS):
            break
        frame = frame.f_back
    return Site(frame.f_code, frame.f_lasti, frame.f_lineno)


def call_chain() -> str:
    """Return the innermost lines of the user's code that lead to a call, as text.

    Walking the frames takes some microseconds. `call_site` is cheaper, for calls in every step.

    >>> def helper():
    ...     return call_chain()
    >>> helper()
    '<doctest ...>:2 in helper, from <doctest ...>:1 in <module>...'
    """
    return own_lines(sys._getframe(1))


def own_lines(frame: FrameType | None, most: int = 3) -> str:
    """Return the innermost lines of the user's code, innermost first; empty if there are none.

    Several lines are returned because a shared helper alone does not identify the call. Of
    installed packages, such as frameworks and launchers, only an innermost line is included.

    Args:
        frame: innermost frame to consider.
        most: maximum number of lines.
    """
    lines: list[str] = []
    # Another thread may return from frames as they are read: CPython 3.11 then gave a bool, once.
    while isinstance(frame, FrameType) and len(lines) < most:
        code = frame.f_code
        if _is_users(code.co_filename) and not (lines and _INSTALLED in code.co_filename):
            lines.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return ", from ".join(lines)


def _is_users(filename: str) -> bool:
    """Return True if a file is outside of fddp, torch and the standard library."""
    if filename.startswith(_LIBRARY):
        return _INSTALLED in filename and not is_inside(filename, ())
    return not filename.startswith("<frozen ") and not is_inside(filename, ())


def is_inside(filename: str, more: tuple[str, ...]) -> bool:
    """Return True if a file belongs to fddp (except its demo), to torch, or is below `more`."""
    return filename.startswith((*_INSIDE, *more)) and not filename.startswith(_CALLERS)
