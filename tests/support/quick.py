"""The `quick` marker, set on every test that starts no process and compiles nothing.

It is derived from what a test uses: its fixtures, and the functions that it and they reach within
the tests. So a new test needs no entry in a list.
"""

from __future__ import annotations

import dis
import inspect
from functools import partial
from itertools import pairwise
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.ranks import LaunchProcesses, RankPool, run_fresh

if TYPE_CHECKING:
    from collections.abc import Iterator

_MODULES = {"subprocess", "multiprocessing", "nbclient", "jax"}
_ATTRIBUTES = {("os", "fork"), ("torch", "compile"), ("torch", "export")}
_OBJECTS = (RankPool, run_fresh)
_FOLLOWED = {"tests", "examples", "benchmarks"}  # packages whose functions are looked into
_SLOW = object()
_known: dict[
    int, tuple[Any, list[Any]]
] = {}  # by id: the object, which keeps it, and its references


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "quick" not in config.option.markexpr:
        return  # nobody asks, and it takes seconds in each worker
    for item in items:
        if _is_quick(item):
            item.add_marker(pytest.mark.quick)


def _is_quick(item: pytest.Item) -> bool:
    if isinstance(item, pytest.DoctestItem):
        source = "".join(example.source for example in item.dtest.examples)
        return not any(name in source for name in ("compile", "jax", "subprocess", "hypothesis"))
    if not isinstance(item, pytest.Function):
        return False
    if any(item.get_closest_marker(name) is not None for name in ("slow", "nightly")):
        return False
    params = item.callspec.params if hasattr(item, "callspec") else {}
    fixtures = [definitions[-1].func for definitions in item._fixtureinfo.name2fixturedefs.values()]
    used = list(_reached([item.obj, *fixtures, *params.values()]))
    on_threads = any(isinstance(value, str) and value == "loopback" for value in params.values())
    return not any(map(_is_slow, used)) and (
        on_threads or not any(value is LaunchProcesses for value in used)
    )


def _is_slow(value: Any) -> bool:
    owner = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    of_module = isinstance(owner, str) and owner.partition(".")[0] in _MODULES
    return of_module or any(value is one for one in (_SLOW, *_OBJECTS))


def _reached(values: list[Any]) -> Iterator[Any]:
    """Objects that functions refer to, directly or through other functions of the tests."""
    seen = set[int]()
    while values:
        value = values.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if id(value) not in _known:  # most tests reach the same helpers
            _known[id(value)] = value, [*_references(value)]
        values += _known[id(value)][1]


def _references(value: Any) -> Iterator[Any]:
    if isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, type) and _is_followed(value):
        yield from vars(value).values()
    elif isinstance(value, (FunctionType, MethodType)):
        function = inspect.unwrap(value)
        if _is_followed(function):
            yield from _loaded(function.__code__, function.__globals__)


def _is_followed(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] in _FOLLOWED


def _loaded(code: CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """Values of the globals that code loads; `_SLOW` for slow imports and attributes."""
    for first, second in pairwise(dis.get_instructions(code)):
        name = first.argval
        if first.opname == "IMPORT_NAME" and name.partition(".")[0] in _MODULES:
            yield _SLOW
        elif first.opname == "LOAD_GLOBAL":
            yield _SLOW if (name, second.argval) in _ATTRIBUTES else names.get(name)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _loaded(constant, names)
