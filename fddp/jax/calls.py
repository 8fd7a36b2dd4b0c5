"""Reductions of compiled programs: known by number, carried out as fddp's operators are."""

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

_IN_FLIGHT = 2  # one is packed while another is summed
_STAGING = "memory of compiled programs"

Types = tuple[tuple[tuple[int, ...], str], ...]


class BorrowedBuffers(Protocol):
    """Memory of a compiled program: operands to read and results to write, by position."""

    def pack(self, buffer: Tensor, members: Sequence[int]) -> None:
        """Copies operands into a buffer of their size, one behind the other."""

    def unpack(self, buffer: Tensor, members: Sequence[int]) -> None:
        """Copies such a buffer into results."""


class _Known(NamedTuple):
    """A call that a compiled program makes.

    Attributes:
        call: what to do.
        types: shape and dtype of each operand.
        programs: what to do over which ranks, by the number of the communicator.
    """

    call: Call
    types: Types
    programs: dict[int, OperatorProgram]


_lock = threading.Lock()
_numbers: dict[tuple[Call, Types], int] = {}
_known: list[_Known] = []


def number_of(call: Call, types: Types) -> int:
    """The number by which compiled programs of this process know a call.

    Args:
        call: what to do.
        types: shape and dtype of each operand.
    """
    with _lock:
        number = _numbers.setdefault((call, types), len(_known))
        if number == len(_known):
            _known.append(_Known(call, types, {}))
        return number


def execute(number: int, borrowed: BorrowedBuffers) -> str | None:
    """Reduce over ranks; XLA calls this, on a thread of its own.

    Args:
        number: of the call.
        borrowed: its operands and results.

    Returns:
        None, or what went wrong: the text of the error that the program raises.
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
    """The communicator, which nothing else can want now: tokens keep programs of a thread apart."""
    lock = call.communicator.lock
    alone = lock.acquire(blocking=False)
    if not alone:
        lock.acquire()
    try:
        if not alone:
            handshake.abort_handshake(
                call.communicator, call.program.place, call.text, _not_alone(call)
            )
        yield
    finally:
        lock.release()


def _not_alone(call: eager.Call) -> DesyncError:
    return DesyncError(
        f"{call.text}: something else communicates over the same group at the same time, in an "
        f"order that other ranks don't know; JAX keeps reductions in order that one thread "
        f"starts: give each further thread, and operators on tensors, a Communicator of their own"
    )


def _with_way_out(error: Exception, number: int) -> Exception:
    """The error, which says more where ranks are threads: XLA may lack a thread for each."""
    if (
        isinstance(error, SyncTimeoutError)
        and communicators.communicator_by_id(_known[number].call.channel).threads
    ):
        hint = (
            "; ranks that are threads share XLA's, one for each core: call "
            'jax.config.update("jax_cpu_enable_async_dispatch", False) before JAX is used, so that '
            "each runs its own programs, or run ranks as processes"
        )
        error.args = (f"{error.args[0]}{hint}", *error.args[1:])
    return error


def _reduce(call: eager.Call, borrowed: BorrowedBuffers) -> None:
    """Meet, pack, sum and hand out: as `execute.run`, a few buckets at a time.

    Buckets take turns in the same memory, which is still in the caches when sums are handed out.
    """
    exchange = handshake.begin(call)
    fused_buckets = call.program.fused_buckets
    # Not kept where an operation fails: others might still write it.
    staging: list[Tensor] = call.communicator.known.pop(_STAGING, [])
    pending: deque[tuple[FusedBucket, Tensor, Work]] = deque()
    for position, fused in enumerate(fused_buckets):
        if len(pending) == _IN_FLIGHT:
            _land(call, borrowed, *pending.popleft())
        buffer = _staging_buffer(call.communicator, staging, position % _IN_FLIGHT, fused)
        borrowed.pack(buffer, fused.members)
        if exchange is not None:
            exchange.complete()
            exchange = None
        pending.append((fused, buffer, _start(call, buffer, position == len(fused_buckets) - 1)))
    while pending:
        _land(call, borrowed, *pending.popleft())
    call.communicator.known[_STAGING] = staging


def _start(call: eager.Call, buffer: Tensor, last: bool) -> Work:
    return call.communicator.transport.all_reduce(
        buffer,
        axes=call.program.place.axes,
        average=call.program.operator == "pmean",
        wait_soon=last,
    )


def _land(
    call: eager.Call, borrowed: BorrowedBuffers, fused: FusedBucket, buffer: Tensor, work: Work
) -> None:
    work.wait(call.text)
    borrowed.unpack(buffer, fused.members)


def _staging_buffer(
    communicator: Communicator, staging: list[Tensor], number: int, fused: FusedBucket
) -> Tensor:
    """Memory for a fused bucket, which grows with what it has to hold."""
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
