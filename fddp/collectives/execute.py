"""Eager execution of operators on plain tensors: handshake, pack into buckets, communicate, unpack.

Nothing here is differentiated. A tracer records operators of `torch.library` instead
(`torch_library.py`), which call this module when the graph runs.
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
from fddp.collectives.operator_program import FusedBucket, OperatorProgram
from fddp.errors import FddpError
from fddp.native.operands import first_without_memory
from fddp.native.pack import pack_, slices
from fddp.telemetry.flight.dump import dump_on_failure
from fddp.transport import Work


def run_eagerly(call: Call, leaves: Sequence[Tensor | None]) -> list[Tensor]:
    """Run an operator. A collective call of the ranks of `call.program.place`.

    Args:
        call: the operator, its leaves and its communicator.
        leaves: plain tensors, one for each unit; None for zeros. Not written.

    Returns:
        New tensors, one for each unit. For `all_gather` and `pmax` they hold the units of all ranks
        along a new leading axis.

    Raises:
        DesyncError, PeerError: ranks called different operators, or a rank can't take part. Raised
            on all ranks.
        RankLostError, SyncTimeoutError, ClosedError: the transport failed.
    """
    grad = torch.no_grad() if torch.is_grad_enabled() else nullcontext()
    inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    with inference, grad, call.communicator.lock:
        if first_without_memory(leaves) >= 0:
            # Forward mode creates zero tensors without memory.
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
            # Other ranks expect this rank in the collectives; closing ends their waits.
            call.communicator.transport.close()
            raise error


def on_inexact(
    program: OperatorProgram, fn: Callable[..., Sequence[Any]], values: Sequence[Any]
) -> list[Any]:
    """Results of a function of the differentiable units' values; None for other units."""
    whole: list[Any] = [None] * len(program.units)
    results = fn(*[values[k] for k in program.inexact])
    for k, result in zip(program.inexact, results, strict=True):
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
    handshake.abort_handshake(call.communicator, call.program.place, call.text, TypeError(problem))


def _run(call: Call, leaves: Sequence[Tensor | None]) -> list[Tensor]:
    program, pool = call.program, call.communicator.pool
    pack, start, take = _LOWERINGS[program.operator]
    entry = call.communicator.recorder.launched(call.text, -1, -1)
    exchange = handshake.begin(call)
    packed = None
    if exchange is not None and program.fused_buckets:  # pack while the handshake travels
        fused = program.fused_buckets[0]
        packed = pack(call, fused, [leaves[k] for k in fused.members])
    entry.waited_s = perf_counter()
    if exchange is not None:
        exchange.complete()
    number = call.communicator.advance_call_number(program.place)
    if not call.roles:
        call.record.number = number
    pending: list[tuple[FusedBucket, Tensor, Work]] = []
    for fused in program.fused_buckets:
        if packed is None:
            packed = pack(call, fused, [leaves[k] for k in fused.members])
        is_last = fused is program.fused_buckets[-1]
        pending.append((fused, packed, start(call, fused, packed, is_last)))
        packed = None
    results: list[Tensor | None] = [None] * len(program.units)
    for fused, buffer, work in pending:
        work.wait(call.text)
        for k, result in zip(fused.members, take(call, fused, buffer), strict=True):
            results[k] = result
        pool.release((len(buffer), buffer.dtype, buffer.device), buffer)
    entry.done_s = perf_counter()
    return results  # type: ignore[return-value]  # each unit is in one bucket


# Packing


def _acquire(call: Call, fused: FusedBucket, numel: int) -> Tensor:
    key = (numel, fused.dtype, fused.device)
    return call.communicator.pool.acquire(key, *key)


def _fill(buffer: Tensor, fused: FusedBucket, sources: Sequence[Tensor | None]) -> None:
    """Write one rank's units to the start of `buffer`."""
    if fused.layout is not None:
        pack_(buffer, fused.layout, sources)
        return
    end = 0
    for source, numel in zip(sources, fused.numels, strict=True):
        part = buffer[end : end + numel]
        end += numel
        part.zero_() if source is None else part.copy_(source.reshape(-1))


def _pack_own(call: Call, fused: FusedBucket, sources: Sequence[Tensor | None]) -> Tensor:
    buffer = _acquire(call, fused, fused.numel)
    _fill(buffer, fused, sources)
    return buffer


def _pack_row(call: Call, fused: FusedBucket, sources: Sequence[Tensor | None]) -> Tensor:
    """Pack this rank's chunk of a buffer that holds one chunk for each rank."""
    place = call.program.place
    buffer = _acquire(call, fused, place.size * fused.numel)
    own = place.own * fused.numel
    _fill(buffer[own : own + fused.numel], fused, sources)
    return buffer


