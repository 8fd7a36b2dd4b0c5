"""The interface of transports: asynchronous collectives over a group of ranks.

A `Transport` starts collectives and returns a `Work` for each. Collectives of different ranks are
matched only by the order in which they are issued on their transport. Two transports over one group
are independent: their operations may interleave differently on different ranks. A transport may be
used from several threads, provided that the caller issues operations in the same order on all
ranks.

After `open_subgroups`, collectives can also run along some axes of a topology: in the group of
ranks that differ from this one in these axes only. Each such group has its own issue order, and
groups do not wait for each other.

This module validates arguments and forms the `Operation` for all transports. A backend implements
`_start`, `_connect`, `_release` and `publish_step_failure`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fddp.core.protocol.differences import check_equal
from fddp.core.protocol.messages import decode_all, malformed_message_error
from fddp.core.text import counted
from fddp.errors import ClosedError, DesyncError, InternalError
from fddp.native import extension
from fddp.telemetry.waits import LEAST_S, note_wait
from fddp.transport.lifetime.fork import IN_A_FORK
from fddp.transport.operation import Operation, check_operation, check_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor
    from typing_extensions import Self

    from fddp._C import CollectiveRange, Collectives
    from fddp.core.schedule.sum_tree import SumTree
    from fddp.core.schedule.topology import Topology
    from fddp.transport.liveness.status import TransportStatus

#: names of axes; () stands for all ranks
Axes = tuple[str, ...]

_TOPIC_BYTES = 16
_LENGTH_BYTES = 8
_INLINE_BYTES = 1000  # of the payload, sent together with topic and length
_MAX_PAYLOAD_BYTES = 2**31  # longer payloads are rejected before memory is allocated
_REAL_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class Work(ABC):
    """A collective in flight."""

    _results: tuple[Tensor, ...] = ()

    def wait(self, what: str) -> None:
        """Block until the operation has finished; a second call does nothing, or raises again.

        On an accelerator whose backend orders its work by streams (NCCL), the current stream waits
        and the host does not block.

        Args:
            what: description of the operation ("bucket 3 of step 17") for error texts.

        Raises:
            RankLostError: a rank died or closed its connection. The transport is closed.
            SyncTimeoutError: some rank did not take part within `timeout_s`. The transport is
                closed.
            DesyncError: ranks issued different operations, on backends that can detect it.
            ClosedError: the transport was closed before the operation had finished.
        """
        start_s = perf_counter()
        self._wait(what)
        end_s = perf_counter()
        if end_s - start_s > LEAST_S:
            note_wait(start_s, end_s)

    @abstractmethod
    def _wait(self, what: str) -> None:
        """Implement `wait`, which measures its duration; see [Note: time spent waiting]."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """True if `wait` would not block on other ranks. Never blocks or raises.

        Either all data of other ranks has arrived (read the tensor only after `wait`), or `wait`
        raises at once.
        """

    @property
    @abstractmethod
    def done_s(self) -> float | None:
        """Completion time in `time.perf_counter()` seconds, valid after `wait`.

        None if the operation was started without `record_time`.
        """

    def end_range(self, range: CollectiveRange) -> None:
        """End the range of the operation in a profile at its completion. A range that is still open
        after `wait` ends there."""
        return

    @property
    def results(self) -> list[Tensor]:
        """Results of an `all_gather` by rank, as views of one buffer, valid after `wait`.

        Empty for other operations.
        """
        return list(self._results)


class Endpoint(ABC):
    """One rank's end of a communicator over a group of ranks: its name, life and failures.

    Attributes:
        name: "shm", "c10d", "shm+c10d" (shm within hosts, c10d across) or "loopback".
        reason: why this transport was chosen, in a few words.
        rank: this rank's number within the group.
        world_size: number of ranks in the group.
        timeout_s: time limit of one operation, in seconds.
        control_device: device for small tensors that the host reads.
        status: the operation this rank waits for, reported in the errors of other ranks.
        closed_by: reason why no further operation may start; empty while the transport is open.
    """

    status: TransportStatus
    name: str
    reason: str
    rank: int
    world_size: int
    timeout_s: float
    control_device: torch.device
    closed_by: str = ""

    @property
    def label(self) -> str:
        """Name of this transport in error texts, such as "GradSync #1"; empty if it has none."""
        return self.status.label

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks (numbers in the job), by rank in the group."""
        return self._everyone

    @cached_property
    def size_cache(self) -> dict[object, object]:
        """Sizes on which the ranks that communicate have already agreed, by purpose and axes.
        Entries are the same on these ranks, so that a hit on one is a hit on all."""
        return {}

    @cached_property
    def _everyone(self) -> tuple[int, ...]:
        return tuple(range(self.world_size))

    def enter_step(self, step: int | None) -> int | None:
        """Make this rank's waits raise once another rank fails `step`; None: failed steps do not
        interrupt waits. Return the step that did before."""
        outer, self.status.in_step = self.status.in_step, step
        return outer

    @abstractmethod
    def publish_step_failure(self, step: int, text: str) -> None:
        """Report that `step` failed on this rank with the error `text`.

        Ranks that wait on another transport within this step then raise.
        """

    def step_failure(self, step: int) -> str | None:
        """Return the failure of `step` that another rank has published, or None."""
        return self.status.read_step_failure(step)

    def note_interrupted_step(self) -> None:
        """Record that a step ended on this rank before all of its collectives had finished. Ranks
        could not exchange `abandoned` in it; see `close_abandoned_in_interrupted_step`."""
        self.status.board.interrupted_s = perf_counter()

    def note_finished(self, what: str) -> None:
        """Record the operation that this rank has finished last, if no `Work` waited for it."""
        self.status.done, self.status.board.last = what, self.status

    @property
    def abandoned(self) -> list[str]:
        """Keys of the transports of this rank that a failure has closed during a call, and that
        other ranks may consider open; on any group."""
        return [*self.status.board.abandoned]

    def close_abandoned(self, keys: Collection[str]) -> None:
        """Close this rank's transports with these keys, which some rank has `abandoned`. Only
        transports with a callback are closed, see `on_abandoned`."""
        self.status.board.close_abandoned(keys)

    def close_abandoned_in_interrupted_step(self) -> None:
        """Close the transports that some rank has abandoned in an interrupted step. Waits up to a
        second for the reports of other ranks; does nothing if no step was interrupted."""
        self.status.board.close_abandoned_in_interrupted_step()

    def on_abandoned(self, close: Callable[[], None]) -> None:
        """Set the function that closes this transport once some rank has abandoned it."""
        self.status.close = close

    def close(self, reason: str = "close() was called") -> None:
        """Free threads, sockets and buffers; a second call does nothing.

        Unfinished operations are abandoned: their `wait` raises `ClosedError`. Ranks that wait for
        them see this rank as lost.

        Args:
            reason: text for the errors of later operations.
        """
        self.closed_by = self.closed_by or reason or "close() was called"
        # Once, also if threads close at the same time: `setdefault` is atomic.
        claim = object()
        if self.__dict__.setdefault("_released_by", claim) is claim:
            self._release()

    def abandon(self, reason: str) -> None:
        """Close during operations, and report this to the ranks that wait for them."""
        self.close(reason)

    def group_left(self) -> Any:
        """Return a group of the ranks of this group that are left; a collective call of theirs,
        also after a failure. None if the group no longer exists.

        Raises:
            RankLostError: another rank was lost meanwhile, or the others went on without this one.
            SyncTimeoutError: some ranks did not make the call, and are not known to be lost.
        """
        return None

    def hold_group(self) -> None:  # noqa: B027  # none was made
        """Keep a group that `group_left` made until `drop_groups`: this transport may go on from
        it."""

    def drop_groups(self) -> None:  # noqa: B027
        """Destroy the groups that `group_left` made before another transport went on from this
        one, unless something else may go on from them."""

    def announce_leave(self) -> None:
        """Let the other ranks know that this one will not be among those that are left.

        Raises:
            ValueError: groups of this kind can't go on with fewer ranks.
        """
        raise ValueError(
            f"a rank of a {self.name} group can't leave it; end the loops of all ranks by "
            f"request_stop()"
        )

    def ranks_leaving(self) -> tuple[int, ...]:
        """Return the ranks that have announced their leave, as numbers of the first group."""
        return ()

    def disown(self) -> None:
        """Mark as closed in a forked process, see [Note: forks]."""
        self.closed_by = self.closed_by or IN_A_FORK

    @abstractmethod
    def _release(self) -> None:
        """Free the backend's resources; called once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Subgroups(NamedTuple):
    """Groups of this rank that `Transport.open_subgroups` has opened."""

    topology: Topology | None = None  # None before the first call
    #: members of this rank's group along each tuple of axes, in ascending order
    ranks: Mapping[Axes, tuple[int, ...]] = MappingProxyType({})

    def members(self, kind: str, axes: Axes, rank: int) -> tuple[int, ...]:
        """Return the members of the group along `axes`; ValueError if it was not opened."""
        members = self.ranks.get(axes)
        if members is None:
            opened = ", ".join(map(repr, self.ranks)) or "none"
            raise ValueError(
                f"{kind} on rank {rank}: no group along {axes!r} was opened; open: {opened}; "
                "pass these axes to open_subgroups"
            )
        return members

    def adding(self, topology: Topology, ranks: Mapping[Axes, tuple[int, ...]]) -> Subgroups:
        """Return these groups and further ones. Groups of another topology are dropped."""
        known = self.ranks if topology == self.topology else {}
        return Subgroups(topology, {**known, **ranks})


class Transport(Endpoint):
    """Collectives over a group of ranks; see the module's text."""

    _subgroups = Subgroups()

    def open_subgroups(self, topology: Topology, groups: Collection[Axes]) -> None:
        """Open the groups along each of `groups`, tuples of axes; a collective call; blocks.

        Each rank joins one group per tuple, `topology.group(axes, rank)`. Later calls with the same
        topology add groups. A call with another topology replaces it and its groups. Existing
        connections between the same ranks are reused.

        Args:
            topology: its world size is the transport's.
            groups: tuples of axis names. The group along all axes is always opened.

        Raises:
            PlanMismatchError: ranks passed different topologies or groups.
            ValueError: the topology has another world size, or lacks one of the axes.
            FddpError: a failed operation.
        """
        ordered = sorted(set(groups))
        request = f"{topology} divided along {ordered}"
        requests = self.exchange(request.encode(), "groups")
        ranks = _own_groups(self.rank, topology, ordered, requests)
        new = [group for group in ranks.values() if 1 < len(group) < self.world_size]
        self._connect(new)
        if new:
            # A rank that closed at once would break off connections that others still open.
            self.exchange(b"", "opened groups")
        self._subgroups = self._subgroups.adding(topology, ranks)

    def all_reduce(
        self,
        tensor: Tensor,
        *,
        axes: Axes = (),
        average: bool = False,
        record_time: bool = False,
        wait_soon: bool = False,
    ) -> Work:
        """Start replacing `tensor` by its sum over ranks, in place.

        Args:
            tensor: contiguous, of one of `SUMMABLE_DTYPES`, the same shape and dtype on all ranks.
                Do not access it before `wait` returns.
            axes: () for all ranks, else axes that were passed to `open_subgroups`.
            average: divide the sum by the number of these ranks; for floating and complex dtypes.
            record_time: record the completion time, see `Work.done_s`.
            wait_soon: the caller waits next, so the operation may be executed within `wait`. Other
                ranks may be held up until then.
        """
        ranks = self._subgroups.ranks.get(axes) or self._ranks("all_reduce", axes)
        return self._launch(
            Operation(
                "all_reduce",
                tensor,
                ranks,
                average=average,
                record_time=record_time,
                wait_soon=wait_soon,
            )
        )

    def reduce_scatter(
        self,
        buffer: Tensor,
        *,
        axes: Axes = (),
        average: bool = False,
        tree: SumTree | None = None,
        record_time: bool = False,
        wait_soon: bool = False,
    ) -> Work:
        """Start replacing this rank's own chunk of `buffer` by its sum over ranks, in place.

        The buffer is divided into equal chunks, one for each participating rank in ascending order.
        The contents of the other chunks are undefined afterwards.

        Args:
            buffer: as for `all_reduce`, of one dimension, its length a multiple of the number of
                participating ranks.
            axes: as for `all_reduce`.
            average, record_time, wait_soon: as for `all_reduce`.
            tree: association of the sum on every transport; None leaves it to the backend. float16
                and bfloat16 are then summed in float32 and rounded once. Each chunk has
                `tree.width` rows of equal length: this rank's summands are the first ones, and the
                sums that are left replace the first rows of this rank's own chunk. A sum along a
                tree can't average. See [Note: one association] in `core/schedule/sum_tree.py`.
        """
        ranks = self._subgroups.ranks.get(axes) or self._ranks("reduce_scatter", axes)
        return self._launch(
            Operation(
                "reduce_scatter",
                buffer,
                ranks,
                average=average,
                record_time=record_time,
                wait_soon=wait_soon,
                tree=tree,
            )
        )

    def all_gather_in_place(
        self,
        buffer: Tensor,
        *,
        axes: Axes = (),
        record_time: bool = False,
        wait_soon: bool = False,
    ) -> Work:
        """Start filling `buffer` with every rank's own chunk of it; see `reduce_scatter`.

        Args:
            buffer: as for `reduce_scatter`, of any dtype. This rank's own chunk is read, the others
                are written.
            axes, record_time, wait_soon: as for `all_reduce`.
        """
        ranks = self._subgroups.ranks.get(axes) or self._ranks("all_gather", axes)
        return self._launch(
            Operation(
                "all_gather",
                buffer,
                ranks,
                record_time=record_time,
                wait_soon=wait_soon,
            )
        )

    def all_to_all_in_place(
        self,
        buffer: Tensor,
        *,
        axes: Axes = (),
        record_time: bool = False,
        wait_soon: bool = False,
    ) -> Work:
        """Start sending every rank its chunk of `buffer`; see `reduce_scatter`.

        Args:
            buffer: as for `reduce_scatter`, of any dtype. Its chunk of a rank is replaced by that
                rank's chunk of this one.
            axes, record_time, wait_soon: as for `all_reduce`.
        """
        ranks = self._ranks("all_to_all", axes)
        return self._launch(
            Operation("all_to_all", buffer, ranks, record_time=record_time, wait_soon=wait_soon)
        )

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor of shape `(numel,)` in memory that suits this transport
        best."""
        return torch.empty(numel, dtype=dtype, device=device)

    def all_gather(
        self,
        tensor: Tensor,
        *,
        axes: Axes = (),
        record_time: bool = False,
        fixed_size: bool = False,
    ) -> Work:
        """Start collecting the `tensor` of every participating rank; `work.results` has copies, by
        rank.

        Args:
            tensor: contiguous, any dtype, the same shape and dtype on all ranks.
            axes: as for `all_reduce`.
            record_time: record the completion time, see `Work.done_s`.
            fixed_size: the tensor is internal to the library, of a size that is the same on all
                ranks even if they are about to issue different operations; see `Operation`.
        """
        check_tensor("all_gather", tensor, self.rank)
        ranks = self._ranks("all_gather", axes)
        rows = tensor.new_empty((len(ranks), *tensor.shape))
        rows[ranks.index(self.rank)].copy_(tensor)
        buffer = rows.view(-1)
        work = self._launch(
            Operation("all_gather", buffer, ranks, record_time=record_time, fixed_size=fixed_size)
        )
        work._results = rows.unbind(0)
        return work

    def broadcast(self, tensor: Tensor, src: int, *, record_time: bool = False) -> Work:
        """Start replacing `tensor` by rank `src`'s, in place.

        Args:
            tensor: contiguous, any dtype, the same shape and dtype on all ranks.
            src: rank within the group, the same on all ranks.
            record_time: record the completion time, see `Work.done_s`.
        """
        if not 0 <= src < self.world_size:
            raise ValueError(
                f"broadcast on rank {self.rank}: src={src} is not a rank of the group; "
                f"choose one from 0 to {self.world_size - 1}"
            )
        return self._launch(
            Operation("broadcast", tensor, self._everyone, src=src, record_time=record_time)
        )

    def exchange(self, payload: bytes, topic: str = "terms", axes: Axes = ()) -> list[bytes]:
        """Send `payload` to the participating ranks and return their payloads, by rank; blocks.

        Lengths may differ and may be zero. One small collective on `control_device`, and a second
        one if a payload does not fit into the first.

        Args:
            payload: any bytes.
            topic: subject of the exchange, at most 16 characters, the same on all ranks.
            axes: as for `all_reduce`.

        Raises:
            DesyncError: ranks passed different topics; raised on every participating rank. No
                payload is returned.
            FddpError: a failed operation.
        """
        ranks = self._ranks("exchange", axes)
        what = f"exchange of {topic} ({len(payload)} bytes)"

        def gather(text: bytes, width: int) -> list[bytes]:
            return gather_bytes(self, text, width, what, axes)

        return _exchange_texts(gather, payload, topic, ranks)

    def native_collectives(
        self, accelerators: Collection[str], *, captured: bool = False
    ) -> Collectives:
        """Return all-reduces over all ranks, which run without Python where possible. They keep the
        transport alive.

        Args:
            accelerators: types of the devices that are used besides the CPU.
            captured: True for steps that are captured in a graph, during which the host must not
                ask whether an operation has finished.
        """
        if self.world_size == 1:
            return extension.compiled.CollectivesOfOne()
        return extension.compiled.CollectivesInPython(self.all_reduce)

    def connect(self, devices: Sequence[torch.device]) -> None:
        """Connect the ranks on these devices, which else happens at the first operation there. A
        collective call."""

    def averages(self, device_types: Collection[str]) -> bool:
        """Return True if `average` costs no further pass over tensors of these devices, which were
        connected; the same on all ranks."""
        return False

    def orders_by_streams(self, device_types: Collection[str]) -> bool:
        """Return True if streams order collectives of tensors on these devices, which the host does
        not await; the same on all ranks."""
        return self.world_size == 1

    @abstractmethod
    def _start(self, operation: Operation) -> Work:
        """Pass a validated operation to the backend."""

    @abstractmethod
    def _connect(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Prepare operations in `groups`, each a tuple of ranks that includes this one."""

    def _ranks(self, kind: str, axes: Axes) -> tuple[int, ...]:
        return self._subgroups.members(kind, axes, self.rank) if axes else self._everyone

    def _launch(self, operation: Operation) -> Work:
        if self.closed_by:
            raise ClosedError(
                f"{operation.kind} on rank {self.rank}: this {self.name} transport is closed "
                f"({self.closed_by}); create its user again, on a working group"
            )
        tensor = operation.tensor
        is_usual = (
            operation.kind == "all_reduce"
            and type(tensor) is torch.Tensor
            and tensor.dtype in _REAL_DTYPES
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and not (tensor.requires_grad or tensor.is_neg())
        )
        if not is_usual:
            check_operation(operation, self.rank)
        if len(operation.ranks) == 1:
            return _LoneWork(operation.record_time)
        return self._start(operation)


