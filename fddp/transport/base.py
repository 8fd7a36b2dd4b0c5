"""The contract between the runtime and whatever carries its tensors from rank to rank.

A `Transport` starts collectives and returns a `Work` for each. Collectives are matched across ranks
by the order in which they were issued on their transport, and on nothing else: two transports over
one group never mix, even where their operations interleave differently on different ranks. A
transport may be used from several threads, but issuing in the same order everywhere is the caller's
duty.

After `open_subgroups`, collectives can also run along some axes of a topology: in the group of
ranks that differ from this one in these axes only. Then issue order counts for each group by
itself, and groups do not wait for each other.

What every transport checks, and how the caller's tensors become what travels, is decided here once.
A backend implements `_start`, `_connect` and `_release`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from fddp.core.protocol.messages import malformed_message_error
from fddp.errors import ClosedError, DesyncError, InternalError, PlanMismatchError
from fddp.telemetry.waits import LEAST_S, note_wait
from fddp.transport.operation import Operation, check_operation, check_tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor
    from typing_extensions import Self

    from fddp.core.schedule.topology import Topology
    from fddp.transport.liveness.status import TransportStatus
    from fddp.transport.operation import OperationKind

_REAL_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_LENGTH_BYTES = 8  # that tell how long a payload is
_MOST_BYTES = 2**31  # of a payload; more is taken for nonsense, before there is memory for it
_TOPIC_BYTES = 16  # that tell what it is for
_INLINE_BYTES = 1000  # of a payload that travel with its length


class Work(ABC):
    """A collective in flight."""

    _results: tuple[Tensor, ...] = ()

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
        start_s = perf_counter()
        self._wait(what)
        end_s = perf_counter()
        if end_s - start_s > LEAST_S:
            note_wait(start_s, end_s)

    @abstractmethod
    def _wait(self, what: str) -> None:
        """As `wait`, which notes how long it takes; see [Note: time spent waiting]."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` has nothing left to wait for; does not block, and never raises.

        Either all that other ranks send has arrived (the tensor is to be read after `wait`), or
        `wait` raises at once.
        """

    @property
    @abstractmethod
    def done_s(self) -> float | None:
        """When all had arrived, in `time.perf_counter()` seconds; read it after `wait`.

        None where no stamp was asked for.
        """

    @property
    def results(self) -> list[Tensor]:
        """What an `all_gather` brought, by rank, as views of one buffer; read after `wait`.

        Empty for other operations.
        """
        return list(self._results)


class Transport(ABC):
    """An own communicator over a group of ranks; see the module's text.

    Attributes:
        name: "shm", "c10d", "shm+c10d" (shm within hosts, c10d across) or "loopback".
        reason: why it is this one, in a few words.
        rank: this rank's number within the group.
        world_size: ranks in the group.
        timeout_s: the longest that an operation may take.
        control_device: where small tensors that the host will read should live.
        status: what this rank is waiting for on it, for the errors of others.
    """

    status: TransportStatus
    name: str
    reason: str
    rank: int
    world_size: int
    timeout_s: float
    control_device: torch.device

    #: reason why no new operation may start; empty while one may
    closed_by: str = ""

    _topology: Topology | None = None
    _groups: Mapping[tuple[str, ...], tuple[int, ...]] = MappingProxyType({})  # ranks by axes

    @property
    def label(self) -> str:
        """Name of this transport in error texts, such as "GradSync #1"; empty if it has none."""
        return self.status.label

    def step_scope(self, step: int | None) -> StepScope:
        """Context in which this rank's waits end with an error once another rank fails `step`, or
        are not ended by failed steps if it is None."""
        return StepScope(self.status, step)

    def enter_step(self, step: int) -> None:
        """Let waits end with an error once another rank fails `step`."""
        self.status.in_step = step

    def leave_step(self) -> None:
        """Undo `enter_step`."""
        self.status.in_step = None

    def open_subgroups(self, topology: Topology, groups: Collection[tuple[str, ...]]) -> None:
        """Open the groups along each of `groups`, tuples of axes; every rank calls this; blocks.

        For each tuple a rank belongs to one group, `topology.group(axes, rank)`. A later call with
        the same topology adds groups; one with another replaces it, and its groups. Connections
        that are open between the same ranks are used again.

        Args:
            topology: its world size is the transport's.
            groups: tuples of names of axes; that of all axes need not be among them.

        Raises:
            PlanMismatchError: ranks passed different topologies or groups.
            ValueError: the topology has another world size, or lacks one of the axes.
            FddpError: as an operation that fails.
        """
        groups_sorted = sorted(set(groups))
        self._check_equal(f"{topology} divided along {groups_sorted}")
        if topology.world_size != self.world_size:
            raise ValueError(
                f"divide on rank {self.rank}: {topology} has {topology.world_size} ranks and the "
                f"transport {self.world_size}; pass a topology of the transport's ranks"
            )
        for axes in groups_sorted:
            if len(set(axes) & set(topology.names)) != len(axes):
                raise ValueError(
                    f"divide on rank {self.rank}: {axes!r} are not distinct axes of {topology}; "
                    f"choose among {topology.names!r}"
                )
        ranks = {axes: topology.group(axes, self.rank) for axes in (*groups_sorted, topology.names)}
        self._connect([group for group in ranks.values() if 1 < len(group) < self.world_size])
        known = self._groups if topology == self._topology else {}
        self._topology, self._groups = topology, {**known, **ranks}

    def all_reduce(
        self,
        tensor: Tensor,
        *,
        axes: tuple[str, ...] = (),
        average: bool = False,
        record_time: bool = False,
        wait_soon: bool = False,
    ) -> Work:
        """Start replacing `tensor` by its sum over ranks, in place.

        Args:
            tensor: contiguous, of one of `SUMMABLE_DTYPES`, the same shape and dtype on all ranks;
                not to be touched until the work was waited for.
            axes: the ranks: () for all, else the group along axes that `open_subgroups` was given.
            average: divide the sum by the number of these ranks; for floating and complex dtypes.
            record_time: record when it finished, see `Work.done_s`.
            wait_soon: whether the caller is about to wait, so that the work may be left to that;
                other ranks may be held up until it does.
        """
        ranks = self._groups.get(axes) or self._ranks("all_reduce", axes)
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
        axes: tuple[str, ...] = (),
        average: bool = False,
        ordered: bool = False,
        record_time: bool = False,
        wait_soon: bool = False,
    ) -> Work:
        """Start replacing this rank's own chunk of `buffer` by its sum over ranks, in place.

        The buffer is cut into as many equal chunks as ranks take part; the i-th of these ranks in
        ascending order owns chunk i. What the other chunks then hold is undefined.

        Args:
            buffer: as for `all_reduce`, and of one dimension, its length a multiple of the number
                of ranks that take part.
            axes: as for `all_reduce`.
            average, record_time, wait_soon: as for `all_reduce`.
            ordered: whether the sum has one association, whatever the transport: within the
                innermost axis in rank order, then across; float16 and bfloat16 are then added up in
                float32 and rounded once. With `axes=()` ranks lie along one axis. See
                [Note: one association] in `ordered_sum.py`.
        """
        ranks = self._groups.get(axes) or self._ranks("reduce_scatter", axes)
        association = self._association(axes) if ordered else ()
        return self._launch(
            Operation(
                "reduce_scatter",
                buffer,
                ranks,
                average=average,
                record_time=record_time,
                wait_soon=wait_soon,
                association=association,
            )
        )

    def all_gather_in_place(
        self,
        buffer: Tensor,
        *,
        axes: tuple[str, ...] = (),
        record_time: bool = False,
        wait_soon: bool = False,
    ) -> Work:
        """Start filling `buffer` with every rank's own chunk of it; see `reduce_scatter`.

        Args:
            buffer: as for `reduce_scatter`, of any dtype; this rank's own chunk is read, the
                others are written.
            axes, record_time, wait_soon: as for `all_reduce`.
        """
        ranks = self._groups.get(axes) or self._ranks("all_gather", axes)
        return self._launch(
            Operation("all_gather", buffer, ranks, record_time=record_time, wait_soon=wait_soon)
        )

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of shape `(numel,)` where operations are fastest; contents are undefined."""
        return torch.empty(numel, dtype=dtype, device=device)

    def all_gather(
        self, tensor: Tensor, *, record_time: bool = False, fixed_size: bool = False
    ) -> Work:
        """Start collecting every rank's `tensor`; `work.results[r]` is a copy of rank r's.

        Args:
            tensor: contiguous, any dtype, the same shape and dtype on all ranks.
            record_time: record when it finished, see `Work.done_s`.
            fixed_size: whether it is the library's own, of a size on which ranks agree whatever
                they are about to do; see `Operation`.
        """
        check_tensor("all_gather", tensor, self.rank)
        rows = tensor.new_empty((self.world_size, *tensor.shape))
        rows[self.rank].copy_(tensor)
        buffer = rows.view(-1)
        work = self._launch(
            Operation(
                "all_gather", buffer, self._everyone, record_time=record_time, fixed_size=fixed_size
            )
        )
        work._results = rows.unbind(0)
        return work

    def broadcast(self, tensor: Tensor, src: int, *, record_time: bool = False) -> Work:
        """Start replacing `tensor` by rank `src`'s, in place.

        Args:
            tensor: contiguous, any dtype, the same shape and dtype on all ranks.
            src: rank within the group, the same on all ranks.
            record_time: record when it finished, see `Work.done_s`.
        """
        if not 0 <= src < self.world_size:
            raise ValueError(
                f"broadcast on rank {self.rank}: src={src} is not a rank of the group; "
                f"choose one from 0 to {self.world_size - 1}"
            )
        return self._launch(
            Operation("broadcast", tensor, self._everyone, src=src, record_time=record_time)
        )

    def exchange(self, payload: bytes, topic: str = "terms") -> list[bytes]:
        """Give `payload` to every rank and return every rank's, in rank order; blocks.

        The lengths may differ and may be zero. A small collective on `control_device`, and another
        one if a payload does not fit into it.

        Args:
            payload: any bytes.
            topic: what ranks compare, in at most 16 characters; ranks meet in the same only.

        Raises:
            DesyncError: ranks compare different things; on every rank. No payload was taken.
            FddpError: as an operation that fails.
        """
        if len(topic.encode()) > _TOPIC_BYTES:
            raise InternalError(f"ranks would compare {topic!r}, of more than {_TOPIC_BYTES} bytes")
        what = f"exchange of {topic} ({len(payload)} bytes)"
        length = len(payload).to_bytes(_LENGTH_BYTES, "big")
        head = topic.encode().ljust(_TOPIC_BYTES) + length + payload[:_INLINE_BYTES]
        received = self._gather_bytes(head, _TOPIC_BYTES + _LENGTH_BYTES + _INLINE_BYTES, what)
        topics = [text[:_TOPIC_BYTES].decode(errors="replace").strip() for text in received]
        for rank, other in enumerate(topics):
            if other != topics[0]:
                raise DesyncError(
                    f"rank 0 is about to compare {topics[0]} where rank {rank} compares {other}: "
                    f"all ranks must make the same calls in the same order"
                )
        received = [text[_TOPIC_BYTES:] for text in received]
        lengths = [int.from_bytes(text[:_LENGTH_BYTES], "big") for text in received]
        longest = max(lengths)
        if longest > _MOST_BYTES:
            raise malformed_message_error(
                lengths.index(longest), topics[0], ValueError(f"it has {longest} bytes to tell")
            )
        if longest <= _INLINE_BYTES:
            whole = [text[_LENGTH_BYTES:] for text in received]
        else:
            whole = self._gather_bytes(payload, longest, what)
        return [text[:length] for text, length in zip(whole, lengths, strict=True)]

    def _gather_bytes(self, payload: bytes, width: int, what: str) -> list[bytes]:
        padded = torch.frombuffer(bytearray(payload.ljust(width, b"\0")), dtype=torch.uint8)
        work = self.all_gather(padded.to(self.control_device), fixed_size=True)
        work.wait(what)
        return [row.cpu().numpy().tobytes() for row in work.results]

    @abstractmethod
    def publish_step_failure(self, step: int, text: str) -> None:
        """Tell ranks that wait elsewhere, in the loss function of a step, that it has failed here.

        Args:
            step: its number.
            text: what went wrong.
        """

    def close(self, reason: str = "close() was called") -> None:
        """Free threads, sockets and buffers; a second call does nothing.

        Args:
            reason: why, for the errors of later operations.

        Operations that have not finished are given up, and raise `ClosedError` when waited for;
        ranks that wait for them see this rank as lost.
        """
        if not self.closed_by:
            self.closed_by = reason or "close() was called"
            self._release()

    def abandon(self, reason: str) -> None:
        """As `close`, in the middle of operations that other ranks wait for: they are told."""
        self.close(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _start(self, operation: Operation) -> Work:
        """Hand a checked operation to the backend."""

    @abstractmethod
    def _connect(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Make ready for operations in `groups`, each the ranks of one that this rank is in."""

    @abstractmethod
    def _release(self) -> None:
        """Free what the backend holds; called once."""

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks' numbers in the job, by rank."""
        return self._everyone

    @cached_property
    def size_cache(self) -> dict[object, object]:
        """What all ranks are known to hand over alike where callers decide about sizes: operations
        of hooks, buffers of modules."""
        return {}

    @cached_property
    def _everyone(self) -> tuple[int, ...]:
        return tuple(range(self.world_size))

    def _launch(self, operation: Operation) -> Work:
        if self.closed_by:
            raise ClosedError(
                f"{operation.kind} on rank {self.rank}: this {self.name} transport is closed "
                f"({self.closed_by}); make what uses it anew, on a working group"
            )
        tensor = operation.tensor
        is_usual = (
            operation.kind == "all_reduce"
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

    def _association(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Sizes of the axes along which ranks lie, outermost first."""
        if not axes or self._topology is None:
            return (self.world_size,)
        sizes = (size for name, size in self._topology.axes if name in axes and size > 1)
        return tuple(sizes) or (1,)

    def _check_equal(self, text: str) -> None:
        """Raise on every rank where `text` is not the same on all."""
        first, *others = [payload.decode() for payload in self.exchange(text.encode(), "groups")]
        for rank, other in enumerate(others, start=1):
            if other != first:
                raise PlanMismatchError(
                    f"divide on rank {self.rank}: rank 0 has {first}, rank {rank} has {other}; "
                    "pass the same topology and groups on every rank"
                )

    def _ranks(self, kind: OperationKind, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that take part along `axes`."""
        if not axes:
            return self._everyone
        ranks = self._groups.get(axes)
        if ranks is None:
            opened = ", ".join(map(repr, self._groups)) or "none"
            raise ValueError(
                f"{kind} on rank {self.rank}: no group along {axes!r} was opened; open: {opened}; "
                "name these axes to divide"
            )
        return ranks


class StepScope:
    """Context manager of `Transport.step_scope`."""

    __slots__ = ("_outer", "_status", "_step")

    def __init__(self, status: TransportStatus, step: int | None) -> None:
        self._status = status
        self._step = step

    def __enter__(self) -> None:
        self._outer = self._status.in_step
        self._status.in_step = self._step

    def __exit__(self, *_: object) -> None:
        self._status.in_step = self._outer


class _LoneWork(Work):
    """An operation in a group of one rank: nothing to do."""

    done = True

    def __init__(self, record_time: bool) -> None:
        self._done_s = perf_counter() if record_time else None

    @property
    def done_s(self) -> float | None:
        return self._done_s

    def wait(self, what: str) -> None:
        return

    _wait = wait
