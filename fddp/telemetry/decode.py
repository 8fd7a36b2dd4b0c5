"""Validation of flight files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fddp.core.protocol.messages import Schema, decode

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


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list | dict):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _numbers(entry)
