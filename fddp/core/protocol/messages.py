"""Validation of JSON messages from other ranks.

Ranks exchange plain values as JSON. A rank that runs another version of the code, or has faulty
memory or a faulty network, may send anything. Every message is checked against a schema. All ranks
read the same messages, so all raise the same error, which names the sender.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from fddp.errors import DesyncError

_MOST = 2**64
_KINDS = {str: "a string", int: "an int", float: "a number", bool: "true or false"}
T = TypeVar("T")


@dataclass(frozen=True)
class AnyOf:
    """Union of several schemas."""

    schemas: tuple[Schema, ...]


@dataclass(frozen=True)
class MappingOf:
    """Object with arbitrary keys whose values share one schema."""

    schema: Schema


#: Schema of a value: a type (`float` also accepts integers; integers are below 2**64), None, a
#: literal string, a list of any length, a tuple of fixed length, an object with exactly these
#: fields, or one of the classes above.
Schema: TypeAlias = (
    "type[object] | str | list[Schema] | tuple[Schema, ...] | dict[str, Schema]"
    " | AnyOf | MappingOf | None"
)


def optional(schema: Schema) -> AnyOf:
    """Return the union of a schema and None."""
    return AnyOf((None, schema))


def decode(text: bytes | str, schema: Schema, what: str = "") -> Any:
    """Parse JSON and validate it.

    Args:
        schema: form that the value must have exactly.
        what: name of the document, for errors.

    Raises:
        ValueError: the value does not fit the schema; the message has its path and value.

    Example:
        >>> decode('["w", [3, 2]]', (str, [int]))
        ['w', [3, 2]]
        >>> decode('["w", [3, "2"]]', (str, [int]))
        Traceback (most recent call last):
        ValueError: [1][1] is '2', expected an int
    """
    prefix = f"{what}: " if what else ""
    try:
        value = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{prefix}invalid JSON: {error}") from error
    problem = _schema_error(value, schema, "")
    if problem is not None:
        raise ValueError(prefix + problem)
    return value


def decode_all(texts: Sequence[bytes], decoder: Callable[[bytes], T], what: str) -> list[T]:
    """Decode the messages `what` of all ranks, in rank order; `texts` is the same on all ranks.

    Raises:
        DesyncError: `decoder` raises a `ValueError`; names the rank.

    Example:
        >>> decode_all([b'"ready"', b'{"ready": 1}'], lambda text: decode(text, str), "states")
        Traceback (most recent call last):
        fddp.errors.DesyncError: rank 1 sent a malformed 'states' message: the value is
        {'ready': 1}, expected a string; run the same version of fddp on every rank
    """
    values = []
    for rank, text in enumerate(texts):
        try:
            values.append(decoder(text))
        except ValueError as error:
            raise malformed_message_error(rank, what, error) from error
    return values


def malformed_message_error(rank: int, what: str, error: ValueError) -> DesyncError:
    """Return the error for a message that cannot be decoded."""
    return DesyncError(
        f"rank {rank} sent a malformed '{what}' message: {error}; run the same version of fddp on "
        f"every rank"
    )


def _schema_error(value: object, schema: Schema, where: str) -> str | None:
    """Return the first mismatch between a value and a schema, or None if the value is valid."""
    fits = False
    entries: Iterable[tuple[object, Schema, str]] = ()
    if isinstance(schema, AnyOf):
        fits = any(_schema_error(value, one, where) is None for one in schema.schemas)
    elif isinstance(schema, list):
        if isinstance(value, list):
            fits, entries = True, ((entry, schema[0], f"[{i}]") for i, entry in enumerate(value))
    elif isinstance(schema, tuple):
        if isinstance(value, list) and len(value) == len(schema):
            places = (f"[{i}]" for i in range(len(value)))
            fits, entries = True, zip(value, schema, places, strict=True)
    elif isinstance(schema, dict):
        if isinstance(value, dict) and value.keys() == schema.keys():
            fits, entries = True, ((value[k], one, f".{k}") for k, one in schema.items())
    elif isinstance(schema, MappingOf):
        if isinstance(value, dict):
            fits = True
            entries = ((entry, schema.schema, f".{_short(key)}") for key, entry in value.items())
    elif isinstance(schema, type):
        fits = _is_of(value, schema)
    else:
        fits = type(value) is type(schema) and value == schema
    if not fits:
        found = f"is {_short(value)}"
        if isinstance(schema, dict) and isinstance(value, dict):
            found = _wrong_fields(value, schema)
        return f"{where or 'the value'} {found}, expected {_described(schema)}"
    errors = (_schema_error(entry, one, where + place) for entry, one, place in entries)
    return next((error for error in errors if error is not None), None)


def _wrong_fields(value: dict[str, Any], schema: dict[str, Schema]) -> str:
    """Name missing and unexpected fields of an object.

    >>> _wrong_fields({"a": 1, "c": 2}, {"a": int, "b": int})
    "lacks ['b'] and has the unexpected fields ['c']"
    """
    missing = [name for name in schema if name not in value]
    unexpected = [name for name in value if name not in schema]
    parts = [f"lacks {_short(missing)}"] if missing else []
    parts += [f"has the unexpected fields {_short(unexpected)}"] if unexpected else []
    return " and ".join(parts)


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
    except ValueError:  # an int with more digits than Python converts
        return "a number that is too long to be shown"


def _described(schema: Schema) -> str:
    """Describe a schema in words.

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
