"""A loopback group of which one thread plays one rank, and the others mirror it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fddp.transport.loopback import (
    DEFAULT_GROUP,
    CollectiveKey,
    LoopbackGroup,
    LoopbackState,
    Rendezvous,
    execute,
)

if TYPE_CHECKING:
    from fddp.transport.operation import Operation

Transfer = Callable[[Rendezvous, "Operation", Tensor], Tensor]
"""Called for each collective with its operation on this rank, and its result if all ranks had sent
the same; returns the result that this rank gets."""

_TIMEOUT_S = 60.0


@contextmanager
def mirrored(rank: int, size: int, transfer: Transfer) -> Iterator[LoopbackGroup]:
    """Make a group of `size` ranks whose others issue the operations of this one, with its data.

    Within the block it is the default group of this context (`group=None`). Collectives return at
    once. A result is a buffer of the operation's shape, in which each rank finds its own part. The
    others gather the data of this rank, too: an all-gather of shards repeats its own.

    Args:
        rank, size: of this thread.
        transfer: see `Transfer`.

    Example:
        >>> import fddp, torch
        >>> with mirrored(0, 4, lambda rendezvous, operation, result: result):
        ...     fddp.psum(torch.tensor(3.0))
        tensor(12.)
    """
    group = LoopbackGroup(rank, MirrorState(size, transfer))
    token = DEFAULT_GROUP.set(group)
    try:
        yield group
    finally:
        DEFAULT_GROUP.reset(token)


class MirrorState(LoopbackState):
    """State of a group of which one thread plays one rank."""

    def __init__(self, size: int, transfer: Transfer) -> None:
        super().__init__(size, _TIMEOUT_S)
        self.transfer = transfer

    def open(self, channel: int, rank: int, title: str, *_: Any) -> dict[int, str | None]:
        self._openings[channel] = dict.fromkeys(range(self.size), title)
        return {}

    def join(self, key: CollectiveKey, rank: int, operation: Operation) -> Rendezvous:
        rendezvous = Rendezvous(key)
        self.perform(rendezvous, rank, operation)
        return rendezvous

    def perform(self, rendezvous: Rendezvous, rank: int, operation: Operation) -> None:
        """Carry out an operation, as if all ranks had issued it with the same data."""
        rendezvous.operations = dict.fromkeys(rendezvous.key.ranks, operation)
        with torch.no_grad():
            result = self.transfer(rendezvous, operation, _result(operation, rank))
            operation.tensor.copy_(result)
        rendezvous.done_s = time.perf_counter()


def result_of_two(rendezvous: Rendezvous, own: Tensor, other: Tensor) -> Tensor:
    """Result of an operation of a mirrored group if its other ranks send the data of a second run.

    Args:
        rendezvous: of rank 0.
        own, other: tensors of the operation on ranks 0 and 1, before it.

    Returns:
        The result on rank 0, as a buffer in which each rank finds its own part.
    """
    operation = rendezvous.operations[0]
    return _executed(operation._replace(tensor=own), 0, operation._replace(tensor=other), 1)


def _result(operation: Operation, rank: int) -> Tensor:
    """Result of an operation that all ranks issue with the same data."""
    place = operation.ranks.index(rank)
    return _executed(operation, place, operation, place)


def _executed(operation: Operation, place: int, other: Operation, other_place: int) -> Tensor:
    """Result of an operation, whose other ranks send the data of the rank at another place."""
    places = range(len(operation.ranks))
    sent = [operation if number == place else other for number in places]
    copies = [one._replace(tensor=one.tensor.clone()) for one in sent]
    if operation.kind == "all_gather":
        for number, copy in enumerate(copies):
            source = place if number == place else other_place
            copy.chunks[number].copy_(sent[number].chunks[source])
    execute(copies)
    if operation.kind == "reduce_scatter":
        return torch.cat([copy.chunks[number] for number, copy in enumerate(copies)])
    return copies[place].tensor
