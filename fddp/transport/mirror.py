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
    group = LoopbackGroup(rank, _MirrorState(size, transfer))
    token = DEFAULT_GROUP.set(group)
    try:
        yield group
    finally:
        DEFAULT_GROUP.reset(token)


class _MirrorState(LoopbackState):
    def __init__(self, size: int, transfer: Transfer) -> None:
        super().__init__(size, _TIMEOUT_S)
        self._transfer = transfer

    def open(self, channel: int, rank: int, title: str, *_: Any) -> dict[int, str | None]:
        self._openings[channel] = dict.fromkeys(range(self.size), title)
        return {}

    def join(self, key: CollectiveKey, rank: int, operation: Operation) -> Rendezvous:
        rendezvous = Rendezvous(key)
        rendezvous.operations = dict.fromkeys(key.ranks, operation)
        with torch.no_grad():
            result = self._transfer(rendezvous, operation, _result(operation, rank))
            operation.tensor.copy_(result)
        rendezvous.done_s = time.perf_counter()
        return rendezvous


def _result(operation: Operation, rank: int) -> Tensor:
    """Result of an operation that all ranks issue with the same data."""
    place = operation.ranks.index(rank)
    copies = [operation._replace(tensor=operation.tensor.clone()) for _ in operation.ranks]
    if operation.kind == "all_gather":
        for number, copy in enumerate(copies):
            copy.chunks[number].copy_(operation.chunks[place])
    execute(copies)
    if operation.kind == "reduce_scatter":
        return torch.cat([copy.chunks[number] for number, copy in enumerate(copies)])
    return copies[place].tensor
