"""From a module to a function of its parameters and buffers.

[Note: vacant slots]
`apply` runs a private copy of the module whose dictionaries hold the caller's tensors for as long
as the call lasts. At all other times they hold stand-ins that raise when they are used. What runs
parts of the module again later, as checkpointing within it does, therefore meets an error and never
the tensors of another call, which would give wrong gradients without a word.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from operator import is_, setitem
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module, RNNBase
from torch.nn.parameter import is_lazy

from fddp.errors import FddpError, ReentryError, TreeMismatchError

_Tensors: TypeAlias = Mapping[str, Tensor]
#: a place for a tensor: a module's own dictionary, and the key there
_Slot: TypeAlias = tuple[dict[str, Any], str]

_MAX_NAMES_SHOWN = 5


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


def functionalize(module: Module) -> Functional:
    """Makes a function of a module's parameters and buffers.

    It stands for the module as it is now: with its structure, its hooks, and in its mode of
    training or evaluation. Later changes to the module do not reach it.

    Args:
        module: any that can be deep-copied. Neither it nor its tensors are ever written.

    Returns:
        `(apply, params, buffers)`. The two dicts hold the module's own tensors, under the names of
        `named_parameters` and `named_buffers`: a tensor that is used in several places has one
        name, and what is passed for it is used in all of them.

    Raises:
        TypeError: the module can't be copied, is compiled to TorchScript, or has lazy parameters
            whose shapes are not known yet.

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
        params: a tensor for each name, in place of the module's parameter; any tensors that the
            module can compute with.
        buffers: the same for its buffers. They are not written: the module works on copies.
        *args, **kwargs: the module's own.

    Returns of a call:
        `(output, buffers)`: what the module returned, and its buffers afterwards, new tensors.

    Raises of a call:
        TreeMismatchError: a name is missing, unexpected, or has no tensor.
        ReentryError: another thread is within a call of the same function.
        FddpError: a part of the module ran again after the call had ended.
        Exception: what the module raised.

    Calls may be nested, and made within `torch.func` transforms. `torch.compile` compiles what the
    module does, not the call itself. To recompute parts of a module in backward, functionalize
    these parts by themselves, and checkpoint the calls:
    `checkpoint(apply, params, buffers, x, use_reentrant=False)`.
    """

    def __init__(
        self,
        skeleton: Module,
        params: Mapping[str, list[_Slot]],
        buffers: Mapping[str, list[_Slot]],
    ) -> None:
        self._skeleton = skeleton
        self._param_names = list(params)
        self._buffer_names = list(buffers)
        self._params = _Places(params)
        self._buffers = _Places(buffers)
        self._listing = [m for m in skeleton.modules() if isinstance(m, RNNBase)]
        self._lock = threading.RLock()
        self._vacate()

    def __repr__(self) -> str:
        return (
            f"Apply({type(self._skeleton).__name__}, {len(self._param_names)} parameters, "
            f"{len(self._buffer_names)} buffers)"
        )

    # Dynamo would trace into the bookkeeping; the module's own code stays compiled.
    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def __call__(
        self, params: _Tensors, buffers: _Tensors, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """See the class."""
        given = _in_order(params, self._param_names, "params")
        passed = _in_order(buffers, self._buffer_names, "buffers")
        if not self._lock.acquire(blocking=False):
            raise ReentryError(
                f"{self!r} was called while another thread is within a call of it; functionalize "
                f"the module in each thread"
            )
        try:
            # What a call that this one is nested in has put there.
            outer = self._params.get(), self._buffers.get()
            try:
                # All of them: batch normalisation writes its own without raising their versions.
                copies = [buffer.clone() for buffer in passed]
                self._params.set(given)
                self._buffers.set(copies)
                output = self._skeleton(*args, **kwargs)
                left = self._buffers.get()
            finally:
                self._params.set(outer[0])
                self._buffers.set(outer[1])
                self._list_anew()
        finally:
            self._lock.release()
        return output, dict(zip(self._buffer_names, left, strict=True))

    def _vacate(self) -> None:
        """See [Note: vacant slots]."""
        text = (
            "{} of a functionalized module was used outside of apply, as in a checkpoint within "
            "the module, which backward computes again; functionalize the part that is "
            "checkpointed by itself, and checkpoint the call: "
            "checkpoint(apply_part, params, buffers, x, use_reentrant=False)"
        )
        self._params.set([UnboundSlot(text.format(f"parameter {n!r}")) for n in self._param_names])
        self._buffers.set([UnboundSlot(text.format(f"buffer {n!r}")) for n in self._buffer_names])
        self._list_anew()

    def _list_anew(self) -> None:
        """Recurrent modules keep their parameters in a list, too, which would hold on to those of
        this call."""
        for module in self._listing:
            module._init_flat_weights()


class UnboundSlot:
    """Stands where a tensor belongs, and raises when it is used for one."""

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
        raise FddpError(
            next(v._text for v in _flat((args, kwargs or {})) if isinstance(v, UnboundSlot))
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise FddpError(self._text)


class _Places:
    """The slots of some tensors, each of which may have several. Loops are those of built-in
    functions: they run for every parameter in every call."""

    def __init__(self, slots: Mapping[str, list[_Slot]]) -> None:
        firsts = [places[0] for places in slots.values()]
        self._dicts = [slots for slots, _ in firsts]
        self._keys = [key for _, key in firsts]
        self._more = [(i, slot) for i, places in enumerate(slots.values()) for slot in places[1:]]

    def get(self) -> list[Any]:
        """What is in the slots; the first of each."""
        return list(map(dict.get, self._dicts, self._keys))

    def set(self, values: list[Any]) -> None:
        """Puts a value into all slots of each."""
        deque(map(setitem, self._dicts, self._keys, values), maxlen=0)
        for i, (slots, key) in self._more:
            slots[key] = values[i]


def _in_order(given: _Tensors, names: list[str], what: str) -> list[Tensor]:
    """The tensors in the order of the names.

    Raises:
        TreeMismatchError: see `Apply`.
    """
    if list(given) == names:
        values = list(given.values())
    elif given.keys() == set(names):
        values = [given[name] for name in names]
    else:
        missing = [name for name in names if name not in given]
        unexpected = [name for name in given if name not in set(names)]
        raise TreeMismatchError(
            f"{what} has {len(given)} names where the module has {len(names)}; missing: "
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


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _check_copyable(module: Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{type(module).__name__} is compiled to TorchScript, whose parameters can't be "
            f"replaced; functionalize the module that it was made from"
        )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise TypeError(
                f"{name!r} has no shape yet; call the module once on an input, and functionalize "
                f"it then"
            )


def _skeleton(module: Module, tensors: tuple[Tensor, ...]) -> Module:
    """A copy of a module with the very same tensors in it."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    for submodule in module.modules():
        for value in vars(submodule).values():
            # What older parametrizations compute in each forward has a graph, and can't be copied.
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
    """For each tensor, all places in a module's dictionaries that hold it."""
    name_of = {id(tensor): name for name, tensor in tensors.items()}
    places: dict[str, list[_Slot]] = {name: [] for name in tensors}
    for submodule in skeleton.modules():
        slots: dict[str, Any] = getattr(submodule, table)
        for key, tensor in slots.items():
            if tensor is not None:
                places[name_of[id(tensor)]].append((slots, key))
    return places