class _LoneWork(Work):
    """A finished operation in a group of one rank."""

    done = True

    def __init__(self, record_time: bool) -> None:
        self._done_s = perf_counter() if record_time else None

    @property
    def done_s(self) -> float | None:
        return self._done_s

    def wait(self, what: str) -> None:
        return

    _wait = wait


def gather_bytes(
    transport: Transport, payload: bytes, width: int, what: str, axes: Axes = ()
) -> list[bytes]:
    """Return the payloads of the ranks along `axes`, each zero-padded to `width` bytes; blocks."""
    padded = torch.frombuffer(bytearray(payload.ljust(width, b"\0")), dtype=torch.uint8)
    work = transport.all_gather(padded.to(transport.control_device), axes=axes, fixed_size=True)
    work.wait(what)
    return [row.cpu().numpy().tobytes() for row in work.results]


def _exchange_texts(
    gather: Callable[[bytes, int], list[bytes]], payload: bytes, topic: str, ranks: Sequence[int]
) -> list[bytes]:
    """Return the payloads of `ranks`; arguments and errors as for `Transport.exchange`.

    Args:
        gather: returns the bytes of all ranks, each zero-padded to a width, which is the same on
            all of them.
        payload: this rank's bytes.
        topic: subject of the exchange.
        ranks: participants, for error texts.
    """
    if len(topic.encode()) > _TOPIC_BYTES:
        raise InternalError(f"exchange topic {topic!r} has more than {_TOPIC_BYTES} bytes")
    length = len(payload).to_bytes(_LENGTH_BYTES, "big")
    head = topic.encode().ljust(_TOPIC_BYTES) + length + payload[:_INLINE_BYTES]
    received = gather(head, _TOPIC_BYTES + _LENGTH_BYTES + _INLINE_BYTES)
    topics = [text[:_TOPIC_BYTES].decode(errors="replace").strip() for text in received]
    for rank, other in zip(ranks, topics, strict=True):
        if other != topics[0]:
            raise DesyncError(
                f"rank {ranks[0]} is about to compare {topics[0]} where rank {rank} compares "
                f"{other}: all ranks must make the same calls in the same order"
            )
    received = [text[_TOPIC_BYTES:] for text in received]
    lengths = [int.from_bytes(text[:_LENGTH_BYTES], "big") for text in received]
    longest = max(lengths)
    if longest > _MAX_PAYLOAD_BYTES:
        raise malformed_message_error(
            ranks[lengths.index(longest)], topics[0], ValueError(f"it has {longest} bytes")
        )
    if longest <= _INLINE_BYTES:
        whole = [text[_LENGTH_BYTES:] for text in received]
    else:
        whole = gather(payload, longest)
    return [text[:length] for text, length in zip(whole, lengths, strict=True)]


def _own_groups(
    rank: int, topology: Topology, groups: Sequence[Axes], requests: Sequence[bytes]
) -> dict[Axes, tuple[int, ...]]:
    """Check the arguments of `Transport.open_subgroups`, described by each rank in `requests`.

    Returns:
        Members of `rank`'s groups by axes, including the group along all axes.
    """
    way_out = "pass the same topology and groups on every rank"
    received = decode_all(requests, bytes.decode, "open_subgroups")
    check_equal(f"open_subgroups on rank {rank}: the mesh", received, way_out)
    if topology.world_size != len(requests):
        raise ValueError(
            f"open_subgroups on rank {rank}: {topology} has "
            f"{counted(topology.world_size, 'rank')} and the transport {len(requests)}; pass a "
            f"topology of the transport's ranks"
        )
    for axes in groups:
        if len(set(axes) & set(topology.names)) != len(axes):
            raise ValueError(
                f"open_subgroups on rank {rank}: {axes!r} are not distinct axes of {topology}; "
                f"choose among {topology.names!r}"
            )
    return {axes: topology.group(axes, rank) for axes in (*groups, topology.names)}
