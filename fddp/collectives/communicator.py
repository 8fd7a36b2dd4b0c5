"""Communicators of operators: a dedicated transport over a group, opened once.

[Note: communicators of groups]
An operator that is called with a process group uses the communicator of that group and mesh. The
first such operator opens it, on all ranks. Neither this module nor a transport keeps a group alive,
and a communicator is closed when its group is gone. torch keeps some destroyed groups alive; their
communicators are closed when another communicator is opened.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fddp.collectives.call_cache import CallCache
from fddp.collectives.group_registry import GroupRegistry, is_destroyed
from fddp.collectives.operator_program import GroupPosition
from fddp.core.entrance import entrance
from fddp.core.plan.defaults import CAP_MB, MIB, timeout_error
from fddp.core.protocol.differences import check_equal
from fddp.core.schedule.topology import Topology
from fddp.errors import ClosedError, DesyncError, FddpError, error_text
from fddp.native.buffer_pool import BufferPool
from fddp.runtime.agreement import check_no_failure, exchange
from fddp.runtime.inputs import outside_tracing
from fddp.runtime.stopping import Stopping
from fddp.telemetry.flight.dump import dump_on_failure
from fddp.telemetry.flight.recorder import Recorder
from fddp.transport import Group, LoopbackGroup, TransportName, default_group, open_transport
from fddp.transport.lifetime.finalizer import on_finalize
from fddp.transport.mesh import Mesh, resolve_mesh, transport_error, usable_transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import Self

    from fddp.transport import Transport

_MOST_BETWEEN = 2**16  # calls between two handshakes that get numbers of their own
_POOLED_SIZES = 32  # buffer sizes kept, the most recently released
T = TypeVar("T")
_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()
_of_groups: GroupRegistry[Communicator] = GroupRegistry()


class Communicator:
    """A dedicated transport for operators over a group of ranks.

    The constructor is a collective call. Operators accept a communicator in place of a group.
    Operators on one communicator are matched across ranks in the order in which they are called;
    operators on different communicators are independent.

    Args:
        group: as for `GradSync`.
        mesh: the axes of the ranks, as for `GradSync`; the groups along them are opened, too.
        bucket_cap_mb: bucket size in MiB for operators without a plan.
        transport: as for `GradSync`.
        timeout_s: limit of each operation in seconds; None for the group's own limit.

    Attributes:
        rank: this rank's number.
        world_size: number of ranks in the group.
        topology: the axes of the ranks, or None.
        number: identifies the communicator in traced graphs of this process.
        transport: the transport that runs the collectives.
        begun: calls of all ranks that this rank has begun, including calls on earlier communicators
            of the group.
        belongs_to: weak reference to the group whose communicator this is; None if a caller created
            it.
        cap_bytes: `bucket_cap_mb` in bytes.
        calls: calls of operators, and their programs.
        recorder: flight recorder of the operators.
        requests: requests to stop, of this rank and of all.
        stopping: True from the operator over all ranks on in which a rank has asked all ranks to
            stop, alike on all ranks. In programs of JAX, read it once results have arrived.

    Raises:
        PlanMismatchError: ranks passed different axes or caps.
        ValueError, TypeError: an argument is invalid.
        SyncTimeoutError: some ranks did not open their communicator.

    Example:
        >>> import fddp, torch
        >>> def mean_rank(group):
        ...     with fddp.Communicator(group) as ranks:
        ...         return fddp.pmean(torch.tensor(float(ranks.rank)), ranks).item()
        >>> fddp.loopback(2, mean_rank)
        [0.5, 0.5]
    """

    title = "Communicator"

    @entrance
    def __init__(
        self,
        group: Group | None = None,
        *,
        mesh: Mesh | None = None,
        bucket_cap_mb: float = CAP_MB,
        transport: TransportName = "auto",
        timeout_s: float | None = None,
        _begun: int = 0,
    ) -> None:
        span = resolve_mesh(group, mesh)
        problem = span.problem or _cap_error(bucket_cap_mb) or timeout_error(timeout_s)
        name, usable_s = usable_transport(transport, span.group), None if problem else timeout_s
        self.cap_bytes = 0 if problem else int(bucket_cap_mb * MIB)
        self.topology = span.topology
        self.number = next(_numbers)
        self.label = str(self.number)  # tracers treat text as a constant, but not integers
        self.lock = threading.RLock()
        self.calls = CallCache(self.cap_bytes)
        self.known: dict[str, dict[Any, Any]] = {}  # see `cached`
        self.begun = _begun
        self.belongs_to: weakref.ref[Any] | None = None
        self.requests = Stopping()
        self._handshakes: dict[GroupPosition, int] = {}
        self._calls_since_handshake: dict[GroupPosition, int] = {}
        self._places: dict[tuple[str, ...], GroupPosition] = {}
        with outside_tracing(), torch.inference_mode(False):
            self.transport: Transport = open_transport(span.group, name, usable_s, self.title)
            try:
                self._agree(problem or transport_error(transport, self.transport))
                if self.topology is not None:
                    names = self.topology.names
                    subsets = (itertools.combinations(names, n) for n in range(1, len(names)))
                    groups = [*itertools.chain.from_iterable(subsets)]
                    self.transport.open_subgroups(self.topology, groups)
            except BaseException:
                self.transport.close()
                raise
        self.pool = BufferPool(self.transport.empty, _POOLED_SIZES)
        self.recorder: Recorder = Recorder("Communicator", self, self.transport)
        self._was_closed = on_finalize(self, self.transport.close)  # also if it is just dropped
        _by_number[self.number] = self

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.transport.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self.transport.world_size

    @property
    def closed(self) -> str | None:
        """Reason why the communicator is closed; None while it is open."""
        return self.transport.closed_by or None

    def at(self) -> tuple[int, str]:
        """Step and state for the flight recorder; a communicator has no steps."""
        return -1, "open" if self.closed is None else "closed"

    def place(self, axes: tuple[str, ...]) -> GroupPosition:
        """This rank's position among the ranks that meet along `axes`, in the topology's order."""
        known = self._places.get(axes)
        if known is None:
            ranks: Iterable[int] = range(self.world_size)
            if axes and self.topology is not None:
                ranks = self.topology.group(axes, self.rank)
            ranks = tuple(ranks)
            known = self._places[axes] = GroupPosition(axes, len(ranks), ranks.index(self.rank))
        return known

    def cached(self, cache: str, key: Any, make: Callable[[], T], most: int = 256) -> T:
        """Value of a key in a cache of at most `most` values; a full cache is emptied first."""
        known: dict[Any, T] = self.known.setdefault(cache, {})
        if key not in known:
            if len(known) >= most:
                known.clear()
            known[key] = make()
        return known[key]

    def advance_call_number(self, place: GroupPosition) -> int:
        """A number for a call whose ranks did a handshake; the same on all of them."""
        meetings = self._handshakes[place] = self._handshakes.get(place, 0) + 1
        self._calls_since_handshake[place] = 0
        return meetings * _MOST_BETWEEN

    def next_call_number(self, place: GroupPosition) -> int:
        """A number for a call that communicates in its backward only, and does no handshake now.
        It counts from the last handshake, so ranks that differ in such calls agree again after the
        next handshake."""
        between = self._calls_since_handshake[place] = (
            self._calls_since_handshake.get(place, 0) + 1
        ) % _MOST_BETWEEN
        return self._handshakes.get(place, 0) * _MOST_BETWEEN + between

    def note_failure(self, error: BaseException) -> None:
        """Note an error within an operator. Close if other ranks do not know of it: they expect
        this one in the collectives."""
        self.recorder.fail()
        if isinstance(error, FddpError):
            dump_on_failure(error)
        else:
            self.transport.close()

    def request_stop(self) -> None:
        """Ask all ranks to stop, by the next operator over all of them; see `stopping`.

        Does not communicate, and may be called in a signal handler or another thread. As
        `GradSync.request_stop`.
        """
        self.requests.ask()

    @property
    def stopping(self) -> bool:
        """True once a rank has asked all ranks to stop; see the class."""
        return self.requests.agreed

    def close(self) -> None:
        """Close connections and release memory. Idempotent."""
        self._was_closed()
        self.calls.clear()
        self.known.clear()
        self.pool.clear()
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        axes = f", {self.topology}" if self.topology else ""
        return f"Communicator(rank {self.rank} of {self.world_size}, {self.transport.name}{axes})"

    def _agree(self, problem: Exception | None) -> None:
        text = error_text(problem) if problem else ""
        mine = [text, self.begun, str(self.topology), self.cap_bytes]
        received = exchange(self.transport, mine, (str, int, str, int))
        problems, begun, topologies, caps_bytes = zip(*received, strict=True)
        check_no_failure(problems, "can't make a communicator", problem)
        check_equal(
            "ranks failed in different calls of operators on this group and can't continue: the "
            "number of calls",
            begun,
            "make a new group, or a fddp.Communicator, on every rank",
            DesyncError,
        )
        check_equal("the mesh of a communicator", topologies, "pass the same mesh on every rank")
        check_equal(
            "the bucket size of a communicator in bytes",
            caps_bytes,
            "pass the same bucket_cap_mb on every rank",
        )


def communicator_of(group: Group | Communicator | None, mesh: Mesh | None = None) -> Communicator:
    """The communicator of a group and mesh; see [Note: communicators of groups]. A collective call
    if it is the first one for them.

    Raises:
        ClosedError: `group` is a closed `Communicator`.
        TypeError: `group` is not a group.
        Exception: any error of the constructor of `Communicator`.
    """
    if isinstance(group, Communicator):
        return _given(group, mesh)
    if not isinstance(group, dist.ProcessGroup | DeviceMesh | LoopbackGroup | None):
        raise TypeError(
            f"group must be a process group, a DeviceMesh of one dimension, a Communicator or the "
            f"group of fddp.loopback, got a {type(group).__name__}"
            + ("; a group can't be batched by vmap" if isinstance(group, torch.Tensor) else "")
        )
    span = resolve_mesh(group, mesh)
    key: Any = default_group() if span.group is None else span.group
    if isinstance(key, DeviceMesh) and key.ndim == 1:
        key = key.get_group()
    if key is None:
        return Communicator(group, mesh=mesh)  # raises: there is no default group
    known = _of_groups.of(key)
    found = known.get(span.topology)
    if found is not None:
        found.transport.close_abandoned_in_interrupted_step()
    if found is None or found.closed is not None:
        begun = 0 if found is None else found.begun
        found = known[span.topology] = Communicator(group, mesh=mesh, _begun=begun)
        found.belongs_to = weakref.ref(key)
        # A step that fails on all ranks may close it on all of them, if any rank was interrupted in
        # one of its calls. The next operator opens another.
        found.transport.on_abandoned(partial(_close_on_all_ranks, weakref.ref(found)))
    return found


def _close_on_all_ranks(reference: weakref.ref[Communicator]) -> None:
    communicator = reference()
    if communicator is not None:
        communicator.close()
        communicator.begun = 0  # all ranks count from 0 again


def communicator_by_id(number: int) -> Communicator:
    """The communicator with this number.

    Raises:
        ClosedError: it no longer exists.
    """
    found = _by_number.get(number)
    if found is not None and found.belongs_to is not None and is_destroyed(found.belongs_to()):
        found.close()
        found = None
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
            f"omit mesh=, or pass it to Communicator"
        )
    return communicator


def _cap_error(cap_mb: object) -> ValueError | None:
    if isinstance(cap_mb, (int, float)) and 1 <= cap_mb * MIB < 2**63:
        return None
    return ValueError(f"bucket_cap_mb must be a number of MiB above 0, got {cap_mb!r}")
