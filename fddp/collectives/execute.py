"""Operators on plain tensors: meet, pack into buckets, communicate, hand out.

Nothing here is differentiated. Under tracing the same is written into the graph as operators of
`torch.library` (`graph_ops.py`), which come back here when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fddp.collectives import handshake
from fddp.collectives.calls import Call
from fddp.collectives.operator_program import Load
from fddp.errors import FddpError
from fddp.native.operands import first_without_memory
from fddp.native.pack import pack_, slices
from fddp.telemetry.flight.dump import dump_on_failure
from fddp.transport import Work


def run_eagerly(call: Call, leaves: Sequence[Tensor | None]) -> list[Tensor]:
    """Carries a call out; a collective call of the ranks of its place.

    Args:
        call: what to do.
        leaves: plain tensors, one for each unit; None for zeros. Not written.

    Returns:
        New tensors, one for each unit: units, or for `all_gather` and `pmax` all ranks' units along
        a new leading axis.

    Raises:
        DesyncError, PeerError: ranks are in different operators, or one can't take part; on all.
        RankLostError, SyncTimeoutError, ClosedError: the transport failed.
    """
    grad = torch.no_grad() if torch.is_grad_enabled() else nullcontext()
    inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    with inference, grad, call.communicator.lock:
        if first_without_memory(leaves) >= 0:
            # Forward mode makes zeros without memory.
            leaves = [None if leaf is None or leaf._is_zerotensor() else leaf for leaf in leaves]
            position = first_without_memory(leaves)
            if position >= 0:
                _refuse(call, leaves[position], position)
        try:
            return _run(call, leaves)
        except FddpError as error:
            call.communicator.recorder.fail()
            dump_on_failure(error)
            raise
        except BaseException as error:
            call.communicator.recorder.fail()
            # The others have been told that this rank takes part.
            call.communicator.transport.close()
            raise error


def spread(results: Sequence[Any], positions: Sequence[int], count: int) -> list[Any]:
    """Results at their positions, and None elsewhere."""
    whole: list[Any] = [None] * count
    for k, result in zip(positions, results, strict=True):
        whole[k] = result
    return whole


def _refuse(call: Call, leaf: Tensor | None, position: int) -> NoReturn:
    found = type(leaf)
    kind = (
        "a batch of torch's former vmap (is_grads_batched=, vectorize=); use torch.func.vmap or "
        "jacrev instead"
        if found in (Tensor, torch.nn.Parameter)
        else f"a {found.__module__}.{found.__qualname__}, which dispatches by itself; pass a plain "
        f"tensor (of a DTensor, its to_local())"
    )
    path = call.program.units[position].path
    problem = f"{call.program.operator}: leaf {path!r} is {kind}"
    handshake.refuse(call.communicator, call.program.place, call.text, TypeError(problem))


class _Flight(NamedTuple):
    """One load on its way."""

    load: Load
    buffer: Tensor
    work: Work


def _run(call: Call, leaves: Sequence[Tensor | None]) -> list[Tensor]:
    program, memory = call.program, call.communicator.memory
    pack, start, take = _MOVES[program.operator]
    entry = call.communicator.recorder.launched(call.text, -1, -1)
    met = handshake.begin(call)
    packed = _packed_first(call, leaves) if met is not None else None
    entry.waited_s = perf_counter()
    if met is not None:
        met.settle()
    number = call.communicator.met(program.place)
    if not call.roles:
        call.application.number = number
    flights: list[_Flight] = []
    for load in program.loads:
        if packed is None:
            packed = pack(call, load, [leaves[k] for k in load.members])
        is_last = load is program.loads[-1]
        flights.append(_Flight(load, packed, start(call, load, packed, is_last)))
        packed = None
    results: list[Tensor | None] = [None] * len(program.units)
    for load, buffer, work in flights:
        work.wait(call.text)
        for k, result in zip(load.members, take(call, load, buffer), strict=True):
            results[k] = result
        memory.lend(buffer)
    entry.done_s = perf_counter()
    return results  # type: ignore[return-value]  # each unit is in one load


def _packed_first(call: Call, leaves: Sequence[Tensor | None]) -> Tensor | None:
    """The first load, packed while the others are told what this rank is about to do."""
    if not call.program.loads:
        return None
    load = call.program.loads[0]
    return _MOVES[call.program.operator].pack(call, load, [leaves[k] for k in load.members])


# Packing


def _acquire(call: Call, load: Load, numel: int) -> Tensor:
    return call.communicator.memory.acquire(numel, load.dtype, load.device)


def _fill(buffer: Tensor, load: Load, sources: Sequence[Tensor | None]) -> None:
    """One rank's units, from the start of `buffer`."""
    if load.layout is not None:
        pack_(buffer, load.layout, sources)
        return
    end = 0
    for source, numel in zip(sources, load.numels, strict=True):
        part = buffer[end : end + numel]
        end += numel
        part.zero_() if source is None else part.copy_(source.reshape(-1))


