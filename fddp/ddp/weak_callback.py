"""Callbacks that keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable


def weak_callback(method: Callable[[], None]) -> Callable[..., None]:
    """A function that calls a bound method, whatever it is given, as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*_: object) -> None:
        bound = reference()
        if bound is not None:
            bound()

    return call
