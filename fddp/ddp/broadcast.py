"""Broadcast of a module's parameters and buffers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fddp.collectives.replicas.broadcast import broadcast_, broadcast_parts
from fddp.core.protocol.differences import check_equal
from fddp.core.protocol.messages import MappingOf
from fddp.ddp.torch_private import preserve_version_counter
from fddp.errors import DesyncError, FddpError, PlanMismatchError
from fddp.native import extension
from fddp.runtime.agreement import exchange
from fddp.transport import Transport

_SHAPES = MappingOf(str)  # dtype and shape, by name
_BUFFERS_ALIKE = "keep buffers alike on all ranks, or pass broadcast_buffers=False"


def broadcast_module(
    transport: Transport, module: Module, ignored: Collection[str], src: int, *, buffers: bool
) -> None:
    """Broadcast rank `src`'s parameters, and optionally its buffers, in place.

    Raises:
        PlanMismatchError: names, shapes or dtypes differ between ranks; on every rank, before any
            broadcast.
        RuntimeError: a parameter or buffer is a sparse tensor.
    """
    own: dict[str, Tensor] = {
        name: param for name, param in module.named_parameters() if name not in ignored
    }
    if buffers:
        own |= buffers_of(module, ignored)
    names = sorted(own)  # ranks may have registered them in another order
    tensors = [own[name].detach() for name in names]
    received = exchange(transport, _shapes(names, tensors), _SHAPES, "module")
    way_out = "build the module alike on all ranks, or pass init_sync=False"
    _check_equal(received, way_out, PlanMismatchError)
    _check_dense(names, tensors)
    broadcast_(transport, tensors, src)


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
        RuntimeError: a buffer is a sparse tensor.
    """
    named = buffers_of(module, ignored)
    names = sorted(named)
    own = [named[name].detach() for name in names]
    received = _received(transport, names, own, src)
    if transport.rank == src:
        return
    for name, mine, value in zip(names, own, received, strict=True):
        buffer = named[name]
        if not _is_held(buffer, mine):
            with preserve_version_counter(buffer):
                mine.copy_(value)
        elif _is_shared(module, mine):
            mine.copy_(value)
        else:
            _replace(module, buffer, torch.empty_like(mine).copy_(value))


def _is_held(buffer: Tensor, own: Tensor) -> bool:
    """Return True if a graph refers to the memory, beside Python and the alias `own`."""
    in_graph = buffer._use_count() > 1  # type: ignore[attr-defined]
    return bool(in_graph) or extension.compiled.storage_use_count(own) > 2


def _is_shared(module: Module, own: Tensor) -> bool:
    """Return True if several parameters and buffers of the module are in the memory of `own`."""
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.layout is torch.strided]
    address = own.untyped_storage().data_ptr()
    return sum(t.untyped_storage().data_ptr() == address for t in tensors) > 1


def _replace(module: Module, buffer: Tensor, value: Tensor) -> None:
    for submodule in module.modules():
        for name, other in submodule._buffers.items():
            if other is buffer:
                submodule._buffers[name] = value


def _received(transport: Transport, names: list[str], own: list[Tensor], src: int) -> list[Tensor]:
    """Return rank `src`'s buffers, which are compared across ranks if they have changed there.

    Backends hang, or abort the process, if sizes differ. So a rank whose buffers have changed takes
    part with tensors like those before, and rank `src` tells whether its own have changed.
    """
    if not own:
        return []
    now = [(n, t.dtype, t.shape, t.layout, t.device) for n, t in zip(names, own, strict=True)]
    before: Any = transport.size_cache.get("buffers")
    if before is not None:
        has_changed = now != before
        sent = own
        if has_changed:
            sent = [torch.empty(s, dtype=dtype, device=device) for _, dtype, s, _, device in before]
        # On the CPU it is sent with the buffers. On another device, reading it would wait.
        place = transport.control_device
        flag = torch.full((1,), int(has_changed), dtype=sent[0].dtype, device=place)
        changed, *received = broadcast_parts(transport, [flag, *sent], src)
        if not changed.item():
            if has_changed:
                there = _shapes([name for name, *_ in before], sent)
                raise _changed_error(transport.rank, _shapes(names, own), src, there)
            return received
    shapes = exchange(transport, _shapes(names, own), _SHAPES, "buffers")
    _check_equal(shapes, _BUFFERS_ALIKE, DesyncError)
    _check_dense(names, own)
    transport.size_cache["buffers"] = now
    return broadcast_parts(transport, own, src)


def _changed_error(rank: int, here: dict[str, str], src: int, there: dict[str, str]) -> DesyncError:
    name = next(n for n in sorted({*here, *there}) if here.get(n) != there.get(n))
    return DesyncError(
        f"{name!r} of the module is {here.get(name, 'missing')} on rank {rank} and "
        f"{there.get(name, 'missing')} on rank {src}; {_BUFFERS_ALIKE}",
        path=name,
        ranks=(rank,),
    )


def _check_dense(names: list[str], tensors: list[Tensor]) -> None:
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.layout is not torch.strided:
            raise RuntimeError(
                f"No support for sparse tensors. {name!r} of the module has the layout "
                f"{tensor.layout}; make it dense, or name it in "
                f"_set_params_and_buffers_to_ignore_for_model"
            )


def _shapes(names: list[str], tensors: list[Tensor]) -> dict[str, str]:
    pairs = zip(names, tensors, strict=True)
    return {name: _shape(tensor) for name, tensor in pairs}


def _shape(tensor: Tensor) -> str:
    text = f"{tensor.dtype} {tuple(tensor.shape)}"
    return text if tensor.layout is torch.strided else f"{text}, {tensor.layout}"


def _check_equal(received: list[dict[str, str]], way_out: str, error: type[FddpError]) -> None:
    for name in sorted(set().union(*received)):
        found = [shapes.get(name, "missing") for shapes in received]
        check_equal(f"{name!r} of the module", found, way_out, error)
