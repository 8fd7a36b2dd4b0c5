"""JSON documents for fuzzing: any value, and documents with some places changed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

_NUMBERS = st.one_of(
    st.integers(-3, 5),
    st.sampled_from([2**31, 2**32, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 10**400]),
    st.sampled_from([0.0, -0.0, 1e308, 5e-324, math.inf, -math.inf, math.nan]),
)

_TEXTS = st.one_of(
    st.sampled_from(["", "self", "float32", "all_reduce", "\x1b[31m", "\ud800", "__class__"]),
    st.text(max_size=6),
)

_SCALARS = st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS)

JSON = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(_TEXTS, inner, max_size=4)
    ),
    max_leaves=12,
)


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a document."""
    entries: Any = ()
    if isinstance(document, dict):
        entries = document.items()
    elif isinstance(document, list):
        entries = enumerate(document)
    return [path, *(p for key, value in entries for p in places(value, (*path, key)))]


def replaced(document: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """Return a document with the value at a path changed."""
    if not path:
        return change(document)
    copy = document.copy()
    copy[path[0]] = replaced(document[path[0]], path[1:], change)
    return copy


def _without(value: Any, key: Any) -> Any:
    """Return an object without a key, or a list without its last entry."""
    if isinstance(value, dict):
        return {name: entry for name, entry in value.items() if name != key}
    return value[:-1]


def _mutated(document: Any, path: tuple[Any, ...], new: Any, how: int) -> Any:
    """Return a document with one change."""
    if how == 0:
        return replaced(document, path, lambda old: [old, old])
    if how == 1 and path:
        return replaced(document, path[:-1], lambda old: _without(old, path[-1]))
    if how == 2:
        return replaced(
            document, path, lambda old: {**old, "more": new} if isinstance(old, dict) else old
        )
    return replaced(document, path, lambda _: new)


@st.composite
def mutants(draw: st.DrawFn, text: str) -> str:
    """Documents with some values, keys or characters changed."""
    document = json.loads(text)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(document)))
        document = _mutated(document, path, draw(JSON), draw(st.integers(0, 5)))
    changed = json.dumps(document)
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(changed)))
        piece = draw(st.sampled_from(["", "[", '"', "\x00", "1e999", "{", "\ud800"]))
        changed = changed[:at] + piece + (text[at:] if draw(st.booleans()) else "")
    return changed