def _pack_own(call: Call, load: Load, sources: Sequence[Tensor | None]) -> Tensor:
    buffer = _acquire(call, load, load.numel)
    _fill(buffer, load, sources)
    return buffer


def _pack_row(call: Call, load: Load, sources: Sequence[Tensor | None]) -> Tensor:
    """This rank's chunk of a buffer of all ranks'."""
    place = call.program.place
    buffer = _acquire(call, load, place.size * load.numel)
    own = place.own * load.numel
    _fill(buffer[own : own + load.numel], load, sources)
    return buffer


def _pack_rows(call: Call, load: Load, sources: Sequence[Tensor | None]) -> Tensor:
    """A chunk for each rank, from leaves with a leading axis of ranks."""
    n = call.program.place.size
    buffer = _acquire(call, load, n * load.numel)
    rows = [[None] * n if s is None else s.unbind(0) for s in sources]
    for rank in range(n):
        chunk = buffer[rank * load.numel : (rank + 1) * load.numel]
        _fill(chunk, load, [row[rank] for row in rows])
    return buffer


def _pack_root(call: Call, load: Load, sources: Sequence[Tensor | None]) -> Tensor:
    """The root's units; zeros elsewhere where they are summed."""
    place = call.program.place
    if place.own == call.program.root:
        return _pack_own(call, load, sources)
    buffer = _acquire(call, load, load.numel)
    return buffer.zero_() if place.axes else buffer


# Communicating


def _sum(call: Call, load: Load, buffer: Tensor, last: bool) -> Work:
    axes, average = call.program.place.axes, call.program.operator == "pmean"
    transport = call.communicator.transport
    return transport.all_reduce(buffer, axes=axes, average=average, wait_soon=last)


def _gather(call: Call, load: Load, buffer: Tensor, last: bool) -> Work:
    transport, axes = call.communicator.transport, call.program.place.axes
    flat = buffer if load.layout is not None else buffer.view(torch.uint8)
    return transport.all_gather_in_place(flat, axes=axes, wait_soon=last)


def _scatter(call: Call, load: Load, buffer: Tensor, last: bool) -> Work:
    transport, axes = call.communicator.transport, call.program.place.axes
    return transport.reduce_scatter(buffer, axes=axes, wait_soon=last)


def _spread(call: Call, load: Load, buffer: Tensor, last: bool) -> Work:
    transport, place = call.communicator.transport, call.program.place
    if not place.axes:
        return transport.broadcast(buffer, call.program.root)
    # Bytes added to zeros: exact, whatever they stand for.
    return transport.all_reduce(buffer.view(torch.uint8), axes=place.axes, wait_soon=last)


# Handing out


def _parts(buffer: Tensor, load: Load, call: Call) -> list[Tensor]:
    """Units over the memory of a buffer that nobody else will write."""
    if load.layout is not None:
        return slices(buffer, load.layout)
    units = [call.program.units[k] for k in load.members]
    flat = torch.split(buffer[: load.numel], load.numels)
    return [part.clone().view(unit.shape) for part, unit in zip(flat, units, strict=True)]


def _take_own(call: Call, load: Load, buffer: Tensor) -> list[Tensor]:
    return _parts(buffer, load, call)


def _take_rows(call: Call, load: Load, buffer: Tensor) -> list[Tensor]:
    n = call.program.place.size
    units = [call.program.units[k] for k in load.members]
    columns = torch.split(buffer.view(n, load.numel), load.numels, dim=1)
    return [
        column.clone(memory_format=torch.contiguous_format).view(n, *unit.shape)
        for column, unit in zip(columns, units, strict=True)
    ]


def _take_chunk(call: Call, load: Load, buffer: Tensor) -> list[Tensor]:
    own = call.program.place.own * load.numel
    return _parts(buffer[own : own + load.numel].clone(), load, call)


def _take_at_root(call: Call, load: Load, buffer: Tensor) -> list[Tensor]:
    if call.program.place.own != call.program.root:
        buffer.zero_()
    return _parts(buffer, load, call)


class _Move(NamedTuple):
    """How one operator moves a load."""

    pack: Callable[[Call, Load, Sequence[Tensor | None]], Tensor]
    start: Callable[[Call, Load, Tensor, bool], Work]
    take: Callable[[Call, Load, Tensor], list[Tensor]]


_MOVES = {
    "psum": _Move(_pack_own, _sum, _take_own),
    "pmean": _Move(_pack_own, _sum, _take_own),
    "pmax": _Move(_pack_row, _gather, _take_rows),
    "all_gather": _Move(_pack_row, _gather, _take_rows),
    "reduce_scatter": _Move(_pack_rows, _scatter, _take_chunk),
    "broadcast_from": _Move(_pack_root, _spread, _take_own),
    "sum_to": _Move(_pack_own, _sum, _take_at_root),
}
