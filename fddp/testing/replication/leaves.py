"""Leaves of any value: of trees, modules, optimizers, and of objects by their attributes."""

from __future__ import annotations

import copy
import random
import re
import weakref
from collections.abc import Iterator, Mapping
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fddp.extend import tree_flatten

_T = TypeVar("_T")

RANDOM_STATES = (random.Random, np.random.Generator, np.random.RandomState)
"""Sources of random numbers, beside `torch.Generator`."""

CONSTANTS = (bool, int, float, complex, str, bytes, type(None), Enum)
"""Types whose values do not change."""


def leaves_of(
    name: str, value: Any, visited: dict[int, tuple[str, Any]] | None = None
) -> Iterator[tuple[str, Any]]:
    """Paths and leaves of a value.

    Of a module they are the parameters, of an optimizer its state and parameters, of other objects
    with a `state_dict` that; of all others the attributes, or what pickle takes of them. A leaf
    that is none of `is_leaf` has no content that Python can see.

    Args:
        name: name of the value, with which paths begin.
        value: the value.
        visited: paths and objects by their `id`. Each object is followed once.
    """
    visited = {} if visited is None else visited
    tree = _tree_of(value)
    if tree is not value:
        visited[id(value)] = name, value
    try:
        leaves, treedef = tree_flatten(tree)
    except (TypeError, ValueError):  # keys without names, such as tensors
        parts = tree.values() if isinstance(tree, dict) else tree
        for number, part in enumerate(parts):
            yield from leaves_of(f"{name}[{number}]", part, visited)
        return
    for path, leaf in zip(treedef.paths, leaves, strict=True):
        at = f"{name}[{path!r}]" if path else name
        if is_leaf(leaf):
            yield at, leaf
        elif id(leaf) in visited:
            continue
        elif leaf is not value and _tree_of(leaf) is not leaf:
            yield from leaves_of(at, leaf, visited)
        else:
            visited[id(leaf)] = at, leaf  # kept, so that no other object gets its address
            parts_of = contents(leaf)
            if parts_of is None:
                yield at, leaf
            for part, content in (parts_of or {}).items():
                yield from leaves_of(f"{at}{part}", content, visited)


def copied(value: _T) -> _T:
    """A deep copy, in which what is shared stays shared.

    Pickle, and so `deepcopy`, takes no other attributes of an optimizer than its groups and state,
    although `torch.optim.LBFGS` has some that it needs.
    """
    memo: dict[int, Any] = {}
    result = copy.deepcopy(value, memo)
    for own in [*memo.get(id(memo), ())]:
        if isinstance(own, torch.optim.Optimizer):
            other = memo[id(own)]
            for name in ("_params", "_numel_cache"):
                if name in vars(own) and name not in vars(other):
                    setattr(other, name, copy.deepcopy(vars(own)[name], memo))
    return result


def is_leaf(value: Any) -> bool:
    """Return True for tensors, arrays, sources of random numbers and constants."""
    kinds = (Tensor, torch.Generator, *RANDOM_STATES, *CONSTANTS)
    return isinstance(value, kinds) or hasattr(value, "__array__")


def buffers_of(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Paths and buffers of the modules of a value, and tensors that they have as attributes."""
    visited: dict[int, tuple[str, Any]] = {}
    for _ in leaves_of(name, value, visited):
        pass
    for at, module in visited.values():
        if not isinstance(module, torch.nn.Module):
            continue
        for path, buffer in module.named_buffers():
            yield f"{at}[{path!r}]", buffer
        for prefix, part in module.named_modules():
            for path, attribute in vars(part).items():
                if isinstance(attribute, Tensor):
                    yield f"{at}[{'.'.join(filter(None, (prefix, path)))!r}]", attribute


def gradients_of(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Paths and gradients of the tensors of a value that have one."""
    for path, leaf in leaves_of(name, value):
        if isinstance(leaf, Tensor) and leaf.is_leaf and leaf.grad is not None:
            yield f"{path}.grad", leaf.grad


def trees_of(values: Mapping[str, Any]) -> list[str]:
    """Names of the values that are trees: no modules, and nothing else with a `state_dict`."""
    return [n for n, value in values.items() if not callable(getattr(value, "state_dict", None))]


def is_tuple(result: Any) -> bool:
    """Return True for a tuple of results, which a named tuple is not."""
    return isinstance(result, tuple) and not hasattr(result, "_fields")


def input_of(path: str) -> str:
    """Name of the value that a path is of."""
    return re.split(r"[.\[(<]", path, maxsplit=1)[0]


def attributes(value: Any) -> dict[str, Any]:
    """Attributes of an object that pickle would take as they are; empty for others."""
    kind: Any = type(value)
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
        return {}
    found = {
        name: getattr(value, name)
        for base in kind.__mro__
        for name in _slots(base)
        if name not in ("__dict__", "__weakref__") and hasattr(value, name)
    }
    return found | getattr(value, "__dict__", {})


def contents(value: Any) -> dict[str, Any] | None:
    """Contents of an object, by what to write after its name; None if there is no way in."""
    if isinstance(value, FunctionType | ModuleType | type) or _is_own(value):
        return {}  # no state; copies of inputs share them, too
    if isinstance(value, weakref.ref):
        return {"()": value()}
    if isinstance(value, set | frozenset):
        return {f"[{number}]": part for number, part in enumerate(sorted(value, key=repr))}
    if found := attributes(value):
        return {f".{name}": part for name, part in found.items()}
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # such as a lock, a file, a stream, or a compiled function
        return {} if callable(value) else None
    if isinstance(reduced, str):  # a constant of its module
        return {}
    parts = [*reduced[1], *(part for part in reduced[2:] if part is not None)]
    listed = [list(part) if isinstance(part, Iterator) else part for part in parts]
    return {f"<{number}>": part for number, part in enumerate(listed)}


def _tree_of(value: Any) -> Any:
    """The tree that stands for a module, an optimizer or another object with a `state_dict`."""
    if isinstance(value, torch.nn.Module):
        return dict(value.named_parameters())
    if isinstance(value, type) or not callable(getattr(value, "state_dict", None)):
        return value
    state = value.state_dict()
    if isinstance(value, torch.optim.Optimizer):  # in whose groups parameters are numbers
        groups = zip(state["param_groups"], value.param_groups, strict=True)
        state["param_groups"] = [group | {"params": own["params"]} for group, own in groups]
    return state or value


def _slots(kind: type) -> list[str]:
    names = vars(kind).get("__slots__", ())
    listed = [names] if isinstance(names, str) else names
    return [
        f"_{kind.__name__.lstrip('_')}{name}"
        if name.startswith("__") and not name.endswith("__")
        else name
        for name in listed
    ]


def _is_own(value: Any) -> bool:
    """Return True for objects of fddp, such as a `SyncInfo`, whose times are of one rank."""
    return type(value).__module__.partition(".")[0] == "fddp"
