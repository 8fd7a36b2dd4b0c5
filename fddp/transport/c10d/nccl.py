"""Communicators over nccl.

[Note: shared communicators]
Operations of NCCL are matched by the order in which they are issued on a communicator, and nothing
shows that ranks have issued them in different orders. A synchroniser issues some of them when
earlier ones have finished, which happens at other times on other ranks, so that it has a
communicator of its own. The transports of `fddp.broadcast` and `fddp.reconcile` end with the call,
and share one for each group, which lives as long as the group. `order` is a checksum of the order
in which they were used. Ranks compare it when they open such a transport. If it differs, or if a
failure has ended the communicator on some rank, all ranks take a new one.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fddp.errors import TransformError
from fddp.native import extension
from fddp.native.capture import is_capturing
from fddp.transport.c10d.communicator import (
    Communicator,
    CommunicatorSpec,
    PendingWorks,
    bytes_of,
)
from fddp.transport.group_backend import backend_of
from fddp.transport.lifetime import threads
from fddp.transport.lifetime.finalizer import on_finalize
from fddp.transport.lifetime.fork import register_fork_owner
from fddp.transport.torch_private import store_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from fddp.transport.c10d.communicator import Pending
    from fddp.transport.operation import Operation


class NcclBackends:
    """NCCL backends by ranks, of one transport or shared by those of a group.

    Args:
        is_shared: True if they live as long as a group; see [Note: shared communicators].

    Attributes:
        generation: number of times that the backends were replaced.
        order: checksum of the transports that have issued operations, in this order.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self.is_shared = is_shared
        self.generation = self.order = 0
        self._lock = threading.Lock()
        self._made: dict[tuple[int, ...], Any] = {}
        self._devices: set[tuple[tuple[int, ...], torch.device]] = set()  # connected, by ranks
        register_fork_owner(self)  # [Note: forks]

    def get(self, generation: int, ranks: tuple[int, ...], make: Callable[[], Any]) -> Any:
        """Return the backend of these ranks; RuntimeError if it was replaced."""
        with self._lock:
            if generation != self.generation:
                raise RuntimeError("the NCCL communicator has ended")
            if ranks not in self._made:
                self._made[ranks] = make()
            return self._made[ranks]

    def note(self, label: str) -> None:
        """Note an operation of the transport with a label, the same on all ranks."""
        self.order = zlib.crc32(label.encode(), self.order)

    def connects(self, ranks: tuple[int, ...], device: torch.device) -> bool:
        """Return True if a backend is not connected on a device yet, and note that it is.

        Raises:
            TransformError: it is not, and a graph is captured there.
        """
        is_new = (ranks, device) not in self._devices
        if is_new and is_capturing(device.type):
            raise TransformError(
                f"the first operation on {device} connects the ranks, which can't be captured in a "
                f"graph; call it once before the capture"
            )
        self._devices.add((ranks, device))
        return is_new

    def replace(self, generation: int, *, failed: bool = True) -> Callable[[], None]:
        """Leave the backends of earlier generations, and return a function that ends them, and with
        `failed` their operations. It may block."""
        with self._lock:
            if generation <= self.generation:
                return lambda: None
            self.generation, self.order = generation, 0
            left, self._made, self._devices = [*self._made.values()], {}, set()
        return partial(_end, left, failed=failed)

    def disown(self) -> None:
        """Never free inherited backends, see [Note: forks]."""
        for backend in self._made.values():
            extension.compiled.BackendRelease(backend).leak()


_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, NcclBackends] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def shared_backends(group: dist.ProcessGroup) -> NcclBackends:
    """Return the NCCL backends that transports of a group share. They end with the group."""
    with _lock:
        found = _shared.get(group)
        if found is None:
            found = _shared[group] = NcclBackends(is_shared=True)
            on_finalize(group, partial(_end_with_group, found))
        return found


def _end_with_group(shared: NcclBackends) -> None:
    end = shared.replace(shared.generation + 1, failed=False)
    threads.start_thread(end, "fddp-nccl-close", lambda: None)


def _end(backends: list[Any], *, failed: bool) -> None:
    while backends:
        backend = backends.pop()
        if failed:
            backend.abort()
        else:
            backend.shutdown()


class NcclCommunicator(Communicator):
    """nccl, with the options of the group's own backend.

    Args:
        spec: parameters of the communicator.
        backends: where its backend is kept.
        generation: that of `backends` on which all ranks have agreed.
        device_type: type of the devices.
    """

    _averages = True
    uses_streams = True
    _is_open = True

    def __init__(
        self, spec: CommunicatorSpec, backends: NcclBackends, generation: int, device_type: str
    ) -> None:
        super().__init__(None, spec.rank, spec.ranks)
        self._backends, self._generation = backends, generation
        device = torch.device(device_type)
        store = spec.store
        if backends.is_shared:
            name = f"fddp/nccl/{generation}/{spec.store_prefix}"
            store = dist.PrefixStore(name, store_of(spec.group))
        self._make = partial(_new_backend, spec, store, device)
        self._label = str(spec.membership.count)

    @property
    def backend(self) -> Any:
        """The backend of torch. RuntimeError if the communicator was closed or has ended."""
        if not self._is_open:
            raise RuntimeError("the communicator was closed")
        return self._backends.get(self._generation, self._ranks, self._make)

    def connect(self, device: torch.device) -> None:
        backend = self.backend
        if self._backends.connects(self._ranks, device):
            if backend.options.split_from is not None:
                # NCCL may deadlock if the parent has operations in flight.
                torch.accelerator.synchronize(device)
            backend.eager_connect_single_device(device)

    def issue(self, operation: Operation) -> Pending:
        self.connect(operation.tensor.device)
        self._backends.note(self._label)
        return super().issue(operation)

    def _reduce_scatter(self, operation: Operation) -> PendingWorks:
        if operation.tree is not None:
            return super()._reduce_scatter(operation)
        return self._scatter(operation)

    def _all_gather(self, operation: Operation) -> PendingWorks:
        own, whole = operation.chunks[self._place], operation.tensor
        options = c10d.AllgatherOptions()
        work = self.backend._allgather_base(bytes_of(whole), bytes_of(own), options)
        return PendingWorks((work,))

    def free(self, *, failed: bool, over: threading.Event) -> Callable[[], None]:
        self._is_open = False
        if self._backends.is_shared and not failed:
            return lambda: None
        return self._backends.replace(self._generation + 1, failed=failed)


def _new_backend(spec: CommunicatorSpec, store: dist.Store, device: torch.device) -> Any:
    """Make the backend of some ranks of a group, which connects later.

    Where the group is bound to a device, its own communicator is connected on all ranks, and is
    split. torch splits new groups on the same condition.
    """
    theirs = backend_of(spec.group, device)
    options = type(theirs.options)()
    options.is_high_priority_stream = theirs.options.is_high_priority_stream
    options.config = theirs.options.config
    options._timeout = timedelta(seconds=spec.timeout_s)
    members = dist.get_process_group_ranks(spec.group)
    options.global_ranks_in_group = [members[rank] for rank in spec.ranks]
    if spec.group.bound_device_id is not None and theirs.supports_splitting:
        options.split_from, options.split_color = theirs, spec.ranks[0]
    return type(theirs)(store, spec.place, len(spec.ranks), options)
