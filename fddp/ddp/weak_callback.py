"""Callbacks without references to their owners."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import cast

from fddp.native.untraced import untraced


def weak_callback(method: Callable[[], None]) -> Callable[..., None]:
    """Return a function that ignores its arguments and calls a method while its object lives."""
    bound = cast(MethodType, method)
    owner, function = weakref.ref(bound.__self__), bound.__func__

    @untraced()
    def call(*_: object) -> None:
        found = owner()
        if found is not None:
            function(found)

    return call
