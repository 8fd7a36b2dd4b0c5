"""What other ranks say, held against its form before anything is made of it.

Ranks tell each other plain values as JSON. What comes from a rank that runs other code, or whose
memory or network is broken, may be anything; it ends in an error that names the rank, on every
rank, because all read the same texts.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from fddp.errors import DesyncError

_MOST = 2**64
_KINDS = {str: "text", int: "an int", float: "a number", bool: "true or false"}
T = TypeVar("T")


@dataclass(frozen=True)
class OneOf:
    """Any of several forms."""

    forms: tuple[Form, ...]


@dataclass(frozen=True)
class Each:
    """An object with any fields, of one form each."""

    form: Form


#: what a value may be: of a type (`float` takes integers, too, which are below 2**64), None, this
#: text, a list of any length, a list of these entries, an object with these fields, or as above
Form: TypeAlias = (
    "type[object] | str | list[Form] | tuple[Form, ...] | dict[str, Form] | OneOf | Each | None"
)


def maybe(form: Form) -> OneOf:
    """A form, or None."""
    return OneOf((None, form))


def read(text: bytes | str, form: Form) -> Any:
    """The value that a text holds.

    Args:
        text: JSON.
        form: what the value must be; it is then that, and nothing more.

    Raises:
        ValueError: it is something else; says where and what.

    Example:
        >>> read('["w", [3, 2]]', (str, [int]))
        ['w', [3, 2]]
        >>> read('["w", [3, "2"]]', (str, [int]))
        Traceback (most recent call last):
        ValueError: [1][1] is '2', and should be an int
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error
    problem = _misfit(value, form, "")
    if problem is not None:
        raise ValueError(problem)
    return value


def heard(texts: Sequence[bytes], reader: Callable[[bytes], T], what: str) -> list[T]:
    """What all ranks say, by rank.

    Args:
        texts: of every rank, the same on all of them.
        reader: what it reads one by; a `ValueError` where that makes no sense.
        what: what it is, for the error.

    Raises:
        DesyncError: what a rank says makes no sense; names it.

    Example:
        >>> heard([b'"ready"', b'{"ready": 1}'], lambda text: read(text, str), "states")
        Traceback (most recent call last):
        fddp.errors.DesyncError: what rank 1 says makes no sense as its part of states: the whole
        is {'ready': 1}, and should be text; run the same version of fddp on every rank
    """
    values = []
    for rank, text in enumerate(texts):
        try:
            values.append(reader(text))
        except ValueError as error:
            raise nonsense(rank, what, error) from error
    return values


def nonsense(rank: int, what: str, error: ValueError) -> DesyncError:
    """The error of a rank that says what can't be read."""
    return DesyncError(
        f"what rank {rank} says makes no sense as its part of {what}: {error}; run the same "
        f"version of fddp on every rank"
    )


def _misfit(value: object, form: Form, where: str) -> str | None:
    """Where and in what a value is not of a form, or None. Goes no deeper than the form does."""
    fits = True
    if isinstance(form, OneOf):
        fits = any(_misfit(value, one, where) is None for one in form.forms)
    elif isinstance(form, list):
        fits = isinstance(value, list)
        if isinstance(value, list):
            entries = ((entry, form[0], f"[{i}]") for i, entry in enumerate(value))
            return _first_misfit(entries, where)
    elif isinstance(form, tuple):
        fits = isinstance(value, list) and len(value) == len(form)
        if isinstance(value, list) and fits:
            pairs = enumerate(zip(value, form, strict=True))
            return _first_misfit(((entry, one, f"[{i}]") for i, (entry, one) in pairs), where)
    elif isinstance(form, dict):
        fits = isinstance(value, dict) and value.keys() == form.keys()
        if isinstance(value, dict) and fits:
            return _first_misfit(((value[k], one, f".{k}") for k, one in form.items()), where)
    elif isinstance(form, Each):
        fits = isinstance(value, dict)
        if isinstance(value, dict):
            each = ((entry, form.form, f".{_short(key)}") for key, entry in value.items())
            return _first_misfit(each, where)
    elif isinstance(form, type):
        fits = _is_of(value, form)
    else:
        fits = type(value) is type(form) and value == form
    if fits:
        return None
    return f"{where or 'the whole'} is {_short(value)}, and should be {_described(form)}"


def _first_misfit(entries: Iterator[tuple[object, Form, str]], where: str) -> str | None:
    misfits = (_misfit(entry, form, where + place) for entry, form, place in entries)
    return next((misfit for misfit in misfits if misfit is not None), None)


def _is_of(value: object, kind: type) -> bool:
    if kind is object:
        return True
    if kind is float:
        return type(value) is float or _is_of(value, int)
    if type(value) is not kind:
        return False
    return not isinstance(value, int) or abs(value) < _MOST


def _short(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # an int of so many digits that Python does not write it
        return "a number that is too long to be shown"


def _described(form: Form) -> str:
    """A form in words.

    >>> _described(OneOf(("auto", None, [int])))
    "'auto', None or a list"
    >>> _described((int, str)), _described({"a": int})
    ('a list of 2', 'an object with the fields a')
    """
    if isinstance(form, OneOf):
        *first, last = map(_described, form.forms)
        return f"{', '.join(first)} or {last}"
    if isinstance(form, list):
        return "a list"
    if isinstance(form, tuple):
        return f"a list of {len(form)}"
    if isinstance(form, Each):
        return "an object"
    if isinstance(form, dict):
        return f"an object with the fields {', '.join(form)}"
    if isinstance(form, type):
        return _KINDS.get(form, "a value")
    return repr(form)
