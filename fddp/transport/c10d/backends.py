"""Communicators of `torch.distributed`, one class for each kind of backend.

Collectives are called on the backend object itself, because the functions of `torch.distributed`
accept only registered groups.
"""

from __future__ import annotations

import hashlib
import threading
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fddp.native import extension
from fddp.transport.c10d.rendezvous import connect_with_abort
from fddp.transport.lifetime.fork import register_fork_owner
from fddp.transport.liveness.interrupts import (
    DeadlineExceededError,
    from_user_code,
    ignore_backend_errors,
)
from fddp.transport.ordered_sum import sum_along_tree_, sum_in_order_

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from fddp.core.schedule.virtual import SumTree
    from fddp.transport.liveness.membership import Membership
    from fddp.transport.operation import Operation

_LONGEST_PAUSE_S = 0.05  # between two polls for the end of a gloo backend
_CHECK_INTERVAL = timedelta(seconds=0.25)  # between two checks of the other ranks during a wait
_MAX_EXCHANGED_BYTES = 256 << 10  # from some 1 MiB on an all-reduce is as fast as an exchange


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


class PendingCollective(NamedTuple):
    """An operation in flight."""

    works: tuple[dist.Work, ...]
    finish: Callable[[], object] | None = None  # called once all works have finished

    @property
    def arrived(self) -> bool:
        return all(work.is_completed() for work in self.works)

    @property
    def arrived_well(self) -> bool:
        if not self.arrived:
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
    """

    _averages = False  # True if the backend can divide a sum by the number of ranks
    _is_owner = False  # True if this object, rather than torch, owns the backend
    addresses: tuple[str, ...] = ()

    def __init__(self, backend: Any, spec: CommunicatorSpec) -> None:
        self._backend = backend
        self._place = spec.place
        self.issued = 0  # number of operations so far
        self._sources = {rank: place for place, rank in enumerate(spec.ranks)}
        register_fork_owner(self)  # [Note: forks]

    def issue(self, operation: Operation) -> PendingCollective:
        """Start `operation`; errors of torch (RuntimeError) propagate."""
        self.issued += 1
        if operation.kind == "all_reduce":
            return self._all_reduce(operation)
        if operation.kind == "reduce_scatter":
            return self._reduce_scatter(operation)
        if operation.kind == "all_gather":
            return self._all_gather(operation)
        if operation.kind == "all_to_all":
            return self._all_to_all(operation)
        return PendingCollective((self._broadcast(operation.tensor, self._sources[operation.src]),))

    def _all_reduce(self, operation: Operation) -> PendingCollective:
        options, tensor = c10d.AllreduceOptions(), operation.tensor
        if operation.average and self._averages:
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
        work = self._backend.allreduce([_reals_of(tensor)], options)
        if operation.average and not self._averages:
            return PendingCollective((work,), partial(tensor.div_, len(operation.ranks)))
        return PendingCollective((work,))

    def _reduce_scatter(self, operation: Operation) -> PendingCollective:
        if operation.is_ordered:
            return self._exchange(operation, torch.empty_like(_bytes_of(operation.tensor)))
        return self._all_reduce(operation)  # other chunks are undefined, so they may be sums

    def _exchange(self, operation: Operation, arrived: Tensor) -> PendingCollective:
        """Reduce-scatter by an all-to-all into the bytes `arrived` and a sum on each rank."""
        if operation.tree is not None:
            return self._exchange_rows(operation, operation.tree, arrived)
        own = operation.chunks[self._place]
        work = self._send_chunks(operation.tensor, arrived)
        theirs = operation._replace(tensor=arrived.view(operation.tensor.dtype)).chunks

        def finish() -> None:
            if operation.association:
                total = sum_in_order_(theirs, operation.association)
            else:
                _add_up_(operation.chunks, theirs, self._place)
                total = own
            if operation.average:
                total.div_(len(operation.ranks))
            if total is not own:
                own.copy_(total)

        return PendingCollective((work,), finish)

    def _exchange_rows(
        self, operation: Operation, tree: SumTree, arrived: Tensor
    ) -> PendingCollective:
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

        return PendingCollective((work,), finish)

    def _all_gather(self, operation: Operation) -> PendingCollective:
        chunks = [_bytes_of(chunk) for chunk in operation.chunks]
        own = chunks[self._place].clone()  # not every backend gathers in place
        return PendingCollective(
            (self._backend.allgather([chunks], [own], c10d.AllgatherOptions()),)
        )

    def _all_to_all(self, operation: Operation) -> PendingCollective:
        arrived = torch.empty_like(operation.tensor)
        work = self._send_chunks(operation.tensor, _bytes_of(arrived))
        return PendingCollective((work,), partial(operation.tensor.copy_, arrived))

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
        return self._backend.alltoall_base(  # type: ignore[no-any-return]
            arrived, _bytes_of(tensor), [*received], [*sent], options
        )

    def _broadcast(self, tensor: Tensor, place: int) -> dist.Work:
        options = c10d.BroadcastOptions()
        options.rootRank = place
        return self._backend.broadcast([_bytes_of(tensor)], options)  # type: ignore[no-any-return]

    def wait(self, collective: PendingCollective, check_peers: Callable[[], None]) -> None:
        """Block until `collective` has finished (on accelerators: make the current stream wait).
        During a long wait `check_peers` is called repeatedly, and may raise RuntimeError."""
        self._await(collective.works, check_peers)
        if collective.finish is not None:
            collective.finish()

    def _await(self, works: Sequence[dist.Work], check_peers: Callable[[], None]) -> None:
        for work in works:
            work.wait()

    def watch(self, collective: PendingCollective) -> Callable[[], float | None]:
        """Return a function that returns the completion time in `time.perf_counter()` seconds.

        The time is recorded on the backend's thread without the GIL: acquiring it after the end of
        the interpreter would end the process with SIGABRT instead of its own exit code.
        """
        stamps = [extension.load().CompletionTimestamp(work) for work in collective.works]

        def arrived_s() -> float | None:
            ended_s = [stamp.completed_s for stamp in stamps]
            return None if None in ended_s else max(ended_s)

        return arrived_s

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

    def disown(self) -> None:
        """Never free an inherited backend, see [Note: forks]."""
        if self._is_owner and self._backend is not None:
            extension.load().BackendRelease(self._backend).leak()


class GlooCommunicator(Communicator):
    """gloo, connected through the transport's part of the store.

    The constructor blocks while the ranks connect, see [Note: connecting].

    [Note: news of a failure] With gloo only the neighbours of a dead rank see an error, and its
    `abort` does nothing: the other ranks would wait for the whole timeout. A rank that detects a
    failure therefore reports it in the store, and `wait` polls the store.
    """

    _averages = True
    _is_owner = True

    def __init__(self, spec: CommunicatorSpec) -> None:
        timeout = timedelta(seconds=spec.timeout_s)
        size = len(spec.ranks)

        def make(store: dist.Store) -> dist.ProcessGroupGloo:
            return dist.ProcessGroupGloo(store, spec.place, size, timeout)

        backend, self._store = connect_with_abort(
            make, spec.store, spec.timeout_s, spec.check_peers
        )
        super().__init__(backend, spec)
        self.addresses = tuple(f"{spec.store_prefix}/{key}" for key in self._store.keys_set)
        self._timeout_s = spec.timeout_s
        self._scratch = _ScratchPool()
        self._spin = extension.load().WorkSpin()

    def free(self, *, failed: bool, over: threading.Event) -> Callable[[], None]:
        freeing = extension.load().BackendRelease(self._backend)
        # Here, not on that thread: Python's lock is let go of meanwhile, see [Note: exits].
        self._backend = None
        freeing.start()
        return partial(_await_end, freeing, over)

    def _all_reduce(self, operation: Operation) -> PendingCollective:
        # gloo's all-reduce takes two messages in turn. Two ranks that exchange their tensors, and
        # sum on their own, need one: 0.4 to 0.7 of the time, with the same bits.
        tensor = operation.tensor
        is_small = tensor.device.type == "cpu" and 0 < tensor.nbytes <= _MAX_EXCHANGED_BYTES
        if len(operation.ranks) != 2 or not is_small:
            return super()._all_reduce(operation)
        theirs = torch.empty_like(tensor)
        sizes = [0, tensor.nbytes] if self._place == 0 else [tensor.nbytes, 0]
        work = self._send_chunks(tensor, _bytes_of(theirs), sizes, sizes)

        def finish() -> None:
            tensor.add_(theirs)
            if operation.average:
                tensor.div_(2)

        return PendingCollective((work,), finish)

    def _reduce_scatter(self, operation: Operation) -> PendingCollective:
        # gloo's own reduce-scatter is an all-reduce of a copy. An all-to-all followed by local sums
        # takes 0.4 to 0.7 of the time of an all-reduce in place (2 and 4 ranks, 1 to 32 MB; not
        # more for smaller buffers), and sums in rank order for all sizes.
        if operation.tensor.device.type != "cpu":
            return super()._reduce_scatter(operation)
        memory = self._scratch.acquire(operation.tensor.nbytes)
        works, add_up = self._exchange(operation, memory[: operation.tensor.nbytes])

        def finish() -> None:
            if add_up is not None:
                add_up()
            self._scratch.release(memory)

        return PendingCollective(works, finish)

    def _all_gather(self, operation: Operation) -> PendingCollective:
        # gloo's own all-gather copies from a new buffer. For large buffers it takes 2 to 4 times as
        # long as a broadcast from each rank into place, and for small ones as long. `fixed_size`
        # operations must not be matched with a broadcast: gloo ends the process if sizes differ.
        if operation.fixed_size:
            return super()._all_gather(operation)
        return PendingCollective(
            tuple(self._broadcast(c, place) for place, c in enumerate(operation.chunks))
        )

    def _await(self, works: Sequence[dist.Work], check_peers: Callable[[], None]) -> None:
        deadline_s = time.perf_counter() + self._timeout_s
        for work in works:
            self._spin.poll(work)
            while not _finishes(work, _CHECK_INTERVAL):
                # [Note: news of a failure]
                check_peers()
                if time.perf_counter() > deadline_s:
                    raise DeadlineExceededError(f"timed out after {self._timeout_s} s")


class _ScratchPool:
    """Reused receive buffers: new pages cost as much as the exchange itself."""

    _MAX_KEPT = 2  # the number of operations that gloo runs concurrently

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[Tensor] = []

    def acquire(self, nbytes: int) -> Tensor:
        with self._lock:
            for i, memory in enumerate(self._kept):
                if memory.numel() >= nbytes:
                    return self._kept.pop(i)
        return torch.empty(nbytes, dtype=torch.uint8)

    def release(self, memory: Tensor) -> None:
        with self._lock:
            self._kept = sorted([*self._kept, memory], key=torch.numel)[-self._MAX_KEPT :]


class NcclCommunicator(Communicator):
    """nccl, which connects at the first operation on the current device."""

    _averages = True
    _is_owner = True

    def __init__(self, spec: CommunicatorSpec) -> None:
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=spec.timeout_s)
        size = len(spec.ranks)
        super().__init__(c10d.ProcessGroupNCCL(spec.store, spec.place, size, options), spec)
        self._origin: tuple[torch.cuda.Stream, torch.cuda.Event, float] | None = None

    def _reduce_scatter(self, operation: Operation) -> PendingCollective:
        if operation.is_ordered:
            return super()._reduce_scatter(operation)
        options = c10d.ReduceScatterOptions()
        if operation.average:
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
        own, whole = operation.chunks[self._place], operation.tensor
        work = self._backend._reduce_scatter_base(_reals_of(own), _reals_of(whole), options)
        return PendingCollective((work,))

    def _all_gather(self, operation: Operation) -> PendingCollective:
        own, whole = operation.chunks[self._place], operation.tensor
        options = c10d.AllgatherOptions()
        work = self._backend._allgather_base(_bytes_of(whole), _bytes_of(own), options)
        return PendingCollective((work,))

    def watch(self, collective: PendingCollective) -> Callable[[], float | None]:
        """Measure by the device's clock: a side stream waits for the works."""
        stream, origin, origin_s = self._origin = self._origin or _origin()
        with torch.cuda.stream(stream):
            for work in collective.works:
                work.wait()
            done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            done.record()

        def done_s() -> float:
            done.synchronize()
            return origin_s + float(origin.elapsed_time(done)) / 1e3

        return done_s

    def _end(self, backend: Any, *, failed: bool) -> None:
        if failed:
            backend.abort()
        else:
            backend.shutdown()


