"""Tensors in the output of a module, of any type.

A backward pass enters the module through these tensors, so all of them need hooks. The hooks are
set on the tensors themselves. Callers get the object that their module returned.
"""

from __future__ import annotations

import types
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

import torch.distributed.rpc as rpc
from torch import Tensor, nn

_REMOTE_REFERENCE: Any = getattr(rpc, "RRef", ())  # torch can be built without RPC
_COLLECTIONS: tuple[Any, ...] = (list, tuple, set, frozenset, deque)

# Types without tensors, or with far more than one output.
_NOT_ENTERED = (
    *(type(None), bool, int, float, complex, str, bytes, type),
    *(nn.Module, types.ModuleType, types.FunctionType, types.BuiltinFunctionType),
    # Their frames, which lead to globals, are plain attributes on Python 3.10.
    *(types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType),
)

_HIDDEN = (
    "this module returns a {}, which hides its tensors from DistributedDataParallel; backward() "
    "averages gradients as usual, but torch.autograd.grad for parameters returns this rank's own "
    "without an error; return the tensors themselves, or use fddp.GradSync"
)
_TO_CALLER = 8  # frames from the warning to the call of the module


def find_tensors(output: Any) -> list[Tensor]:
    """Return every tensor in an output, each once, in the order of traversal.

    Traverses lists, tuples, sets, deques, mappings, an `RRef` that this process owns, and the
    attributes of every other object, in `__dict__` or slots: data classes, registered pytree nodes
    and plain objects. No code of these objects runs: properties are not read and iterators not
    consumed. Modules, functions, classes and tensors are not traversed.

    Args:
        output: any object, also with cycles.

    Example:
        >>> import torch
        >>> x, y = torch.zeros(1), torch.ones(1)
        >>> find_tensors({"loss": x, "parts": [(y, x), "no tensor"]})
        [tensor([0.]), tensor([1.])]
    """
    if isinstance(output, Tensor):
        return [output]
    found: list[Tensor] = []
    # Holds the visited objects, so that their ids are not reused.
    seen: dict[int, object] = {}
    open_parts: list[Iterator[Any]] = [iter((output,))]
    while open_parts:
        value = next(open_parts[-1], open_parts)
        if value is open_parts:  # exhausted
            open_parts.pop()
        elif id(value) not in seen and not isinstance(value, _NOT_ENTERED):
            seen[id(value)] = value
            if isinstance(value, Tensor):
                found.append(value)
            else:
                open_parts.append(_parts(value))
    return found


def warn_if_hidden(output: Any) -> None:
    """Warn of an output without visible tensors that may compute some: a function or iterator."""
    is_function = callable(output) and not isinstance(output, (type, nn.Module))
    if is_function or isinstance(output, Iterator):
        warnings.warn(_HIDDEN.format(type(output).__name__), stacklevel=_TO_CALLER)


def _parts(value: Any) -> Iterator[Any]:
    """Return the elements of a collection, then the attributes of any object."""
    if isinstance(value, _REMOTE_REFERENCE):
        return iter((value.local_value(),)) if value.is_owner() else iter(())
    return chain(_elements(value), _attributes(value))


def _elements(value: Any) -> Collection[Any]:
    # Built-in methods, because a subclass may hide some of its items.
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
                with suppress(AttributeError):  # unset
                    yield slot.__get__(value)
    own = getattr(value, "__dict__", None)
    if isinstance(own, Mapping):
        yield from list(own.values())
