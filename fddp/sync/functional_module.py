"""Modules as pure functions of their parameters and buffers.

[Note: vacant slots]
`apply` runs a private copy of the module, whose dictionaries have the caller's tensors during the
call only. At other times they have placeholders that raise when used. Code that runs parts of the
module again later, such as checkpointing within it, therefore raises an error instead of using the
tensors of another call, which would silently give wrong gradients.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Mapping
from itertools import repeat
from operator import is_, setitem
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module, RNNBase
from torch.nn.parameter import is_lazy

from fddp.core.entrance import entrance
from fddp.core.text import counted
from fddp.errors import FddpError, ReentryError, TreeMismatchError
from fddp.native.untraced import untraced
from fddp.tree.pytree import flatten

_Tensors: TypeAlias = Mapping[str, Tensor]
#: place of a tensor: a dictionary of a module, and a key
_Slot: TypeAlias = tuple[dict[str, Any], str]

_MAX_NAMES_SHOWN = 5
_IN_A_GRAPH = "call torch.func.functional_call in a full graph"


class Functional(NamedTuple):
    """A module as a function.

    Attributes:
        apply: `apply(params, buffers, *args, **kwargs) -> (output, buffers)`; see `Apply`.
        params: the module's own parameters, by name.
        buffers: the module's own buffers, by name.
    """

    apply: Apply
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]


@entrance
def functionalize(module: Module) -> Functional:
    """Return a module as a pure function of its parameters and buffers.

    The function has the module's current structure, hooks, and training or evaluation mode. Later
    changes to the module have no effect on it.

    Args:
        module: a module that can be deep-copied. Neither the module nor its tensors are written.

    Returns:
        `(apply, params, buffers)`. The two dicts have the module's own tensors, under the names of
        `named_parameters` and `named_buffers`. A tied tensor has one name; the tensor passed for it
        is used in all its places.

    Raises:
        TypeError: the module can't be copied, is compiled to TorchScript, or has uninitialized
            lazy parameters.

    Example:
        >>> import fddp, torch
        >>> apply, params, buffers = fddp.functionalize(torch.nn.BatchNorm1d(2))
        >>> output, new = apply(params, buffers, torch.tensor([[0.0, 2.0], [2.0, 6.0]]))
        >>> new["running_mean"], buffers["running_mean"]
        (tensor([0.1000, 0.4000]), tensor([0., 0.]))
        >>> sorted(params)
        ['bias', 'weight']
    """
    _check_copyable(module)
    params: dict[str, Tensor] = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    skeleton = _skeleton(module, (*params.values(), *buffers.values()))
    param_slots = _slots(skeleton, "_parameters", params)
    buffer_slots = _slots(skeleton, "_buffers", buffers)
    return Functional(Apply(skeleton, param_slots, buffer_slots), params, buffers)


class Apply:
    """A module as a pure function of its parameters and buffers; made by `functionalize`.

    Args of a call:
        params: tensors to use for the module's parameters, by name.
        buffers: tensors to use for its buffers, by name. Not written: the module uses copies.
        *args, **kwargs: arguments of the module.

    Returns of a call:
        `(output, buffers)`: the module's output, and new tensors with its buffers after the call.

    Raises of a call:
        TreeMismatchError: a name is missing or unexpected, or its value is None.
        ReentryError: another thread is within a call of the same function.
        FddpError: a part of the module ran again after the call had ended.
        Exception: an error of the module.

    Calls may be nested, and made within `torch.func` transforms. `torch.compile` compiles the
    module's code, not the call itself. To recompute parts of a module in backward, functionalize
    each part, and checkpoint the calls:
    `checkpoint(apply, params, buffers, x, use_reentrant=False)`.
    """

    def __init__(
        self,
        skeleton: Module,
        params: Mapping[str, list[_Slot]],
        buffers: Mapping[str, list[_Slot]],
    ) -> None:
        self._skeleton = skeleton
        self._params = _Places(params)
        self._buffers = _Places(buffers)
        self._listing = [m for m in skeleton.modules() if isinstance(m, RNNBase)]
        self._lock = threading.RLock()
        self._vacate()

    def __repr__(self) -> str:
        return (
            f"Apply({type(self._skeleton).__name__}, "
            f"{counted(len(self._params.names), 'parameter')}, "
            f"{counted(len(self._buffers.names), 'buffer')})"
        )

    # Dynamo would trace into the bookkeeping; the module's own code stays compiled.
    @entrance
    @untraced(_IN_A_GRAPH, callees=False)
    def __call__(
        self, params: _Tensors, buffers: _Tensors, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """Call the module; see the class."""
        given = _in_order(params, self._params.names, "params")
        passed = _in_order(buffers, self._buffers.names, "buffers")
        if not self._lock.acquire(blocking=False):
            raise ReentryError(
                f"{self!r} was called while another thread is within a call of it; functionalize "
                f"the module in each thread"
            )
        try:
            # Of an enclosing call, if this one is nested.
            outer = self._params.get(), self._buffers.get()
            try:
                # All are copied: batch normalisation writes buffers without raising their versions.
                copies = [buffer.clone() for buffer in passed]
                self._params.set(given)
                self._buffers.set(copies)
                output = self._skeleton(*args, **kwargs)
                left = self._buffers.get()
            finally:
                self._params.set(outer[0])
                self._buffers.set(outer[1])
                self._refresh_flat_weights()
        finally:
            self._lock.release()
        return output, dict(zip(self._buffers.names, left, strict=True))

    def _vacate(self) -> None:
        """See [Note: vacant slots]."""
        text = (
            "{} of a functionalized module was used outside of apply, for instance by a checkpoint "
            "within the module, which backward computes again; functionalize the checkpointed part "
            "separately, and checkpoint the call: "
            "checkpoint(apply_part, params, buffers, x, use_reentrant=False)"
        )
        for kind, places in (("parameter", self._params), ("buffer", self._buffers)):
            places.set([UnboundSlot(text.format(f"{kind} {name!r}")) for name in places.names])
        self._refresh_flat_weights()

    def _refresh_flat_weights(self) -> None:
        """Update the lists in which recurrent modules keep their parameters as well."""
        for module in self._listing:
            module._init_flat_weights()


class UnboundSlot:
    """Placeholder for a tensor that raises when used."""

    def __init__(self, text: str) -> None:
        self._text = text

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> NoReturn:
        leaves, _ = flatten((args, kwargs or {}))
        raise FddpError(next(leaf._text for leaf in leaves if isinstance(leaf, UnboundSlot)))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise FddpError(self._text)


class _Places:
    """Slots of tensors, each of which may have several. The loops use built-in functions, because
    they run for every parameter in every call."""

    def __init__(self, slots: Mapping[str, list[_Slot]]) -> None:
        self.names = list(slots)
        firsts = [places[0] for places in slots.values()]
        self._dicts = [slots for slots, _ in firsts]
        self._keys = [key for _, key in firsts]
        self._more = [(i, slot) for i, places in enumerate(slots.values()) for slot in places[1:]]

    def get(self) -> list[Any]:
        """Return the value of the first slot of each tensor."""
        return list(map(dict.get, self._dicts, self._keys))

    def set(self, values: list[Any]) -> None:
        """Set all slots of each tensor."""
        deque(map(setitem, self._dicts, self._keys, values), maxlen=0)
        for i, (slots, key) in self._more:
            slots[key] = values[i]


def _in_order(given: _Tensors, names: list[str], what: str) -> list[Tensor]:
    """Return the tensors in the order of the names; errors as for `Apply`."""
    if list(given) == names:
        values = list(given.values())
    elif given.keys() == set(names):
        values = [given[name] for name in names]
    else:
        missing = [name for name in names if name not in given]
        unexpected = [name for name in given if name not in set(names)]
        raise TreeMismatchError(
            f"{what} has {counted(len(given), 'name')} where the module has {len(names)}; missing: "
            f"{_some(missing)}; unexpected: {_some(unexpected)}. Pass a dict like the one that "
            f"functionalize returned"
        )
    if any(map(is_, values, repeat(None))):
        name = names[next(i for i, value in enumerate(values) if value is None)]
        raise TreeMismatchError(f"{what} has None for {name!r}, where the module has a tensor")
    return values


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:_MAX_NAMES_SHOWN])) or "none"
    more = len(names) - _MAX_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _check_copyable(module: Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{type(module).__name__} is compiled to TorchScript, whose parameters can't be "
            f"replaced; functionalize the original module"
        )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise TypeError(
                f"{name!r} has no shape yet; call the module once on an input before it is "
                f"functionalized"
            )


def _skeleton(module: Module, tensors: tuple[Tensor, ...]) -> Module:
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    for submodule in module.modules():
        for value in vars(submodule).values():
            # Older parametrizations store tensors with a graph, which can't be copied.
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise TypeError(
            f"a {type(module).__name__} can't be functionalized, because it can't be copied: "
            f"{error}"
        ) from error


def _slots(skeleton: Module, table: str, tensors: Mapping[str, Tensor]) -> dict[str, list[_Slot]]:
    name_of = {id(tensor): name for name, tensor in tensors.items()}
    places: dict[str, list[_Slot]] = {name: [] for name in tensors}
    for submodule in skeleton.modules():
        slots: dict[str, Any] = getattr(submodule, table)
        for key, tensor in slots.items():
            if tensor is not None:
                places[name_of[id(tensor)]].append((slots, key))
    return places
