"""A communicator of `torch.distributed`, for any backend; others derive from it.

Collectives are called on the backend object itself, because the functions of `torch.distributed`
accept only registered groups.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fddp.native import extension
from fddp.native.capture import is_capturing
from fddp.transport.c10d.device_clock import DeviceClock
from fddp.transport.group_backend import backend_of
from fddp.transport.lifetime.fork import register_fork_owner
from fddp.transport.liveness.interrupts import ignore_backend_errors
from fddp.transport.tree_sum import sum_along_tree_

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from fddp._C import CollectiveRange, StreamBackend
    from fddp.core.schedule.sum_tree import SumTree
    from fddp.transport.liveness.failure import Failure
    from fddp.transport.liveness.membership import Membership
    from fddp.transport.operation import Operation


class CommunicatorSpec(NamedTuple):
    """Parameters of a new communicator of a transport."""

    group: dist.ProcessGroup  # of the transport
    rank: int
    ranks: tuple[int, ...]  # members in ascending order, as ranks in the transport
    membership: Membership
    timeout_s: float
    check_peers: Callable[[], None]  # called repeatedly while ranks connect; may raise

    @property
    def place(self) -> int:
        return self.ranks.index(self.rank)

    @property
    def store_prefix(self) -> str:
        """Prefix of these ranks' keys within the transport's part of the store."""
        name = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:16]  # bounded length
        return f"ranks/{name}"

    @property
    def store(self) -> dist.Store:
        """Part of the group's store for these ranks of this transport."""
        return dist.PrefixStore(self.store_prefix, self.membership.store.raw)


class Pending(Protocol):
    """An operation in flight. `done` is True if it has finished or failed."""

    @property
    def done(self) -> bool: ...


class PendingWorks(NamedTuple):
    """An operation in flight, as works of torch."""

    works: tuple[dist.Work, ...]
    finish: Callable[[], object] | None = None  # called once all works have finished
    is_captured: bool = False  # in a graph, where the host must not ask

    @property
    def done(self) -> bool:
        # Not a generator, which can swallow the error of a signal handler.
        return not self.is_captured and not [w for w in self.works if not w.is_completed()]

    @property
    def succeeded(self) -> bool:
        if not self.done:
            return False
        with ignore_backend_errors():
            for work in self.works:
                work.wait()
            return True
        return False


