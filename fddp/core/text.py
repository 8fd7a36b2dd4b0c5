"""Counts and sizes in words, for tables, figures and errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_PLURALS = {"leaf": "leaves", "process": "processes", "backward pass": "backward passes"}
# Others end in s.


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    Example:
        >>> counted(1, "bucket"), counted(2, "bucket"), counted(0, "leaf")
        ('1 bucket', '2 buckets', '0 leaves')
    """
    return f"{number} {noun if number == 1 else _PLURALS.get(noun, noun + 's')}"


def leaf_text(path: str, what: str = "") -> str:
    """Return a leaf as errors name it. A tree that is one leaf has the path "".

    Example:
        >>> leaf_text("w"), leaf_text("w", "shards")
        ("leaf 'w'", "leaf 'w' of the shards")
        >>> leaf_text(""), leaf_text("", "shards")
        ('the tree itself', 'the tree of shards itself')
    """
    if not path:
        return f"the tree of {what} itself" if what else "the tree itself"
    return f"leaf {path!r} of the {what}" if what else f"leaf {path!r}"


def suggestion(word: object, known: Iterable[str]) -> str:
    """Return the known word that a misspelt one resembles, as the end of an error, or "".

    Example:
        >>> suggestion("ethernet-10", ["ethernet-10g", "nvlink4"]), suggestion("x", ["nvlink4"])
        ("; did you mean 'ethernet-10g'?", '')
    """
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(str(word).lower(), names, n=1)
    return f"; did you mean {names[close[0]]!r}?" if close else ""


def choice_text(name: str, value: object, known: Iterable[str]) -> str:
    """Return the error about an argument that is none of the known words.

    Example:
        >>> choice_text("scaling", "befor", ("before", "after"))
        "scaling must be one of before, after, got 'befor'; did you mean 'before'?"
    """
    known = tuple(known)
    return f"{name} must be one of {', '.join(known)}, got {value!r}{suggestion(value, known)}"


def size_text(nbytes: float) -> str:
    """Return a number of bytes with its unit; see `unit_of`.

    Example:
        >>> size_text(48), size_text(1.5 * 2**20), size_text(2**30), size_text(134_600 * 2**20)
        ('48 B', '1.5 MiB', '1 GiB', '131.4 GiB')
    """
    name, unit_bytes = unit_of(nbytes)
    return f"{nbytes / unit_bytes:.4g} {name}"


def time_text(time_s: float) -> str:
    """Return a time with its unit.

    Example:
        >>> time_text(3.8795999e-05), time_text(0.0123), time_text(2.0), time_text(0.0)
        ('38.8 us', '12.3 ms', '2 s', '0 s')
    """
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if time_s >= unit:
            return f"{time_s / unit:.3g} {name}"
    return f"{time_s / 1e-9:.3g} ns" if time_s else "0 s"


def unit_of(nbytes: float) -> tuple[str, int]:
    """Return the largest unit that is not above a number of bytes: its name, and its bytes.

    Example:
        >>> unit_of(5 * 2**30)
        ('GiB', 1073741824)
    """
    power = max(power for power in range(len(_UNITS)) if power == 0 or nbytes >= 1024**power)
    return _UNITS[power], 1024**power
