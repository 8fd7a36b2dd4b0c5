"""Eager execution of operators on plain tensors: handshake, pack into buckets, communicate, unpack.

Nothing here is differentiated. A tracer records operators of `torch.library` instead
(`torch_library.py`), which call this module when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from fddp.collectives import handshake
from fddp.collectives.calls import Call
from fddp.collectives.operator_program import MOVES_ROWS, TAKES_ROWS, FusedBucket, OperatorProgram
from fddp.core.text import leaf_text
from fddp.errors import FddpError
from fddp.native import extension
from fddp.native.pack import pack_, slices
from fddp.telemetry.flight.dump import dump_on_failure
from fddp.transport import Work


def run_eagerly(call: Call, leaves: Sequence[Tensor | None]) -> list[Tensor]:
    """Run an operator. A collective call of the ranks of `call.program.place`.

    Args:
        call: the operator, its leaves and its communicator.
        leaves: plain tensors, one for each unit; None for zeros. Not written.

    Returns:
        New tensors, one for each unit. For the operators of `MOVES_ROWS` they have a leading axis
        of ranks.

    Raises:
        DesyncError, PeerError: ranks called different operators, or a rank can't take part. Raised
            on all ranks.
        RankLostError, SyncTimeoutError, ClosedError: the transport failed.
    """
    grad = torch.no_grad() if torch.is_grad_enabled() else nullcontext()
    inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    with inference, grad, call.communicator.lock:
        if extension.compiled.first_without_memory(leaves) >= 0:
            # Forward mode creates zero tensors without memory.
            leaves = [None if leaf is None or leaf._is_zerotensor() else leaf for leaf in leaves]
            position = extension.compiled.first_without_memory(leaves)
            if position >= 0:
                _refuse(call, leaves[position], position)
        if call.program.place.size == 1:
            return _copied(call, leaves)
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
    problem = f"{call.program.operator}: {leaf_text(path)} is {kind}"
    handshake.abort_handshake(call.communicator, call.program.place, call.text, TypeError(problem))


def _run(call: Call, leaves: Sequence[Tensor | None]) -> list[Tensor]:
    program, pool = call.program, call.communicator.pool
    entry = call.communicator.recorder.launched(call.text, -1, -1)
    exchange = handshake.begin(call)
    packed = None
    if exchange is not None and program.fused_buckets:  # pack while the handshake travels
        packed = _pack(call, program.fused_buckets[0], leaves)
    entry.note_wait()
    if exchange is not None:
        exchange.complete()
    number = call.communicator.advance_call_number(program.place)
    if not call.roles:
        call.record.number = number
    pending: list[tuple[FusedBucket, Tensor, Work]] = []
    for fused in program.fused_buckets:
        if packed is None:
            packed = _pack(call, fused, leaves)
        is_last = fused is program.fused_buckets[-1]
        pending.append((fused, packed, _start(call, fused, packed, is_last)))
        packed = None
    results: list[Tensor | None] = [None] * len(program.units)
    for fused, buffer, work in pending:
        work.wait(call.text)
        for k, result in zip(fused.members, _take(call, fused, buffer), strict=True):
            results[k] = result
        pool.release((len(buffer), buffer.dtype, buffer.device), buffer)
    entry.note_done()
    return results  # type: ignore[return-value]  # each unit is in one bucket


def _copied(call: Call, leaves: Sequence[Tensor | None]) -> list[Tensor]:
    """Results on one rank alone, which meets no other: copies, without a collective."""
    results: list[Tensor | None] = [None] * len(leaves)
    for fused in call.program.fused_buckets:
        buffer = _pack(call, fused, leaves)
        for k, result in zip(fused.members, _take(call, fused, buffer), strict=True):
            results[k] = result
        call.communicator.pool.release((len(buffer), buffer.dtype, buffer.device), buffer)
    return results  # type: ignore[return-value]  # each unit is in one bucket


def _pack(call: Call, fused: FusedBucket, leaves: Sequence[Tensor | None]) -> Tensor:
    """Pack a bucket into a buffer with one chunk, or one for each rank."""
    operator, place, numel = call.program.operator, call.program.place, fused.numel
    sources = [leaves[k] for k in fused.members]
    count = place.size if operator in MOVES_ROWS or operator in TAKES_ROWS else 1
    key = (count * numel, fused.dtype, fused.device)
    buffer = call.communicator.pool.acquire(key, *key)
    if operator in TAKES_ROWS:
        rows = [[None] * count if s is None else s.unbind(0) for s in sources]
        for rank in range(count):
            chunk = buffer[rank * numel : (rank + 1) * numel]
            _fill(chunk, fused, [row[rank] for row in rows])
    elif operator != "broadcast_from" or place.own == call.program.root:
        own = place.own if count > 1 else 0
        _fill(buffer[own * numel : (own + 1) * numel], fused, sources)
    elif place.axes:
        buffer.zero_()  # the broadcast is a sum, see `_start`
    return buffer


def _fill(buffer: Tensor, fused: FusedBucket, sources: Sequence[Tensor | None]) -> None:
    """Write one rank's units to a buffer."""
    if fused.layout is not None:
        pack_(buffer, fused.layout, sources)
        return
    for part, source in zip(torch.split(buffer, fused.numels), sources, strict=True):
        part.zero_() if source is None else part.copy_(source.reshape(-1))


def _start(call: Call, fused: FusedBucket, buffer: Tensor, last: bool) -> Work:
    """Start the collective of a packed bucket."""
    program, transport = call.program, call.communicator.transport
    operator, axes = program.operator, program.place.axes
    if operator in MOVES_ROWS:
        flat = buffer if fused.layout is not None else buffer.view(torch.uint8)
        if operator == "all_to_all":
            return transport.all_to_all_in_place(flat, axes=axes, wait_soon=last)
        return transport.all_gather_in_place(flat, axes=axes, wait_soon=last)
    if operator == "reduce_scatter":
        return transport.reduce_scatter(buffer, axes=axes, wait_soon=last)
    if operator == "broadcast_from" and not axes:
        return transport.broadcast(buffer, program.root)
    if operator == "broadcast_from":
        # The root's bytes plus zeros: exact for any dtype.
        return transport.all_reduce(buffer.view(torch.uint8), axes=axes, wait_soon=last)
    average = operator == "pmean"
    return transport.all_reduce(buffer, axes=axes, average=average, wait_soon=last)


def _take(call: Call, fused: FusedBucket, buffer: Tensor) -> Sequence[Tensor]:
    """Results of a bucket, as views of a buffer that is not written again, or as copies."""
    program, place, numel = call.program, call.program.place, fused.numel
    units = [program.units[k] for k in fused.members]
    if program.operator in MOVES_ROWS:
        columns = torch.split(buffer.view(place.size, numel), fused.numels, dim=1)
        return [
            column.clone(memory_format=torch.contiguous_format).view(place.size, *unit.shape)
            for column, unit in zip(columns, units, strict=True)
        ]
    if program.operator == "reduce_scatter":
        buffer = buffer[place.own * numel : (place.own + 1) * numel].clone()
    elif program.operator == "sum_to" and place.own != program.root:
        buffer.zero_()
    if fused.layout is not None:
        return slices(buffer, fused.layout)
    flat = torch.split(buffer, fused.numels)
    return [part.clone().view(unit.shape) for part, unit in zip(flat, units, strict=True)]
