"""Communicators of the operators: an own transport over a group, opened once.

[Note: communicators of groups]
Who passes a bare group gets the communicator that belongs to it and to the axes laid over it; it is
opened by the first operator that is called on them, by all ranks. It goes with the group: nothing
here, nor in a transport, holds a group alive, and a communicator is closed when its group is gone;
at the latest when a communicator is opened after the group was destroyed, because torch keeps some
destroyed groups.
"""

from __future__ import annotations

import itertools
import json
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from fddp.collectives.memory import Memory
from fddp.collectives.outside import outside_tracing
from fddp.collectives.programs import Place
from fddp.errors import ClosedError, PlanMismatchError
from fddp.failures import text_of
from fddp.meshes import Mesh, span_of
from fddp.planning import MIB_BYTES
from fddp.request import CAP_MB, LONGEST_S
from fddp.topology import Topology
from fddp.transports import Group, LoopbackGroup, TransportName, open_transport

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Self

    from fddp.transports import Transport

_MOST_BETWEEN = 2**16
_numbers = itertools.count()
_lock = threading.Lock()
_by_number: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
_of_groups: weakref.WeakKeyDictionary[Any, dict[Topology | None, Communicator]] = (
    weakref.WeakKeyDictionary()
)


class Communicator:
    """What operators run on: an own transport over a group of ranks, opened once.

    Making one is a collective call. Operators take it where they take a group; operators on one
    communicator meet in the order in which they are called, and never mix with those on another.

    Args:
        group: as for `GradSync`.
        mesh: the axes of the ranks, as for `GradSync`; the groups along them are opened, too.
        bucket_cap_mb: MiB at which a bucket is closed, of what operators plan themselves.
        transport: as for `GradSync`.
        timeout_s: seconds that any operation may take; None for the group's own limit.

    Attributes:
        rank: this rank's number.
        world_size: ranks in the group.
        topology: the axes of the ranks, or None.
        number: by which operators in traced graphs find it in this process.
        transport: carries the collectives.
        cap_bytes: `bucket_cap_mb` in bytes.

    Raises:
        PlanMismatchError: ranks passed different axes or caps.
        ValueError, TypeError: an argument makes no sense.
        SyncTimeoutError: some ranks did not open theirs.

    Example:
        >>> import fddp, torch
        >>> def mean_rank(group):
        ...     with fddp.Communicator(group) as ranks:
        ...         return fddp.pmean(torch.tensor(float(ranks.rank)), ranks).item()
        >>> fddp.loopback(2, mean_rank)
        [0.5, 0.5]
    """

    def __init__(
        self,
        group: Group | None = None,
        *,
        mesh: Mesh | None = None,
        bucket_cap_mb: float = CAP_MB,
        transport: TransportName = "auto",
        timeout_s: float | None = None,
    ) -> None:
        span = span_of(group, mesh)
        problem = span.problem or _problem(bucket_cap_mb, timeout_s)
        loopback = isinstance(span.group, LoopbackGroup)
        name = transport if transport in ("shm", "c10d") and not loopback else "auto"
        usable_s = None if problem else timeout_s
        self.cap_bytes = 0 if problem else int(bucket_cap_mb * MIB_BYTES)
        self.topology = span.topology
        self.number = next(_numbers)
        self.label = str(self.number)  # which tracers take for a constant, as no number is
        self.lock = threading.RLock()
        self.known: dict[Any, Any] = {}  # what operators have worked out; see `patterns.py`
        self._meetings: dict[Place, int] = {}
        self._between: dict[Place, int] = {}  # calls since the last meeting that did not meet
        self._places: dict[tuple[str, ...], Place] = {}
        with outside_tracing(), torch.inference_mode(False):
            self.transport: Transport = open_transport(span.group, name, usable_s)
            if problem is None and transport not in ("auto", self.transport.name):
                problem = ValueError(
                    f"transport={transport!r} does not fit this group; pass 'auto' or "
                    f"{self.transport.name!r}"
                )
            try:
                self._agree(problem)
                self._divide()
            except BaseException:
                self.transport.close()
                raise
        self.memory = Memory(self.transport)
        # One that is dropped frees its connections, too.
        weakref.finalize(self, self.transport.close).atexit = False
        _by_number[self.number] = self

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.transport.rank

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return self.transport.world_size

    @property
    def closed(self) -> str | None:
        """Why it can't be used any more; None while it can."""
        return self.transport._closed

    def place(self, axes: tuple[str, ...]) -> Place:
        """This rank's place among the ranks that meet along these axes, of the topology and in its
        order."""
        known = self._places.get(axes)
        if known is None:
            ranks: Iterable[int] = range(self.world_size)
            if axes and self.topology is not None:
                ranks = self.topology.group(axes, self.rank)
            ranks = tuple(ranks)
            known = self._places[axes] = Place(axes, len(ranks), ranks.index(self.rank))
        return known

    def met(self, place: Place) -> int:
        """The ranks of a place have met: a number for their call, the same on all of them."""
        meetings = self._meetings[place] = self._meetings.get(place, 0) + 1
        self._between[place] = 0
        return meetings * _MOST_BETWEEN

    def passed(self, place: Place) -> int:
        """A number for a call in which they do not meet, as it will in its backward. It counts from
        the last meeting, so that ranks which differ in such calls agree again after the next."""
        between = self._between[place] = (self._between.get(place, 0) + 1) % _MOST_BETWEEN
        return self._meetings.get(place, 0) * _MOST_BETWEEN + between

    def close(self) -> None:
        """Frees connections and memory; a second call does nothing."""
        self.known.clear()
        self.memory.clear()
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        axes = f", {self.topology}" if self.topology else ""
        return f"Communicator(rank {self.rank} of {self.world_size}, {self.transport.name}{axes})"

    def _agree(self, problem: Exception | None) -> None:
        mine = [str(self.topology), self.cap_bytes, text_of(problem) if problem else ""]
        told = [json.loads(text) for text in self.transport.exchange(json.dumps(mine).encode())]
        if problem is not None:
            raise problem
        for rank, theirs in enumerate(told):
            if theirs[2]:
                raise PlanMismatchError(f"rank {rank} can't make a communicator: {theirs[2]}")
            if theirs != told[0]:
                raise PlanMismatchError(
                    f"a communicator has mesh {told[0][0]} and buckets of {told[0][1]} bytes on "
                    f"rank 0, and mesh {theirs[0]} and {theirs[1]} bytes on rank {rank}; pass the "
                    f"same mesh and bucket_cap_mb on every rank"
                )

    def _divide(self) -> None:
        if self.topology is None:
            return
        names = self.topology.names
        groups = [
            some for size in range(1, len(names)) for some in itertools.combinations(names, size)
        ]
        self.transport.divide(self.topology, groups)


