"""The tensors in what a module returns, whatever that is.

A backward pass enters the module through them, so a tensor that is not found is an entrance that
nobody watches. Hooks go on the tensors themselves: nothing is rebuilt, and callers get the very
object that their module made.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any

import torch.distributed.rpc as rpc
from torch import Tensor, nn

_REMOTE_REFERENCE: Any = getattr(rpc, "RRef", ())  # torch can be built without RPC
_COLLECTIONS: tuple[Any, ...] = (list, tuple, set, frozenset, deque)

# What holds no tensors, or holds far more than a forward has returned.
_NOT_ENTERED = (
    *(type(None), bool, int, float, complex, str, bytes, type),
    *(nn.Module, types.ModuleType, types.FunctionType, types.BuiltinFunctionType),
)


def find_tensors(output: Any) -> list[Tensor]:
    """Every tensor in an output, each once, in the order in which they are met.

    Enters lists, tuples, sets, deques and mappings, an `RRef` that this process owns, and every
    other object by its attributes, in `__dict__` or in slots: data classes, nodes that are
    registered with torch's pytrees or optree, and plain objects. No code of theirs runs, so that
    properties are not read and iterators not used up. Modules, functions and classes are not
    entered, and neither are tensors.

    Args:
        output: anything; a cycle ends where it began.

    Example:
        >>> import torch
        >>> x, y = torch.zeros(1), torch.ones(1)
        >>> find_tensors({"loss": x, "parts": [(y, x), "no tensor"]})
        [tensor([0.]), tensor([1.])]
    """
    found: list[Tensor] = []
    # Keeps what was seen alive, so that nothing else can take its identity meanwhile.
    seen: dict[int, object] = {}
    open_parts: list[Iterator[Any]] = [iter((output,))]
    while open_parts:
        value = next(open_parts[-1], open_parts)
        if value is open_parts:  # the end of these parts
            open_parts.pop()
        elif id(value) not in seen and not isinstance(value, _NOT_ENTERED):
            seen[id(value)] = value
            if isinstance(value, Tensor):
                found.append(value)
            else:
                open_parts.append(_parts(value))
    return found


def _parts(value: Any) -> Iterator[Any]:
    """What an object holds: its elements if it is a collection, then its attributes."""
    if isinstance(value, _REMOTE_REFERENCE):
        return iter((value.local_value(),)) if value.is_owner() else iter(())
    return chain(_elements(value), _attributes(value))


def _elements(value: Any) -> Collection[Any]:
    # The built-in methods, whatever a subclass has made of them: a model's output may be a dict
    # that hides some of its items.
    if isinstance(value, dict):
        return dict.values(value)
    if isinstance(value, types.MappingProxyType):
        return value.values()
    for kind in _COLLECTIONS:
        if isinstance(value, kind):
            return list(kind.__iter__(value))
    return ()


def _attributes(value: Any) -> Iterator[Any]:
    for kind in type(value).__mro__:
        for slot in vars(kind).values():
            if isinstance(slot, types.MemberDescriptorType):
                yield from _in_slot(slot, value)
    own = getattr(value, "__dict__", None)
    if isinstance(own, Mapping):
        yield from list(own.values())


def _in_slot(slot: types.MemberDescriptorType, value: Any) -> tuple[Any, ...]:
    try:
        return (slot.__get__(value),)
    except AttributeError:  # it is empty
        return ()
