"""Callbacks without references to their owners."""

from __future__ import annotations

import weakref
from collections.abc import Callable


def weak_callback(method: Callable[[], None]) -> Callable[..., None]:
    """Return a function that ignores its arguments and calls a method while its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*_: object) -> None:
        bound = reference()
        if bound is not None:
            bound()

    return call