def _pack_rows(call: Call, fused: FusedBucket, sources: Sequence[Tensor | None]) -> Tensor:
    """Pack one chunk for each rank, from leaves with a leading axis of ranks."""
    n = call.program.place.size
    buffer = _acquire(call, fused, n * fused.numel)
    rows = [[None] * n if s is None else s.unbind(0) for s in sources]
    for rank in range(n):
        chunk = buffer[rank * fused.numel : (rank + 1) * fused.numel]
        _fill(chunk, fused, [row[rank] for row in rows])
    return buffer


def _pack_root(call: Call, fused: FusedBucket, sources: Sequence[Tensor | None]) -> Tensor:
    """Pack the root's units. Other ranks add zeros if the broadcast is a sum, see `_spread`."""
    place = call.program.place
    if place.own == call.program.root:
        return _pack_own(call, fused, sources)
    buffer = _acquire(call, fused, fused.numel)
    return buffer.zero_() if place.axes else buffer


# Communicating


def _sum(call: Call, fused: FusedBucket, buffer: Tensor, last: bool) -> Work:
    axes, average = call.program.place.axes, call.program.operator == "pmean"
    transport = call.communicator.transport
    return transport.all_reduce(buffer, axes=axes, average=average, wait_soon=last)


def _gather(call: Call, fused: FusedBucket, buffer: Tensor, last: bool) -> Work:
    transport, axes = call.communicator.transport, call.program.place.axes
    flat = buffer if fused.layout is not None else buffer.view(torch.uint8)
    return transport.all_gather_in_place(flat, axes=axes, wait_soon=last)


def _scatter(call: Call, fused: FusedBucket, buffer: Tensor, last: bool) -> Work:
    transport, axes = call.communicator.transport, call.program.place.axes
    return transport.reduce_scatter(buffer, axes=axes, wait_soon=last)


def _spread(call: Call, fused: FusedBucket, buffer: Tensor, last: bool) -> Work:
    transport, place = call.communicator.transport, call.program.place
    if not place.axes:
        return transport.broadcast(buffer, call.program.root)
    # The root's bytes plus zeros: exact for any dtype.
    return transport.all_reduce(buffer.view(torch.uint8), axes=place.axes, wait_soon=last)


# Unpacking


def _take_own(call: Call, fused: FusedBucket, buffer: Tensor) -> list[Tensor]:
    """Units as views of a buffer that is not written again."""
    if fused.layout is not None:
        return slices(buffer, fused.layout)
    units = [call.program.units[k] for k in fused.members]
    flat = torch.split(buffer[: fused.numel], fused.numels)
    return [part.clone().view(unit.shape) for part, unit in zip(flat, units, strict=True)]


def _take_rows(call: Call, fused: FusedBucket, buffer: Tensor) -> list[Tensor]:
    n = call.program.place.size
    units = [call.program.units[k] for k in fused.members]
    columns = torch.split(buffer.view(n, fused.numel), fused.numels, dim=1)
    return [
        column.clone(memory_format=torch.contiguous_format).view(n, *unit.shape)
        for column, unit in zip(columns, units, strict=True)
    ]


def _take_chunk(call: Call, fused: FusedBucket, buffer: Tensor) -> list[Tensor]:
    own = call.program.place.own * fused.numel
    return _take_own(call, fused, buffer[own : own + fused.numel].clone())


def _take_at_root(call: Call, fused: FusedBucket, buffer: Tensor) -> list[Tensor]:
    if call.program.place.own != call.program.root:
        buffer.zero_()
    return _take_own(call, fused, buffer)


class _Lowering(NamedTuple):
    """Functions that pack, communicate and unpack one fused bucket of an operator."""

    pack: Callable[[Call, FusedBucket, Sequence[Tensor | None]], Tensor]
    start: Callable[[Call, FusedBucket, Tensor, bool], Work]
    take: Callable[[Call, FusedBucket, Tensor], list[Tensor]]


_LOWERINGS = {
    "psum": _Lowering(_pack_own, _sum, _take_own),
    "pmean": _Lowering(_pack_own, _sum, _take_own),
    "pmax": _Lowering(_pack_row, _gather, _take_rows),
    "all_gather": _Lowering(_pack_row, _gather, _take_rows),
    "reduce_scatter": _Lowering(_pack_rows, _scatter, _take_chunk),
    "broadcast_from": _Lowering(_pack_root, _spread, _take_own),
    "sum_to": _Lowering(_pack_own, _sum, _take_at_root),
}