class Communicator:
    """A private backend (or process group) of torch.

    The base class uses only operations that every backend supports.

    [Note: freeing waits] gloo frees a backend only once its pending operations have ended. After
    the loss of a rank this takes until their timeout. `free` therefore drops the only reference,
    and a separate thread waits for the end; works and tracebacks refer to the communicator, never
    to the backend. The destructor runs on a native thread: a Python thread would be unwound when
    the process ends, and unwinding a destructor ends the process with SIGABRT instead of its own
    exit code.

    Attributes:
        addresses: keys of this rank's addresses in the transport's part of the store.
        soon_s: longest wait of `finishes_soon`, in seconds.
        uses_streams: True if streams order its works on devices, which the host does not await.
        watches_members: True if it detects members that have ended.
        spreads_failures: True if a failure of any rank of the transport ends its operations on all.
    """

    _averages = False  # True if the backend can divide a sum by the number of ranks
    _is_owner = False  # True if this object, rather than torch, owns the backend
    addresses: tuple[str, ...] = ()
    soon_s = 0.0
    uses_streams = False
    watches_members = False
    spreads_failures = False

    def __init__(self, backend: Any, rank: int, ranks: tuple[int, ...]) -> None:
        self._backend = backend
        self._ranks = ranks
        self._place = ranks.index(rank)
        self._clocks: dict[torch.device, DeviceClock] = {}
        self._issued = 0  # by Python
        self._stream: StreamBackend | None = None
        register_fork_owner(self)  # [Note: forks]

    @property
    def backend(self) -> Any:
        """The backend of torch. RuntimeError if the communicator was closed."""
        backend = self._backend
        if backend is None:
            raise RuntimeError("the communicator was closed")
        return backend

    def connect(self, device: torch.device) -> None:
        """Connect the ranks on a device, which else happens at the first operation; may block. A
        collective call."""

    @property
    def averages(self) -> bool:
        """True if sums on devices are divided within the collective, not after it. Known once the
        device is connected."""
        return self._averages and self.uses_streams

    def stream_backend(self, device_type: str) -> StreamBackend | None:
        """Return the backend of a type of devices for collectives that the extension starts.

        None if streams do not order its works, it is written in Python, or torch compares all calls
        of the ranks.
        """
        is_debugged = dist.get_debug_level() == dist.DebugLevel.DETAIL
        if self._stream is None and self.uses_streams and not is_debugged:
            device = torch.device(device_type)
            backend = backend_of(self.backend, device)
            if not isinstance(backend, dist.ProcessGroup):
                self._stream = extension.compiled.StreamBackend(backend, device)
        return self._stream

    @property
    def issued(self) -> int:
        """Number of operations so far."""
        return self._issued + (0 if self._stream is None else self._stream.issued)

    @property
    def in_flight(self) -> bool:
        """True if an operation that the extension has started has not finished."""
        return self._stream is not None and self._stream.in_flight

    def close_stream_backend(self) -> None:
        """Let Python start and await all operations from now on, which raises."""
        if self._stream is not None:
            self._stream.close()

    def set_timeout(self, timeout_s: float) -> None:
        """Set the time limit of an operation."""
        self.backend.set_timeout(timedelta(seconds=timeout_s))

    def issue(self, operation: Operation) -> Pending:
        """Start `operation`; errors of torch (RuntimeError) propagate."""
        self._issued += 1
        pending = self._started(operation)
        if self.uses_streams and is_capturing(operation.tensor.device.type):
            return pending._replace(is_captured=True)
        return pending

    def _started(self, operation: Operation) -> PendingWorks:
        if operation.kind == "all_reduce":
            return self._all_reduce(operation)
        if operation.kind == "reduce_scatter":
            return self._reduce_scatter(operation)
        if operation.kind == "all_gather":
            return self._all_gather(operation)
        if operation.kind == "all_to_all":
            return self._all_to_all(operation)
        return PendingWorks((self._broadcast(operation.tensor, self._ranks.index(operation.src)),))

    def _all_reduce(self, operation: Operation) -> PendingWorks:
        options, tensor = c10d.AllreduceOptions(), operation.tensor
        if operation.average and self._averages:
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
        work = self.backend.allreduce([reals_of(tensor)], options)
        if operation.average and not self._averages:
            return PendingWorks((work,), partial(tensor.div_, len(operation.ranks)))
        return PendingWorks((work,))

    def _reduce_scatter(self, operation: Operation) -> PendingWorks:
        if operation.tree is not None:
            return self._exchange(operation, torch.empty_like(bytes_of(operation.tensor)))
        return self._all_reduce(operation)  # other chunks are undefined, so they may be sums

    def _scatter(self, operation: Operation) -> PendingWorks:
        """Reduce-scatter by the backend's own."""
        options = c10d.ReduceScatterOptions()
        if operation.average and self._averages:
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
        own, whole = operation.chunks[self._place], operation.tensor
        work = self.backend._reduce_scatter_base(reals_of(own), reals_of(whole), options)
        if operation.average and not self._averages:
            return PendingWorks((work,), partial(own.div_, len(operation.ranks)))
        return PendingWorks((work,))

    def _exchange(self, operation: Operation, arrived: Tensor) -> PendingWorks:
        """Reduce-scatter by an all-to-all into the bytes `arrived` and a sum on each rank."""
        if operation.tree is not None:
            return self._exchange_rows(operation, operation.tree, arrived)
        own = operation.chunks[self._place]
        work = self._send_chunks(operation.tensor, arrived)
        theirs = operation._replace(tensor=arrived.view(operation.tensor.dtype)).chunks

        def finish() -> None:
            _add_up_(operation.chunks, theirs, self._place)
            if operation.average:
                own.div_(len(operation.ranks))

        return PendingWorks((work,), finish)

    def _exchange_rows(self, operation: Operation, tree: SumTree, arrived: Tensor) -> PendingWorks:
        """As `_exchange`, of the rows of each chunk that hold summands."""
        ranks, own = len(tree.summands), tree.summands[self._place]
        rows = operation.tensor.view(ranks, tree.width, -1)
        row_bytes = rows.shape[2] * rows.element_size()
        received = [count * row_bytes for count in tree.summands]
        arrived = arrived[: sum(received)]
        sent = [own * row_bytes] * ranks
        work = self._send_chunks(rows[:, :own].contiguous(), arrived, sent, received)

        def finish() -> None:
            theirs = arrived.view(operation.tensor.dtype).view(sum(tree.summands), -1)
            for number, total in enumerate(sum_along_tree_(theirs.unbind(0), tree.additions)):
                rows[self._place, number].copy_(total)

        return PendingWorks((work,), finish)

    def _all_gather(self, operation: Operation) -> PendingWorks:
        chunks = [bytes_of(chunk) for chunk in operation.chunks]
        own = chunks[self._place].clone()  # not every backend gathers in place
        return PendingWorks((self.backend.allgather([chunks], [own], c10d.AllgatherOptions()),))

    def _all_to_all(self, operation: Operation) -> PendingWorks:
        arrived = torch.empty_like(operation.tensor)
        work = self._send_chunks(operation.tensor, bytes_of(arrived))
        return PendingWorks((work,), partial(operation.tensor.copy_, arrived))

    def _send_chunks(
        self,
        tensor: Tensor,
        arrived: Tensor,
        sent: Sequence[int] = (),
        received: Sequence[int] = (),
    ) -> dist.Work:
        """Send a chunk of `tensor` to each rank; theirs arrive in the bytes `arrived`. `sent` and
        `received` are the bytes to and from each; () for equal chunks."""
        options = c10d.AllToAllOptions()
        return self.backend.alltoall_base(  # type: ignore[no-any-return]
            arrived, bytes_of(tensor), [*received], [*sent], options
        )

    def _broadcast(self, tensor: Tensor, place: int) -> dist.Work:
        options = c10d.BroadcastOptions()
        options.rootRank = place
        return self.backend.broadcast([bytes_of(tensor)], options)  # type: ignore[no-any-return]

    def finishes_soon(self, collective: Any) -> bool:
        """Return True if `collective` has finished within `soon_s` seconds."""
        return False

    def wait(self, collective: Any, check_peers: Callable[[], None]) -> None:
        """Block until `collective` has finished (on accelerators: make the current stream wait).
        During a long wait `check_peers` is called repeatedly, and may raise RuntimeError.

        Raises:
            RuntimeError: errors of the backend and of `check_peers`.
        """
        self._await(collective.works, check_peers)
        if collective.finish is not None:
            collective.finish()

    def _await(self, works: Sequence[dist.Work], check_peers: Callable[[], None]) -> None:
        for work in works:
            work.wait()

    def watch(self, collective: Any, device: torch.device) -> Callable[[], float | None]:
        """Return a function that returns the completion time in `time.perf_counter()` seconds.

        On a device of which streams order the works, it is that of the device's clock. Elsewhere
        the time is recorded on the backend's thread without the GIL: acquiring it after the end of
        the interpreter would end the process with SIGABRT instead of its own exit code.
        """
        if self.uses_streams and device.type != "cpu":
            clock = self._clocks.get(device)
            if clock is None or clock.is_old:
                clock = self._clocks[device] = DeviceClock(device)
            return clock.end_of(collective.works)
        stamps = [extension.compiled.CompletionTimestamp(work) for work in collective.works]

        def arrived_s() -> float | None:
            ended_s = [end_s for stamp in stamps if (end_s := stamp.completed_s) is not None]
            return max(ended_s) if len(ended_s) == len(stamps) else None

        return arrived_s

    def end_range(self, collective: Any, range: CollectiveRange) -> None:
        """End the range of `collective` in a profile at its completion. Where streams order the
        works, it stays open: torch shows their kernels."""
        if not self.uses_streams:
            extension.compiled.end_range_after(collective.works, range)

    def free(self, *, failed: bool, over: threading.Event) -> Callable[[], None]:
        """Release the backend; no further operations may be issued. Returns a blocking function
        that completes the release, see [Note: freeing waits].

        Args:
            failed: True if ranks may be lost.
            over: set when the process is about to end.
        """
        backend, self._backend = self._backend, None
        return partial(self._end, backend, failed=failed)

    def _end(self, backend: Any, *, failed: bool) -> None:
        """Shut down the backend; may block."""

    def spread(self, failure: Failure | None) -> None:
        """End the operations of all members after a failure elsewhere; None if its cause is not
        known yet. Does nothing if the backend can't."""

    def disown(self) -> None:
        """Never free an inherited backend, see [Note: forks]."""
        if self._is_owner and self._backend is not None:
            extension.compiled.BackendRelease(self._backend).leak()


def reals_of(tensor: Tensor) -> Tensor:
    """View complex tensors as real, which every backend can sum."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def bytes_of(tensor: Tensor) -> Tensor:
    """View a tensor as flat bytes, which every backend can move."""
    return tensor.reshape(-1).view(torch.uint8)


def _add_up_(mine: Sequence[Tensor], theirs: Sequence[Tensor], place: int) -> None:
    """Sum all ranks' chunks into this rank's own, in rank order; overwrites `theirs`. The operands
    of one addition are swapped, which does not change the result."""
    own = mine[place]
    if place > 0:
        before = theirs[0]
        for chunk in theirs[1:place]:
            before += chunk
        own += before
    for chunk in theirs[place + 1 :]:
        own += chunk
