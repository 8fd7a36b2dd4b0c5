"""Public entrances: errors that leave one show the caller's frames, and few of fddp's.

fddp notices a mistake of its caller in a function far below the one that was called. `entrance`
rebuilds the traceback of an error, of the causes and of the contexts when they leave, so that the
line that noticed stands near the caller's. With `FDDP_FULL_TRACEBACK=1` in the environment all
frames stay.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from fddp.core.text import suggestion
from fddp.errors import InternalError

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_OWN = __name__.partition(".")[0]
# Frames of these between two of fddp are frames of how fddp works.
_BENEATH = {"jax", "jaxlib", "numpy", "optree", "torch", *sys.stdlib_module_names}


def entrance(function: F) -> F:
    """Decorate a public function or method, whose errors are to leave it with few frames of fddp.

    Of the frames of fddp in the traceback of an `Exception`, three stay at most: the outermost one,
    the innermost one, and the one that the caller's code last entered before it. All others stay,
    except those of libraries between two frames of fddp. The chain of `__cause__` and `__context__`
    is treated alike. An `InternalError` keeps all frames. Entrances that are called by fddp, or by
    a function that the caller passed, may nest.

    Of a generator function, the entrances are the iterations.

    Example:
        >>> @entrance
        ... def half(value):
        ...     if value % 2:
        ...         raise ValueError(f"{value} is odd; pass an even number")
        ...     return value // 2
        >>> half(6)
        3
    """
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def iterate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            try:
                return (yield from function(*args, **kwargs))
            except Exception as error:
                _shorten(error)
                if sys.version_info < (3, 11):
                    __tracebackhide__ = True
                    raise error
                raise

        return cast(F, iterate)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            _shorten(error)
            # Until Python 3.11, `raise` alone restores the traceback that was caught, and the other
            # form adds this frame, which pytest hides.
            if sys.version_info < (3, 11):
                __tracebackhide__ = True
                raise error
            raise

    # Dynamo traces the function itself, and guards its defaults where it finds this one.
    call._torchdynamo_inline = function  # type: ignore[attr-defined]
    call.__defaults__ = function.__defaults__  # type: ignore[attr-defined]
    call.__kwdefaults__ = function.__kwdefaults__  # type: ignore[attr-defined]
    return cast(F, call)


CALL_CODE = entrance(entrance).__code__
"""Code that calls of all entrances run."""


def suggest_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function whose error about an unknown keyword is to suggest a similar one.

    Python does so itself from 3.13 on.

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


def _shorten(error: BaseException) -> None:
    """Rebuild the tracebacks of an error and of those that led to it."""
    if os.environ.get("FDDP_FULL_TRACEBACK", "0") not in ("", "0"):
        return
    pending: list[BaseException | None] = [error]
    seen = set[int]()
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen or isinstance(one, InternalError):
            continue
        seen.add(id(one))
        one.__traceback__ = _shortened(one.__traceback__)
        pending += [one.__cause__, one.__context__]


def _shortened(trace: TracebackType | None) -> TracebackType | None:
    entries: list[TracebackType] = []
    while trace is not None:
        # Frames of this file only pass calls on.
        if trace.tb_frame.f_code.co_filename != CALL_CODE.co_filename:
            entries.append(trace)
        trace = trace.tb_next
    inside = _inside(entries)
    shown = set[int]()
    if True in inside:
        first, noticed = inside.index(True), max(at for at, own in enumerate(inside) if own)
        entered = noticed
        while entered > 0 and inside[entered - 1]:
            entered -= 1
        shown = {first, entered, noticed}
    short: TracebackType | None = None
    for at, entry in reversed([*enumerate(entries)]):
        if at in shown or not inside[at]:
            short = TracebackType(short, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return short


def _inside(entries: Sequence[TracebackType]) -> list[bool]:
    """Return for each frame True if it is of fddp, or of a library between two of fddp."""
    names = [str(entry.tb_frame.f_globals.get("__name__")) for entry in entries]
    packages = [name.partition(".")[0] for name in names]
    inside = [package == _OWN for package in packages]
    after: int | None = None  # position behind a frame of fddp that only libraries have followed
    for at, package in enumerate(packages):
        if package == _OWN:
            if after is not None:
                inside[after:at] = [True] * (at - after)
            after = at + 1
        elif package not in _BENEATH:
            after = None
    return inside