class GroupCommunicator(Communicator):
    """Any other backend, through `new_group`, a collective call of all members."""

    def __init__(self, spec: CommunicatorSpec, backend: str) -> None:
        members = dist.get_process_group_ranks(spec.group)
        group = dist.new_group(
            [members[rank] for rank in spec.ranks],
            timeout=timedelta(seconds=spec.timeout_s),
            backend=backend,
            use_local_synchronization=len(spec.ranks) < dist.get_world_size(),
        )
        super().__init__(group, spec)

    def _end(self, backend: Any, *, failed: bool) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(backend)


def connect(spec: CommunicatorSpec, backends: dict[str, str]) -> dict[str, Communicator]:
    """Create one communicator for each distinct backend; return them by device type."""
    names = set(backends.values())
    if not names <= {"gloo", "nccl"}:
        config = ",".join(f"{device}:{backend}" for device, backend in backends.items())
        if len(names) == 1:  # torch warns of a group like "cpu:fddp" when it is destroyed
            config = next(iter(names))
        return dict.fromkeys(backends, GroupCommunicator(spec, config))
    by_name: dict[str, Communicator] = {}
    if "gloo" in names:
        by_name["gloo"] = GlooCommunicator(spec)
    if "nccl" in names:
        by_name["nccl"] = NcclCommunicator(spec)
    return {device: by_name[backend] for device, backend in backends.items()}


def _reals_of(tensor: Tensor) -> Tensor:
    """View complex tensors as real, which every backend can sum."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _bytes_of(tensor: Tensor) -> Tensor:
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


def _await_end(freeing: Any, over: threading.Event) -> None:
    """Wait until `BackendRelease` has freed a backend, or the process is about to end."""
    pause_s = 0.0005
    while not (freeing.done or over.wait(pause_s)):
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _finishes(work: dist.Work, within: timedelta) -> bool:
    """Return True if `work` finishes within a time limit. Raise its error if it failed."""
    try:
        work.wait(within)
    except RuntimeError as error:
        if from_user_code(error):
            raise
        if not work.is_completed():
            return False
        work.wait()  # raises its error, or returns if it finished just after the time limit
    return True


def _origin() -> tuple[torch.cuda.Stream, torch.cuda.Event, float]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    event.synchronize()
    return stream, event, time.perf_counter()
