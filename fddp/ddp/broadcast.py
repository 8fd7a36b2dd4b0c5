"""Broadcast of a module's parameters and buffers.

Bits are broadcast: what ranks hold afterwards does not depend on `copy_` of a tensor's class, which
may round. Of a class that holds other tensors (`__tensor_flatten__`), these are broadcast.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Module

from fddp.collectives.replicas.broadcast import broadcast_, broadcast_parts
from fddp.collectives.replicas.digest import bytes_of
from fddp.core.protocol.differences import check_equal
from fddp.core.protocol.messages import MappingOf
from fddp.ddp.torch_private import DisableTorchFunctionSubclass, preserve_version_counter
from fddp.errors import DesyncError, FddpError, PlanMismatchError, error_text
from fddp.native import extension
from fddp.native.memory import is_dtensor, shares_elements, wrapper_kind
from fddp.runtime.agreement import exchange
from fddp.transport import Transport

_DESCRIPTIONS = MappingOf(str)  # dtype and shape, by name
_BUFFERS_ALIKE = "keep buffers alike on all ranks, or pass broadcast_buffers=False"


def broadcast_module(
    transport: Transport, module: Module, ignored: Collection[str], src: int, *, buffers: bool
) -> None:
    """Broadcast rank `src`'s parameters, and optionally its buffers, in place.

    Raises:
        PlanMismatchError: names, shapes, dtypes or devices differ between ranks; on every rank,
            before any broadcast.
        RuntimeError: a parameter or buffer can't be written: it is sparse, expanded, a DTensor or
            of another class that does not name the tensors it holds; on every rank.
    """
    own: dict[str, Tensor] = {
        name: param for name, param in module.named_parameters() if name not in ignored
    }
    if buffers:
        own |= buffers_of(module, ignored)
    parts = _parts(own)
    received = exchange(transport, _descriptions(own, parts), _DESCRIPTIONS, "module")
    way_out = "build the module alike on all ranks, or pass init_sync=False"
    _check_equal(received, way_out, PlanMismatchError)
    _check_writable(parts)
    broadcast_(transport, [*parts.values()], src)


def buffers_of(module: Module, ignored: Collection[str]) -> dict[str, Tensor]:
    """Return the module's current buffers, each once, by name. Forward may replace them."""
    return {name: buffer for name, buffer in module.named_buffers() if name not in ignored}


def broadcast_buffers(
    transport: Transport, module: Module, ignored: Collection[str], src: int
) -> None:
    """Broadcast rank `src`'s buffers. A collective call.

    Buffers are written in place, without a new version. A buffer whose values a graph of an earlier
    step still needs is replaced by a new tensor instead, unless other tensors of the module share
    its memory: then it is written with a new version, which makes such a graph raise an error.

    Raises:
        DesyncError: buffers differ between ranks in name, shape, dtype or layout; on every rank. If
            they have changed on this rank and not on rank `src`, on this rank.
        RuntimeError: as `broadcast_module`.
    """
    named = buffers_of(module, ignored)
    parts = _parts(named)
    received = _received(transport, named, parts, src)
    if transport.rank == src:
        return
    for (name, mine), value in zip(parts.items(), received, strict=True):
        buffer = named.get(name)
        if buffer is None:
            _write_inside(named, name, mine, value)
        elif _is_immutable(mine):
            _replace(module, buffer, value.clone())
        elif not _is_held(buffer, mine):
            with preserve_version_counter(buffer):
                mine.copy_(value)
        elif _is_shared(module, mine):
            mine.copy_(value)
        else:
            _replace(module, buffer, torch.empty_like(mine).copy_(value))


