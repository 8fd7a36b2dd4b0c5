"""Validation of messages from monitors of other ranks, and of flight files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from fddp.core.protocol.messages import Schema, decode

T = TypeVar("T")

_MOST = 2**63


def decode_finite(text: str, schema: Schema) -> Any:
    """Parse JSON and validate it. Numbers must be finite and below 2**63.

    Raises:
        ValueError: the value does not fit.
    """
    value = decode(text, schema)
    for number in _numbers(value):
        if not abs(number) < _MOST:
            raise ValueError(f"{number} is not a finite number below 2**63")
    return value


def decode_from(rank: int, what: str, text: str, schema: Schema, make: Callable[[Any], T]) -> T:
    """Decode a message of a rank.

    Args:
        rank: the sender, for the error.
        what: name of the message, for the error.
        text: JSON.
        schema: form of the value, as for `decode_finite`.
        make: converts the value; raises a ValueError if it is invalid.

    Raises:
        ValueError: the message is malformed; names the rank.

    Example:
        >>> decode_from(3, "steps", "[1, 2.5]", [float], tuple)
        (1, 2.5)
        >>> decode_from(3, "steps", "[1, NaN]", [float], tuple)
        Traceback (most recent call last):
        ValueError: rank 3 sent a malformed 'steps' message: nan is not a finite number below 2**63
    """
    try:
        return make(decode_finite(text, schema))
    except ValueError as error:
        raise ValueError(f"rank {rank} sent a malformed '{what}' message: {error}") from error


def check_least(least: int, numbers: Mapping[str, float]) -> None:
    """Raise a ValueError for the first number below `least`."""
    for name, number in numbers.items():
        if number < least:
            raise ValueError(f"{name} is {number}, expected {least} or more")


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list | dict):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _numbers(entry)
