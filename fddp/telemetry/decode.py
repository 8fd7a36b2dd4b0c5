"""What monitors of other ranks tell: what their writers write, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from fddp.core.protocol.messages import Schema, decode

T = TypeVar("T")

_MOST = 2**63


def decode_from(rank: int, what: str, text: str, form: Schema, make: Callable[[Any], T]) -> T:
    """What a rank told.

    Args:
        rank: its number, for the error.
        what: what it should have told, for the error.
        text: JSON.
        form: what the value must be, with numbers below 2**63.
        make: what is made of it; a ValueError where that makes no sense.

    Raises:
        ValueError: it is something else; names the rank, and says where and what.

    Example:
        >>> decode_from(3, "steps", "[1, 2.5]", [float], tuple)
        (1, 2.5)
        >>> decode_from(3, "steps", "[1, NaN]", [float], tuple)
        Traceback (most recent call last):
        ValueError: rank 3 told no steps: nan is no number below 2**63
    """
    try:
        value = decode(text, form)
        for number in _numbers(value):
            if not abs(number) < _MOST:
                raise ValueError(f"{number} is no number below 2**63")
        return make(value)
    except ValueError as error:
        raise ValueError(f"rank {rank} told no {what}: {error}") from error


def check_least(least: int, numbers: Mapping[str, float]) -> None:
    """Raises a ValueError for the first number that is below `least`."""
    for name, number in numbers.items():
        if number < least:
            raise ValueError(f"{name} is {number}, and should be {least} or more")


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list | dict):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _numbers(entry)