def _parts(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that hold the values, by name: each itself as a plain tensor, or in place
    of one of a class that holds other tensors, these."""
    found: dict[str, Tensor] = {}
    for name in sorted(named):  # ranks may have registered them in another order
        tensor = named[name]
        if extension.compiled.first_without_memory([tensor]) < 0:
            with DisableTorchFunctionSubclass():
                found[name] = Tensor.detach(tensor)
        elif hasattr(tensor, "__tensor_flatten__") and not is_dtensor(tensor):
            inner = {f"{name}.{part}": getattr(tensor, part) for part in _flattened(tensor)[0]}
            found |= _parts({part: value for part, value in inner.items() if value is not None})
        else:
            found[name] = tensor
    return found


def _flattened(tensor: Any) -> tuple[list[str], str]:
    """Return the names of the tensors inside of a wrapper, and its other values as text, without
    addresses of objects."""
    names, context = tensor.__tensor_flatten__()
    return names, re.sub(r" at 0x[0-9a-f]+", "", repr(context))


def _write_inside(named: Mapping[str, Tensor], part: str, mine: Tensor, value: Tensor) -> None:
    """Write a tensor inside of a buffer, unless it has the value.

    A graph may hold the buffer, whose new version then shows that it was written.
    """
    if torch.equal(bytes_of(mine), bytes_of(value)):
        return
    mine.copy_(value)
    for name, buffer in named.items():
        if part.startswith(f"{name}."):
            increment_version(buffer)


def _is_held(buffer: Tensor, own: Tensor) -> bool:
    """Return True if a graph refers to the memory, beside Python and the alias `own`."""
    in_graph = buffer._use_count() > 1  # type: ignore[attr-defined]
    return bool(in_graph) or extension.compiled.storage_use_count(own) > 2


def _is_shared(module: Module, own: Tensor) -> bool:
    """Return True if several parameters and buffers of the module are in the memory of `own`."""
    every = _parts(dict(module.named_parameters()) | dict(module.named_buffers())).values()
    address = own.untyped_storage().data_ptr()
    dense = [t for t in every if t.layout is torch.strided and not wrapper_kind(t)]
    return sum(t.untyped_storage().data_ptr() == address for t in dense) > 1


def _is_immutable(tensor: Tensor) -> bool:
    """Return True for a tensor that can't be written in place."""
    return tensor._is_zerotensor() or tensor.is_inference() or shares_elements(tensor)


def _replace(module: Module, buffer: Tensor, value: Tensor) -> None:
    for submodule in module.modules():
        for name, other in submodule._buffers.items():
            if other is buffer:
                submodule._buffers[name] = value


def _received(
    transport: Transport, named: Mapping[str, Tensor], parts: Mapping[str, Tensor], src: int
) -> list[Tensor]:
    """Return rank `src`'s buffers, which are compared across ranks if they have changed there.

    Backends hang, or abort the process, if sizes differ. So a rank whose buffers have changed takes
    part with tensors like those before, and rank `src` tells whether its own have changed.
    """
    if not parts:
        return []
    own = [*parts.values()]
    kinds = _kinds(own)
    now = [
        (name, kind, t.dtype, None if t.is_nested else t.shape, t.layout, t.device)
        for (name, t), kind in zip(parts.items(), kinds, strict=True)
    ]
    before: Any = transport.size_cache.get("buffers")
    if before is not None:
        has_changed = now != before
        sent = own
        if has_changed:
            sent = [torch.empty(s, dtype=d, device=at) for _, _, d, s, _, at in before]
        # On the CPU it is sent with the buffers. On another device, reading it would wait.
        place = transport.control_device
        flag = torch.full((1,), int(has_changed), dtype=sent[0].dtype, device=place)
        changed, *received = broadcast_parts(transport, [flag, *sent], src)
        if not changed.item():
            if has_changed:
                there = {name: t for (name, *_), t in zip(before, sent, strict=True)}
                error = _changed_error(transport.rank, _described(parts), src, _described(there))
                transport.abandon(error_text(error))  # the others go on, and wait in backward
                raise error
            return received
    descriptions = exchange(transport, _descriptions(named, parts), _DESCRIPTIONS, "buffers")
    _check_equal(descriptions, _BUFFERS_ALIKE, DesyncError)
    _check_writable(parts)
    transport.size_cache["buffers"] = now
    return broadcast_parts(transport, own, src)


def _kinds(tensors: Sequence[Tensor]) -> list[str]:
    if extension.compiled.first_without_memory(tensors) < 0:
        return [""] * len(tensors)
    return [*map(wrapper_kind, tensors)]


def _changed_error(rank: int, here: dict[str, str], src: int, there: dict[str, str]) -> DesyncError:
    name = next((n for n in sorted({*here, *there}) if here.get(n) != there.get(n)), None)
    if name is None:
        return DesyncError(
            f"the module's buffers were moved to another device on rank {rank}, and not on rank "
            f"{src}; {_BUFFERS_ALIKE}",
            ranks=(rank,),
        )
    return DesyncError(
        f"{name!r} of the module is {here.get(name, 'missing')} on rank {rank} and "
        f"{there.get(name, 'missing')} on rank {src}; {_BUFFERS_ALIKE}",
        path=name,
        ranks=(rank,),
    )


def _check_writable(parts: Mapping[str, Tensor]) -> None:
    """Raise for a tensor that rank `src`'s values can't be written to."""
    for name, tensor in parts.items():
        obstacle = _obstacle(tensor)
        if not obstacle:
            continue
        ignore = "name it in _set_params_and_buffers_to_ignore_for_model"
        if obstacle == str(tensor.layout):
            raise RuntimeError(
                f"No support for sparse tensors. {name!r} of the module has the layout "
                f"{obstacle}; make it dense, or {ignore}"
            )
        raise RuntimeError(
            f"{name!r} of the module is {obstacle}, which can't be written as it stands on rank 0; "
            f"replace it by a plain tensor of its own (clone()), or {ignore}"
        )


def _obstacle(tensor: Tensor) -> str:
    """Reason why a tensor can't be written bit by bit, or ""."""
    kind = wrapper_kind(tensor)
    if kind:
        return f"a {kind}"
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    if tensor._is_zerotensor():
        return "a zero tensor"
    if tensor.is_inference():
        return "an inference tensor"
    return f"expanded (strides {tensor.stride()})" if shares_elements(tensor) else ""


def _descriptions(named: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> dict[str, str]:
    """Describe all that must be equal on all ranks, by name."""
    wrappers = {
        name: f"a {type(tensor).__name__} {_flattened(tensor)[1]}"
        for name, tensor in named.items()
        if name not in parts
    }
    return wrappers | _described(parts)


def _described(parts: Mapping[str, Tensor]) -> dict[str, str]:
    """Describe tensors by name. Further devices of one type are numbered by their first appearance,
    because ranks have other devices."""
    devices = [*dict.fromkeys(part.device for part in parts.values())]
    found = {}
    for name, part in parts.items():
        alike = [device for device in devices if device.type == part.device.type]
        number = alike.index(part.device)
        place = "" if part.is_cpu else f" on {part.device.type}{f'#{number}' if number else ''}"
        shape = "" if part.is_nested else f" {tuple(part.shape)}"
        obstacle = _obstacle(part)
        found[name] = f"{part.dtype}{shape}{place}{obstacle and ', '}{obstacle}"
    return found


def _check_equal(received: list[dict[str, str]], way_out: str, error: type[FddpError]) -> None:
    for name in sorted(set().union(*received)):
        found = [shapes.get(name, "missing") for shapes in received]
        check_equal(f"{name!r} of the module", found, way_out, error)
