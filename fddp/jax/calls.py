"""Reductions of compiled programs, identified by number and executed like eager operators."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fddp.collectives import calls as eager
from fddp.collectives import handshake
from fddp.collectives.communicator import Communicator
from fddp.collectives.operator_program import FusedBucket, OperatorProgram, bucketed
from fddp.core.plan.leaf import LeafSpec
from fddp.errors import DesyncError, SyncTimeoutError
from fddp.jax import communicators
from fddp.jax.communicators import JitCommunicator
from fddp.jax.errors import keep
from fddp.jax.primitives import Call
from fddp.transport import Work

_IN_FLIGHT = 2  # one bucket is packed while another is reduced
_STAGING = "memory of compiled programs"  # key in `Communicator.known`

Types = tuple[tuple[tuple[int, ...], str], ...]
"""Shape and dtype of each operand of a call."""


class BorrowedBuffers(Protocol):
    """Memory of a compiled program: operands to read and results to write, by position."""

    def pack(self, buffer: Tensor, members: Sequence[int]) -> None:
        """Copy operands back to back into a buffer of their total size."""

    def unpack(self, buffer: Tensor, members: Sequence[int]) -> None:
        """Copy a packed buffer into results."""


class _Known(NamedTuple):
    """A registered call of a compiled program."""

    call: Call
    types: Types
    programs: dict[int, OperatorProgram]  # by number of the communicator


_lock = threading.Lock()
_numbers: dict[tuple[Call, Types], int] = {}
_known: list[_Known] = []


def number_of(call: Call, types: Types) -> int:
    """Register a call, and return the number that identifies it in compiled programs."""
    with _lock:
        number = _numbers.setdefault((call, types), len(_known))
        if number == len(_known):
            _known.append(_Known(call, types, {}))
        return number


def execute(number: int, borrowed: BorrowedBuffers) -> str | None:
    """Run the call of a number. XLA calls this on one of its threads.

    Returns:
        None, or the text of the error that the program raises.
    """
    try:
        known = _known[number]
        channel = communicators.communicator_by_id(known.call.channel)
        communicator = channel.communicator
        program = known.programs.get(communicator.number)
        if program is None:
            known.programs.clear()
            program = known.programs[communicator.number] = _program(channel, known)
        call = eager.Call(
            communicator, program, eager.CallRecord(known.call.site), known.call.roles
        )
        with torch.no_grad(), _turn(call):
            _reduce(call, borrowed)
    except Exception as error:
        return keep(_with_way_out(error, number))
    return None


@contextmanager
def _turn(call: eager.Call) -> Iterator[None]:
    """Hold the communicator's lock. Raise if it is in use: tokens serialise the programs of one
    thread, so another thread must be using it."""
    lock = call.communicator.lock
    alone = lock.acquire(blocking=False)
    if not alone:
        lock.acquire()
    try:
        if not alone:
            error = DesyncError(
                f"{call.text}: something else communicates over the same group at the same time, "
                f"so the order may differ between ranks; JAX only orders reductions that are "
                f"started by the same thread: use a separate Communicator for each thread, and "
                f"for operators on tensors"
            )
            handshake.abort_handshake(call.communicator, call.program.place, call.text, error)
        yield
    finally:
        lock.release()


def _with_way_out(error: Exception, number: int) -> Exception:
    """Add a hint to a timeout if ranks are threads: XLA may not have a thread for each of them."""
    if (
        isinstance(error, SyncTimeoutError)
        and communicators.communicator_by_id(_known[number].call.channel).threads
    ):
        hint = (
            "; ranks that are threads share XLA's thread pool, one thread for each core: call "
            'jax.config.update("jax_cpu_enable_async_dispatch", False) before JAX is used, so that '
            "each rank's thread runs its own programs, or run ranks as processes"
        )
        error.args = (f"{error.args[0]}{hint}", *error.args[1:])
    return error


def _reduce(call: eager.Call, borrowed: BorrowedBuffers) -> None:
    """Handshake, pack, reduce and unpack, as `execute.run_eagerly`, two buckets at a time.

    Buckets alternate between two staging buffers, which are still in the CPU's caches when results
    are unpacked.
    """
    exchange = handshake.begin(call)
    fused_buckets = call.program.fused_buckets
    # Dropped if an operation fails: other ranks might still write it.
    staging: list[Tensor] = call.communicator.known.pop(_STAGING, [])
    pending: deque[tuple[FusedBucket, Tensor, Work]] = deque()

    def unpack(fused: FusedBucket, buffer: Tensor, work: Work) -> None:
        work.wait(call.text)
        borrowed.unpack(buffer, fused.members)

    for position, fused in enumerate(fused_buckets):
        if len(pending) == _IN_FLIGHT:
            unpack(*pending.popleft())
        buffer = _staging_buffer(call.communicator, staging, position % _IN_FLIGHT, fused)
        borrowed.pack(buffer, fused.members)
        if exchange is not None:
            exchange.complete()
            exchange = None
        work = call.communicator.transport.all_reduce(
            buffer,
            axes=call.program.place.axes,
            average=call.program.operator == "pmean",
            wait_soon=fused is fused_buckets[-1],
        )
        pending.append((fused, buffer, work))
    while pending:
        unpack(*pending.popleft())
    call.communicator.known[_STAGING] = staging


def _staging_buffer(
    communicator: Communicator, staging: list[Tensor], number: int, fused: FusedBucket
) -> Tensor:
    """A staging buffer for a bucket, reallocated if it is too small."""
    nbytes = fused.numel * fused.dtype.itemsize
    if number == len(staging) or staging[number].nbytes < nbytes:
        staging[number : number + 1] = [
            communicator.transport.empty(nbytes, torch.uint8, fused.device)
        ]
    return staging[number][:nbytes].view(fused.dtype)


def _program(channel: JitCommunicator, known: _Known) -> OperatorProgram:
    call = known.call
    units = tuple(
        LeafSpec(path, shape, dtype)
        for path, (shape, dtype) in zip(call.paths, known.types, strict=True)
    )
    devices = (torch.device("cpu"),) * len(units)
    buckets = bucketed(units, devices, channel.cap_bytes)
    place = channel.communicator.place(call.axes)
    return OperatorProgram(call.operator, place, -1, units, devices, buckets)
