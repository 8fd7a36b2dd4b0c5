"""Outcomes of calls, as values that ranks can return: types and text of errors, warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple


class Ending(NamedTuple):
    """Outcome of a call on one rank.

    Attributes:
        kinds: names of the error's types, most derived first; "no error" if the call returned.
        text: of the error.
        failures: texts by rank, of a `PeerError`.
    """

    kinds: tuple[str, ...]
    text: str
    failures: dict[int, str]


def ending(call: Callable[[], Any]) -> Ending:
    """Return the outcome of `call`."""
    try:
        call()
    except BaseException as error:
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        try:
            text = str(error)
        except ValueError:
            text = "(no text)"
        return Ending(kinds, text, getattr(error, "failures", {}))
    return Ending(("no error",), "", {})


def warnings_of(call: Callable[[], object]) -> list[str]:
    """Return the texts of the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


class BoomError(Exception):
    """Has a signature of its own, so that a copy made from `args` fails."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"boom {code} {where}")
