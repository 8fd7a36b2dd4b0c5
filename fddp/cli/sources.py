"""Sources of commands, named as `package.module:name` or `file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fddp import BucketPlan, plan_buckets
from fddp.cli.common import CallError
from fddp.errors import FddpError
from fddp.extend import suggestion

SOURCE_HELP = (
    "package.module:name or file.py:name of a tree of arrays, of an nn.Module, or of a function "
    "that returns one; or FILE.json with a plan"
)


def load_plan(source: str, bucket_cap_mb: float = 25.0, first_bucket_mb: float = 1.0) -> BucketPlan:
    """Return the plan in a JSON file, or a plan for the tree or module of a name.

    Raises:
        CallError: the source can't be loaded or planned.
    """
    try:
        if is_plan_file(source):
            return BucketPlan.from_json(read(source))
        return plan_buckets(
            load(source), bucket_cap_mb=bucket_cap_mb, first_bucket_mb=first_bucket_mb
        )
    except (FddpError, TypeError, ValueError) as error:
        raise CallError(f"{source}: {error}") from error


def is_plan_file(source: str) -> bool:
    """Return True if the source names the JSON of a plan."""
    return source.endswith(".json")


def load(source: str) -> Any:
    """Return the object of a name. Functions and classes are called without arguments.

    Raises:
        CallError: the name is wrong, or its code raises.
    """
    found = find(source, "a tree, an nn.Module, or a function that returns one")
    if not callable(found) or isinstance(found, nn.Module):
        return found
    return call(found, source)


def find(source: str, wanted: str) -> Any:
    """Return the object of a name, of which the text of errors is what is `wanted`.

    Raises:
        CallError: the name is wrong, or the code of its module raises.
    """
    where, colon, name = source.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise CallError(
            f"{source!r} must be package.module:name or file.py:name, where name is {wanted}"
        )
    module = _load_module(where)
    if not hasattr(module, name):
        raise CallError(f"{where!r} has no {name!r}{suggestion(name, vars(module))}")
    return getattr(module, name)


def call(function: Callable[[], Any], source: str) -> Any:
    """Return the result of a function that a source names.

    Raises:
        CallError: it needs arguments, or raises.
    """
    needed = _needed_arguments(function)
    if needed:
        name = source.rpartition(":")[2]
        raise CallError(
            f"{source} needs the arguments {', '.join(needed)}, and is called without any; name a "
            f"function that calls it, such as: def make(): return {name}(...)"
        )
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise CallError(f"{source} raised {described(error)}") from error


def read(path: str) -> str:
    """Return the text of a file.

    Raises:
        CallError: the file can't be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise CallError(f"can't read {path!r}: {error.strerror}") from error


def _needed_arguments(fn: Callable[..., Any]) -> list[str]:
    """Return the names of parameters without a default; [] if the signature is unknown."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    optional = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def _load_module(where: str) -> ModuleType:
    is_file = where.endswith(".py")
    try:
        return _load_file(where) if is_file else importlib.import_module(where)
    except CallError:
        raise
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if not is_file and missing is not None and f"{where}.".startswith(f"{missing}."):
            raise CallError(f"there is no module {missing!r}") from error
        raise CallError(f"importing {where!r} raised {described(error)}") from error


def _load_file(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise CallError(f"there is no file {path!r}")
    spec = importlib.util.spec_from_file_location(f"fddp_source_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise CallError(f"{path!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


def described(error: BaseException) -> str:
    """Return the error and its location in one line."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) or not frames:
        return text
    return f"{text} ({frames[-1].filename}, line {frames[-1].lineno})"
