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
from fddp.native.memory import PLAIN_INSTEAD, wrapper_kind
from fddp.native.pack import pack_, slices
from fddp.native.torch_private import is_functional_tensor
from fddp.runtime.operations import start
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
        if call.program.place.size == 1:  # meets no other rank: copies, without a collective
            copies: list[Any] = [None] * len(leaves)
            for bucket in call.program.fused_buckets:
                _unpack(call, bucket, _pack(call, bucket, leaves), copies)
            return copies
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
    if found not in (Tensor, torch.nn.Parameter):
        name = f"{found.__module__}.{found.__qualname__}"
        kind = f"a {name}, which dispatches by itself; {PLAIN_INSTEAD}"
    elif leaf is not None and is_functional_tensor(leaf):
        kind = f"a {wrapper_kind(leaf)}; {PLAIN_INSTEAD}"
    else:
        kind = (
            "a batch of torch's former vmap (is_grads_batched=, vectorize=); use torch.func.vmap "
            "or jacrev instead"
        )
    path = call.program.units[position].path
    problem = f"{call.program.operator}: {leaf_text(path)} is {kind}"
    handshake.abort_handshake(call.communicator, call.program.place, call.text, TypeError(problem))


def _run(call: Call, leaves: Sequence[Tensor | None]) -> list[Tensor]:
    program, communicator, place = call.program, call.communicator, call.program.place
    buckets = program.fused_buckets
    entry = communicator.recorder.launched(call.text, -1, -1)
    rows = handshake.rows_of(communicator, place)
    meeting = handshake.begin(call, rows)
    # The first bucket is packed while the handshake travels.
    buffers = [_pack(call, bucket, leaves) for bucket in buckets[:1]]
    entry.note_wait()
    meeting.wait(call.text)
    handshake.check(call, rows)
    number = communicator.advance_call_number(place)
    if not call.roles:
        call.original.number = number
    works: list[Work] = []
    for bucket in buckets:
        if bucket is not buckets[0]:
            buffers.append(_pack(call, bucket, leaves))
        buffer = buffers[-1]
        work = start(
            communicator.transport,
            program.collective,
            buffer.view(torch.uint8) if bucket.as_bytes else buffer,
            axes=place.axes,
            average=program.operator == "pmean",
            src=program.root,
            wait_soon=bucket is buckets[-1],
        )
        works.append(work)
    results: list[Any] = [None] * len(program.units)
    for bucket, buffer, work in zip(buckets, buffers, works, strict=True):
        work.wait(call.text)
        _unpack(call, bucket, buffer, results)
    entry.note_done()
    return results


def _pack(call: Call, bucket: FusedBucket, leaves: Sequence[Tensor | None]) -> Tensor:
    """Pack a bucket into a buffer with one chunk, or one for each rank."""
    operator, place, numel = call.program.operator, call.program.place, bucket.numel
    sources = [leaves[k] for k in bucket.members]
    count = place.size if operator in MOVES_ROWS or operator in TAKES_ROWS else 1
    key = (count * numel, bucket.dtype, bucket.device)
    buffer = call.communicator.pool.acquire(key, *key)
    written: list[tuple[Tensor, Sequence[Tensor | None]]] = []  # chunks, each with its units
    if operator in TAKES_ROWS:
        rows = [[None] * count if s is None else s.unbind(0) for s in sources]
        chunks = [buffer[k * numel : (k + 1) * numel] for k in range(count)]
        written = [(chunk, [row[k] for row in rows]) for k, chunk in enumerate(chunks)]
    elif count > 1:
        written = [(buffer[place.own * numel : (place.own + 1) * numel], sources)]
    elif operator != "broadcast_from" or place.own == call.program.root:
        written = [(buffer, sources)]
    elif place.axes:
        buffer.zero_()  # the broadcast is a sum, see `OperatorProgram.collective`
    for chunk, units in written:
        if bucket.layout is not None:
            pack_(chunk, bucket.layout, units)
            continue
        for part, unit in zip(torch.split(chunk, bucket.numels), units, strict=True):
            part.zero_() if unit is None else part.copy_(unit.reshape(-1))
    return buffer


def _unpack(call: Call, bucket: FusedBucket, buffer: Tensor, results: list[Any]) -> None:
    """Put the units of a reduced buffer into the results, as views of it or as copies, and return
    it to the pool."""
    program, place, numel = call.program, call.program.place, bucket.numel
    units = [program.units[k] for k in bucket.members]
    own = buffer
    if program.operator == "reduce_scatter":
        own = buffer[place.own * numel : (place.own + 1) * numel].clone()
    elif program.operator == "sum_to" and place.own != program.root:
        own.zero_()
    found: Sequence[Tensor]
    if program.operator in MOVES_ROWS:
        columns = torch.split(buffer.view(place.size, numel), bucket.numels, dim=1)
        found = [
            column.clone(memory_format=torch.contiguous_format).view(place.size, *unit.shape)
            for column, unit in zip(columns, units, strict=True)
        ]
    elif bucket.layout is not None:
        found = slices(own, bucket.layout)
    else:
        parts = torch.split(own, bucket.numels)
        found = [part.clone().view(unit.shape) for part, unit in zip(parts, units, strict=True)]
    for k, result in zip(bucket.members, found, strict=True):
        results[k] = result
    call.communicator.pool.release((len(buffer), bucket.dtype, bucket.device), buffer)
