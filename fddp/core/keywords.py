"""Errors about misspelt keyword arguments, in the words that Python uses from 3.13 on."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from fddp.core.text import suggestion

P = ParamSpec("P")
T = TypeVar("T")


def suggest_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function whose error about an unknown keyword is to suggest a similar one.

    Example:
        >>> @suggest_keywords
        ... def plan(tree, *, bucket_cap_mb=25.0):
        ...     return tree
        >>> plan(1, bucket_cap=8.0)
        Traceback (most recent call last):
        TypeError: plan() got an unexpected keyword argument 'bucket_cap'; did you mean
        'bucket_cap_mb'?
    """
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in known:
                raise TypeError(
                    f"{function.__qualname__}() got an unexpected keyword argument {name!r}"
                    f"{suggestion(name, known)}"
                )
        return function(*args, **kwargs)

    return call
