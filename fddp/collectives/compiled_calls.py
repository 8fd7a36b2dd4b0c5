"""Operators that a compiled program of another library runs, by its callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fddp.collectives import handshake
from fddp.collectives.calls import Call
from fddp.collectives.communicator import Communicator
from fddp.collectives.execute import run_eagerly
from fddp.collectives.operator_program import OperatorProgram, bucketed
from fddp.core.plan.leaf import LeafSpec
from fddp.errors import DesyncError
from fddp.telemetry.call_site import Site


class Reduction(NamedTuple):
    """An operator in a compiled program.

    Attributes:
        operator: sum or mean.
        paths: the path of each leaf.
        site: the call site of the operator in the caller's code.
        axes: axes of the mesh along which ranks meet, in its order; () for all ranks.
        roles: derivatives that led to this call, the latest last: "backward", "jvp".
    """

    operator: Literal["psum", "pmean"]
    paths: tuple[str, ...]
    site: Site | str
    axes: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()


def run_operator(
    communicator: Communicator, reduction: Reduction, leaves: Sequence[Tensor]
) -> list[Tensor]:
    """Reduce leaves over ranks, without a record for autograd. A collective call.

    Args:
        communicator: the ranks. No other thread may use it during the call.
        reduction: the operator.
        leaves: contiguous tensors in CPU memory. Not written.

    Returns:
        The sum or mean of each leaf.

    Raises:
        DesyncError, PeerError: ranks called different operators, another thread uses the
            communicator, or a rank can't take part. Raised on all ranks.
        RankLostError, SyncTimeoutError, ClosedError: the transport failed.

    Example:
        >>> import fddp, torch
        >>> from fddp.extend import Reduction, run_operator
        >>> def total(group):
        ...     with fddp.Communicator(group) as communicator:
        ...         reduction = Reduction("psum", ("w",), "train.py:31")
        ...         return run_operator(communicator, reduction, [torch.ones(2)])
        >>> fddp.loopback(2, total)[0]
        [tensor([2., 2.])]
    """
    units = tuple(
        LeafSpec(path, tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."))
        for path, leaf in zip(reduction.paths, leaves, strict=True)
    )
    program = communicator.cached(
        "compiled calls",
        (reduction.operator, reduction.axes, units),
        lambda: _program(communicator, reduction, units),
    )
    call = Call(communicator, program, reduction.site, reduction.roles)
    with _only_user(call):
        return run_eagerly(call, leaves)


def _program(
    communicator: Communicator, reduction: Reduction, units: tuple[LeafSpec, ...]
) -> OperatorProgram:
    devices = (torch.device("cpu"),) * len(units)
    buckets = bucketed(units, devices, communicator.cap_bytes)
    place = communicator.place(reduction.axes)
    return OperatorProgram(reduction.operator, place, -1, units, devices, buckets)


@contextmanager
def _only_user(call: Call) -> Iterator[None]:
    """Hold the communicator's lock; raise on all ranks if another thread holds it.

    A library orders the operators of its programs by the thread that starts them, so the order of
    two threads may differ between ranks.
    """
    lock = call.communicator.lock
    was_free = lock.acquire(blocking=False)
    if not was_free:
        lock.acquire()
    try:
        if not was_free:
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
