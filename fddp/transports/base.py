"""The contract between the runtime and whatever carries its tensors from rank to rank.

A `Transport` starts collectives and returns a `Work` for each. Collectives are matched across ranks
by the order in which they were issued on their transport, and on nothing else: two transports over
one group never mix, even where their operations interleave differently on different ranks. A
transport may be used from several threads, but issuing in the same order everywhere is the caller's
duty.

What every transport checks, and how the caller's tensors become what travels, is decided here once.
A backend implements `_start` and `_release`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from fddp.errors import ClosedError

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

OperationKind = Literal["all_reduce", "all_gather", "broadcast"]

#: dtypes that `all_reduce` adds up; the other two operations move any dtype
SUMMABLE_DTYPES = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
    }
)


class Operation(NamedTuple):
    """A collective as it is handed to a backend, its tensors checked."""

    kind: OperationKind
    tensor: Tensor  # the caller's: contiguous, any shape
    rows: tuple[Tensor, ...] = ()  # all_gather only: one fresh tensor like `tensor` per rank
    src: int = 0  # broadcast only: rank in the group
    stamp: bool = False

    def __str__(self) -> str:
        """What must be equal on all ranks, for error texts.

        >>> str(Operation("broadcast", torch.zeros(2, 3), src=1))
        'broadcast from rank 1 of torch.float32 (2, 3)'
        """
        source = f" from rank {self.src}" if self.kind == "broadcast" else ""
        return f"{self.kind}{source} of {self.tensor.dtype} {tuple(self.tensor.shape)}"


class Work(ABC):
    """A collective in flight."""

    def __init__(self, results: tuple[Tensor, ...]) -> None:
        self._results = results

    @abstractmethod
    def wait(self, what: str) -> None:
        """Block until the operation has finished; a second call does nothing, or raises again.

        On an accelerator whose backend orders its work by streams (NCCL), "finished" is as seen
        from the current stream: the host does not block.

        Args:
            what: the operation in the caller's words ("bucket 3 of step 17"), for error texts.

        Raises:
            RankLostError: a rank died or closed its connection. The transport is closed.
            SyncTimeoutError: some rank did not take part within `timeout_s`. The transport is
                closed.
            DesyncError: ranks met in different operations (only where the backend can tell).
            ClosedError: the transport was closed before the operation had finished.
        """

    @property
    @abstractmethod
    def done_s(self) -> float | None:
        """When the operation finished, in `time.perf_counter()` seconds; read it after `wait`.

        None where no stamp was asked for.
        """

    @property
    def results(self) -> list[Tensor]:
        """What an `all_gather` brought, by rank; empty for other operations. Read after `wait`."""
        return list(self._results)


class Transport(ABC):
    """An own communicator over a group of ranks; see the module's text.

    Attributes:
        name: "c10d" or "loopback".
        rank: this rank's number within the group.
        world_size: ranks in the group.
        timeout_s: the longest that an operation may take.
        control_device: where small tensors that the host will read should live.
    """

    name: str
    rank: int
    world_size: int
    timeout_s: float
    control_device: torch.device

    _closed: str | None = None  # why no new operation may start

    def all_reduce(self, tensor: Tensor, *, stamp: bool = False) -> Work:
        """Start replacing `tensor` by its sum over ranks, in place.

        Args:
            tensor: contiguous, of one of `SUMMABLE_DTYPES`, the same shape and dtype on all ranks;
                not to be touched until the work was waited for.
            stamp: record when it finished, see `Work.done_s`.
        """
        self._check("all_reduce", tensor)
        if tensor.dtype not in SUMMABLE_DTYPES:
            raise TypeError(
                f"all_reduce on rank {self.rank} cannot sum {tensor.dtype}; convert the tensor to "
                f"one of {', '.join(sorted(map(str, SUMMABLE_DTYPES)))}"
            )
        return self._start(Operation("all_reduce", tensor, stamp=stamp))

    def all_gather(self, tensor: Tensor, *, stamp: bool = False) -> Work:
        """Start collecting every rank's `tensor`; `work.results[r]` is a copy of rank r's.

        Args:
            tensor: contiguous, any dtype, the same shape and dtype on all ranks.
            stamp: record when it finished, see `Work.done_s`.
        """
        self._check("all_gather", tensor)
        rows = tuple(torch.empty_like(tensor) for _ in range(self.world_size))
        return self._start(Operation("all_gather", tensor, rows=rows, stamp=stamp))

    def broadcast(self, tensor: Tensor, src: int, *, stamp: bool = False) -> Work:
        """Start replacing `tensor` by rank `src`'s, in place.

        Args:
            tensor: contiguous, any dtype, the same shape and dtype on all ranks.
            src: rank within the group, the same on all ranks.
            stamp: record when it finished, see `Work.done_s`.
        """
        self._check("broadcast", tensor)
        if not 0 <= src < self.world_size:
            raise ValueError(
                f"broadcast on rank {self.rank}: src={src} is not a rank of the group; "
                f"choose one from 0 to {self.world_size - 1}"
            )
        return self._start(Operation("broadcast", tensor, src=src, stamp=stamp))

    def exchange(self, payload: bytes) -> list[bytes]:
        """Give `payload` to every rank and return every rank's, in rank order; blocks.

        The lengths may differ and may be zero. Two small collectives on `control_device`.
        """
        what = f"exchange of {len(payload)} bytes"
        length = torch.tensor([len(payload)], dtype=torch.int64, device=self.control_device)
        work = self.all_gather(length)
        work.wait(what)
        lengths = [int(row.item()) for row in work.results]

        padded = torch.frombuffer(
            bytearray(payload.ljust(max(1, *lengths), b"\0")), dtype=torch.uint8
        )
        work = self.all_gather(padded.to(self.control_device))
        work.wait(what)
        return [
            row.cpu().numpy()[:n].tobytes() for row, n in zip(work.results, lengths, strict=True)
        ]

    def close(self) -> None:
        """Free threads, sockets and buffers; a second call does nothing.

        Operations that have not finished are given up, and raise `ClosedError` when waited for;
        ranks that wait for them see this rank as lost.
        """
        if self._closed is None:
            self._closed = "close() was called"
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _start(self, operation: Operation) -> Work:
        """Hand a checked operation to the backend."""

    @abstractmethod
    def _release(self) -> None:
        """Free what the backend holds; called once."""

    def _check(self, kind: OperationKind, tensor: Tensor) -> None:
        if self._closed is not None:
            raise ClosedError(
                f"{kind} on rank {self.rank}: this {self.name} transport is closed "
                f"({self._closed}); open a new one on a working group"
            )
        problem = _problem(tensor)
        if problem is not None:
            raise ValueError(f"{kind} on rank {self.rank}: the tensor {problem}")


def _problem(tensor: Tensor) -> str | None:
    """What stops `tensor` from being read and written as one flat run of memory, and the cure."""
    if tensor.layout is not torch.strided:
        return f"has layout {tensor.layout}; pass a dense one (tensor.to_dense())"
    if not tensor.is_contiguous():
        shape, stride = tuple(tensor.shape), tensor.stride()
        return f"of shape {shape} has strides {stride}; pass tensor.contiguous()"
    if tensor.requires_grad:
        return "requires grad and collectives are not differentiable; pass tensor.detach()"
    if tensor.is_conj() or tensor.is_neg():
        return "is a lazy conjugate or negative view; pass tensor.resolve_conj().resolve_neg()"
    return None
