"""Eager execution of operators on plain tensors: handshake, pack into buckets, communicate, unpack.

Nothing here is differentiated. A tracer records operators of `torch.library` instead
(`torch_library.py`), which call this module when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fddp.collectives import handshake
from fddp.collectives.calls import Call
from fddp.collectives.operator_program import MOVES_ROWS, TAKES_ROWS, FusedBucket, OperatorProgram
from fddp.core.text import leaf_text
from fddp.errors import InternalError
from fddp.native import extension
from fddp.native.memory import PLAIN_INSTEAD, wrapper_kind
from fddp.native.pack import pack_, slices
from fddp.native.torch_private import is_functional_tensor
from fddp.runtime.inputs import outside_inference_mode
from fddp.runtime.operations import start
from fddp.transport import Work

if TYPE_CHECKING:
    from fddp.collectives.communicator import Communicator

Units: TypeAlias = Sequence[Tensor | None] | Mapping[int, Tensor | None]
"""Units by their position in the program; None for zeros."""

# Operators of graphs that have sent buckets and are not finished.
_in_flight: WeakKeyDictionary[Communicator, RunningCall] = WeakKeyDictionary()


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
    with _without_gradients(), call.communicator.lock:
        if extension.compiled.first_without_memory(leaves) >= 0:
            # Forward mode creates zero tensors without memory.
            leaves = [None if leaf is None or leaf._is_zerotensor() else leaf for leaf in leaves]
            position = extension.compiled.first_without_memory(leaves)
            if position >= 0:
                _refuse(call, leaves[position], position)
        if call.program.place.size == 1:  # meets no other rank: copies, without a collective
            requests = call.communicator.requests
            if call.communicator.world_size == 1 and requests.asked:
                requests.agree()
            copies: list[Any] = [None] * len(leaves)
            for bucket in call.program.fused_buckets:
                _unpack(call, bucket, _pack(call, bucket, leaves), copies)
            return copies
        try:
            running = RunningCall(call, waits=True)
            for _ in call.program.fused_buckets:
                running.send(leaves)
            return running.finish()
        except BaseException as error:
            call.communicator.note_failure(error)
            raise


def start_bucket(call: Call, bucket: int, leaves: Sequence[Tensor | None]) -> None:
    """Send a bucket of an operator, without waiting for other ranks. The calls for its buckets, in
    order, and `finish_buckets` are one collective call, as `run_eagerly`, and raise its errors.

    Args:
        call: the operator.
        bucket: number of the bucket. The first one begins the call.
        leaves: plain tensors of the units in the bucket; None for zeros. Not written.
    """
    with _without_gradients(), call.communicator.lock:
        try:
            if bucket == 0:
                if call.communicator in _in_flight:
                    raise RuntimeError("a graph was interrupted between the buckets of an operator")
                _in_flight[call.communicator] = RunningCall(call, waits=False)
            running = _in_flight.get(call.communicator)
            if running is None:
                raise InternalError(f"bucket {bucket} of {call.text} was sent in no call")
            members = call.program.fused_buckets[bucket].members
            running.send(dict(zip(members, leaves, strict=True)))
        except BaseException as error:
            call.communicator.note_failure(error)
            raise


def finish_buckets(call: Call) -> list[Tensor]:
    """Results of the operator whose buckets were sent, as of `run_eagerly`."""
    with _without_gradients(), call.communicator.lock:
        running = _in_flight.pop(call.communicator, None)
        if running is None:
            raise InternalError(f"{call.text} was finished before it was begun")
        try:
            return running.finish()
        except BaseException as error:
            call.communicator.note_failure(error)
            raise


def _without_gradients() -> AbstractContextManager[object]:
    """Run a block whose results have no derivatives, and are no inference tensors."""
    return torch.no_grad() if torch.is_grad_enabled() else outside_inference_mode()


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


class RunningCall:
    """An operator that runs: ranks meet, buckets are sent in order, and results are taken.

    Args:
        call: the operator.
        waits: True to wait for the meeting once the first bucket is packed. Otherwise buckets that
            are packed before all ranks have met are sent with a later one.
    """

    def __init__(self, call: Call, *, waits: bool) -> None:
        self._call, self._waits = call, waits
        communicator, place = call.communicator, call.program.place
        self._entry = communicator.recorder.launched(call.text, -1, -1)
        self._rows = handshake.rows_of(communicator, place)
        # The first bucket is packed while the handshake travels.
        self._meeting: Work | None = handshake.begin(call, self._rows, wait_soon=waits)
        self._buffers: list[Tensor] = []
        self._works: list[Work] = []

    def send(self, leaves: Units) -> None:
        """Pack the next bucket, and start its collective as soon as all ranks have met."""
        bucket = self._call.program.fused_buckets[len(self._buffers)]
        self._buffers.append(_pack(self._call, bucket, leaves))
        if self._waits or self._meeting is None or self._meeting.done:
            self._start()

    def finish(self) -> list[Tensor]:
        """Wait for the collectives, and return the results."""
        call = self._call
        self._start()
        results: list[Any] = [None] * len(call.program.units)
        buckets = call.program.fused_buckets
        for bucket, buffer, work in zip(buckets, self._buffers, self._works, strict=True):
            work.wait(call.text)
            _unpack(call, bucket, buffer, results)
        self._entry.note_done()
        return results

    def _start(self) -> None:
        """Start the collectives of the buckets that are packed, after the meeting."""
        call, program, communicator = self._call, self._call.program, self._call.communicator
        if self._meeting is not None:
            self._entry.note_wait()
            self._meeting.wait(call.text)
            self._meeting = None
            handshake.check(call, self._rows)
            number = communicator.advance_call_number(program.place)
            if not call.roles:
                call.original.number = number
        for position in range(len(self._works), len(self._buffers)):
            bucket, buffer = program.fused_buckets[position], self._buffers[position]
            work = start(
                communicator.transport,
                program.collective,
                buffer.view(torch.uint8) if bucket.as_bytes else buffer,
                axes=program.place.axes,
                average=program.operator == "pmean",
                src=program.root,
                wait_soon=position == len(program.fused_buckets) - 1,
            )
            self._works.append(work)


def _pack(call: Call, bucket: FusedBucket, leaves: Units) -> Tensor:
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
