"""Parameters and buffers of a module, brought to one rank's values."""

from __future__ import annotations

from collections.abc import Collection
from itertools import zip_longest

from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn import Module

from fddp.agree import exchange
from fddp.collectives.broadcast import broadcast_, broadcast_tensors
from fddp.errors import DesyncError
from fddp.pack import storage_use_count
from fddp.transports import Transport


def broadcast_module(
    transport: Transport, module: Module, ignored: Collection[str], src: int, *, buffers: bool
) -> None:
    """Writes rank `src`'s parameters, and buffers if wanted, into those of all ranks."""
    own_params = (param for name, param in module.named_parameters() if name not in ignored)
    own_buffers = buffers_of(module, ignored).values() if buffers else ()
    broadcast_(transport, [tensor.detach() for tensor in (*own_params, *own_buffers)], src)


def buffers_of(module: Module, ignored: Collection[str]) -> dict[str, Tensor]:
    """The buffers as they are now, each once, by name; forward may put others in their places."""
    return {name: buffer for name, buffer in module.named_buffers() if name not in ignored}


def broadcast_buffers(
    transport: Transport, module: Module, ignored: Collection[str], src: int
) -> None:
    """Brings buffers to rank `src`'s values; a collective call.

    They stay the same tensors, written without a new version, unless a graph still needs the values
    of a step before: then new tensors take their places.
    """
    named = buffers_of(module, ignored)
    own = [buffer.detach() for buffer in named.values()]
    received = _broadcast(transport, own, src)
    for buffer, mine, value in zip(named.values(), own, received, strict=True):
        if value is mine:
            continue
        if _is_held(buffer, mine):
            _replace(module, buffer, value)
        else:
            with _unsafe_preserve_version_counter(buffer):
                mine.copy_(value)


def _is_held(buffer: Tensor, own: Tensor) -> bool:
    """Whether more than Python, and the alias that was made here, refers to the memory."""
    in_graph = buffer._use_count() > 1  # type: ignore[attr-defined]
    return bool(in_graph) or storage_use_count(own) > 2


def _replace(module: Module, buffer: Tensor, value: Tensor) -> None:
    for submodule in module.modules():
        for name, other in submodule._buffers.items():
            if other is buffer:
                submodule._buffers[name] = value


def _broadcast(transport: Transport, tensors: list[Tensor], src: int) -> list[Tensor]:
    """Rank `src`'s values; on that rank, the tensors themselves."""
    _check_alike(transport, tensors)
    values = broadcast_tensors(transport, tensors, src)
    return tensors if transport.rank == src else values


def _check_alike(transport: Transport, tensors: list[Tensor]) -> None:
    """Compares the shapes of buffers over ranks when they are no longer those of before: backends
    end the process where sizes differ.

    Raises:
        DesyncError: they differ; on every rank.
    """
    shapes = [(str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors]
    if transport.agreed.get("buffers") == shapes:
        return
    told = exchange(transport, [f"{dtype} {shape}" for dtype, shape in shapes], [str], "buffers")
    for rank, theirs in enumerate(told):
        if theirs != told[0]:
            pairs = enumerate(zip_longest(told[0], theirs, fillvalue="none"))
            number, (mine, other) = next((k, pair) for k, pair in pairs if pair[0] != pair[1])
            raise DesyncError(
                f"buffer {number} of a module is {mine} on rank 0 and {other} on rank {rank}; keep "
                f"buffers alike on all ranks, or pass broadcast_buffers=False"
            )
    transport.agreed["buffers"] = shapes