def communicator_of(group: Group | Communicator | None, mesh: Mesh | None) -> Communicator:
    """What an operator runs on that was given a group and axes.

    See [Note: communicators of groups].

    Raises:
        ClosedError: a `Communicator` that was closed.
        TypeError: `group` is nothing to communicate on.
        Exception: as from making a `Communicator`.
    """
    if isinstance(group, Communicator):
        return _given(group, mesh)
    if not isinstance(group, dist.ProcessGroup | DeviceMesh | LoopbackGroup | None):
        raise TypeError(
            f"group must be a process group, a DeviceMesh of one dimension, a Communicator or the "
            f"group of fddp.loopback, got a {type(group).__name__}"
            + ("; a group can't be batched by vmap" if isinstance(group, torch.Tensor) else "")
        )
    span = span_of(group, mesh)
    key: Any = span.group if span.group is not None else dist.group.WORLD
    if isinstance(key, DeviceMesh) and key.ndim == 1:
        key = key.get_group()
    if key is None:
        return Communicator(group, mesh=mesh)  # which says what is missing
    known = _of_groups.get(key)
    if known is None:
        known = _newly_known(key)
    found = known.get(span.topology)
    if found is None or found.closed is not None:
        found = known[span.topology] = Communicator(group, mesh=mesh)
    return found


def _newly_known(key: Any) -> dict[Topology | None, Communicator]:
    """Where the communicators of a group will be kept; those of destroyed groups are closed."""
    with _lock:
        registered = distributed_c10d._world.pg_map
        destroyed = [
            group
            for group in _of_groups
            if isinstance(group, dist.ProcessGroup) and group not in registered
        ]
        for group in destroyed:
            _close_all(_of_groups.pop(group))
        known = _of_groups.setdefault(key, {})
        weakref.finalize(key, _close_all, known).atexit = False
        return known


def numbered(number: int) -> Communicator:
    """The communicator of this number.

    Raises:
        ClosedError: it is gone.
    """
    found = _by_number.get(number)
    if found is None:
        raise ClosedError(
            f"communicator {number} of this process is gone, with its group; trace or compile anew"
        )
    return found


def _given(communicator: Communicator, mesh: Mesh | None) -> Communicator:
    if communicator.closed is not None:
        raise ClosedError(
            f"{communicator} is closed ({communicator.closed}); make a new one on every rank"
        )
    axes = mesh if isinstance(mesh, Topology | None) else Topology.from_group(mesh)
    if axes is not None and axes != communicator.topology:
        raise ValueError(
            f"mesh={mesh} was passed with a communicator whose mesh is {communicator.topology}; "
            f"leave mesh= out, or give it to Communicator"
        )
    return communicator


def _problem(cap_mb: object, timeout_s: object) -> Exception | None:
    if not (isinstance(cap_mb, (int, float)) and 1 <= cap_mb * MIB_BYTES < 2**63):
        return ValueError(f"bucket_cap_mb must be a number of MiB above 0, got {cap_mb!r}")
    if timeout_s is None or (isinstance(timeout_s, (int, float)) and 0 < timeout_s <= LONGEST_S):
        return None
    return ValueError(
        f"timeout_s must be above 0 and at most {LONGEST_S} seconds, got {timeout_s!r}"
    )


def _close_all(communicators: dict[Topology | None, Communicator]) -> None:
    while communicators:
        communicators.popitem()[1].close()
