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
class AnyOf:
    """Any of several forms."""

    schemas: tuple[Schema, ...]


@dataclass(frozen=True)
class MappingOf:
    """An object with any fields, of one form each."""

    schema: Schema


#: what a value may be: of a type (`float` takes integers, too, which are below 2**64), None, this
#: text, a list of any length, a list of these entries, an object with these fields, or as above
Schema: TypeAlias = (
    "type[object] | str | list[Schema] | tuple[Schema, ...] | dict[str, Schema]"
    " | AnyOf | MappingOf | None"
)


def optional(schema: Schema) -> AnyOf:
    """A form, or None."""
    return AnyOf((None, schema))


def decode(text: bytes | str, schema: Schema) -> Any:
    """The value that a text holds.

    Args:
        text: JSON.
        schema: what the value must be; it is then that, and nothing more.

    Raises:
        ValueError: it is something else; says where and what.

    Example:
        >>> decode('["w", [3, 2]]', (str, [int]))
        ['w', [3, 2]]
        >>> decode('["w", [3, "2"]]', (str, [int]))
        Traceback (most recent call last):
        ValueError: [1][1] is '2', and should be an int
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error
    problem = _schema_error(value, schema, "")
    if problem is not None:
        raise ValueError(problem)
    return value


def decode_all(texts: Sequence[bytes], decoder: Callable[[bytes], T], what: str) -> list[T]:
    """What all ranks say, by rank.

    Args:
        texts: of every rank, the same on all of them.
        decoder: what it reads one by; a `ValueError` where that makes no sense.
        what: what it is, for the error.

    Raises:
        DesyncError: what a rank says makes no sense; names it.

    Example:
        >>> decode_all([b'"ready"', b'{"ready": 1}'], lambda text: decode(text, str), "states")
        Traceback (most recent call last):
        fddp.errors.DesyncError: what rank 1 says makes no sense as its part of states: the whole
        is {'ready': 1}, and should be text; run the same version of fddp on every rank
    """
    values = []
    for rank, text in enumerate(texts):
        try:
            values.append(decoder(text))
        except ValueError as error:
            raise malformed_message_error(rank, what, error) from error
    return values


def malformed_message_error(rank: int, what: str, error: ValueError) -> DesyncError:
    """The error of a rank that says what can't be read."""
    return DesyncError(
        f"what rank {rank} says makes no sense as its part of {what}: {error}; run the same "
        f"version of fddp on every rank"
    )


def _schema_error(value: object, schema: Schema, where: str) -> str | None:
    """Where and in what a value is not of a form, or None. Goes no deeper than the form does."""
    fits = True
    if isinstance(schema, AnyOf):
        fits = any(_schema_error(value, one, where) is None for one in schema.schemas)
    elif isinstance(schema, list):
        fits = isinstance(value, list)
        if isinstance(value, list):
            entries = ((entry, schema[0], f"[{i}]") for i, entry in enumerate(value))
            return _first_schema_error(entries, where)
    elif isinstance(schema, tuple):
        fits = isinstance(value, list) and len(value) == len(schema)
        if isinstance(value, list) and fits:
            pairs = enumerate(zip(value, schema, strict=True))
            return _first_schema_error(((entry, one, f"[{i}]") for i, (entry, one) in pairs), where)
    elif isinstance(schema, dict):
        fits = isinstance(value, dict) and value.keys() == schema.keys()
        if isinstance(value, dict) and fits:
            return _first_schema_error(
                ((value[k], one, f".{k}") for k, one in schema.items()), where
            )
    elif isinstance(schema, MappingOf):
        fits = isinstance(value, dict)
        if isinstance(value, dict):
            each = ((entry, schema.schema, f".{_short(key)}") for key, entry in value.items())
            return _first_schema_error(each, where)
    elif isinstance(schema, type):
        fits = _is_of(value, schema)
    else:
        fits = type(value) is type(schema) and value == schema
    if fits:
        return None
    return f"{where or 'the whole'} is {_short(value)}, and should be {_described(schema)}"


def _first_schema_error(entries: Iterator[tuple[object, Schema, str]], where: str) -> str | None:
    misfits = (_schema_error(entry, schema, where + place) for entry, schema, place in entries)
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


def _described(schema: Schema) -> str:
    """A form in words.

    >>> _described(AnyOf(("auto", None, [int])))
    "'auto', None or a list"
    >>> _described((int, str)), _described({"a": int})
    ('a list of 2', 'an object with the fields a')
    """
    if isinstance(schema, AnyOf):
        *first, last = map(_described, schema.schemas)
        return f"{', '.join(first)} or {last}"
    if isinstance(schema, list):
        return "a list"
    if isinstance(schema, tuple):
        return f"a list of {len(schema)}"
    if isinstance(schema, MappingOf):
        return "an object"
    if isinstance(schema, dict):
        return f"an object with the fields {', '.join(schema)}"
    if isinstance(schema, type):
        return _KINDS.get(schema, "a value")
    return repr(schema)
