"""Communicators over some ranks of a group, of the kind that each of its backends takes."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fddp.native import extension
from fddp.transport.c10d.communicator import Communicator, CommunicatorSpec
from fddp.transport.c10d.gloo import GlooCommunicator
from fddp.transport.c10d.nccl import NcclBackends, NcclCommunicator
from fddp.transport.c10d.rendezvous import connect_with_abort
from fddp.transport.c10d.shared_memory import ShmCommunicator
from fddp.transport.group_backend import backend_of
from fddp.transport.torch_private import destroy, process_groups

if TYPE_CHECKING:
    from collections.abc import Callable

    from fddp.transport.c10d.communicator import PendingWorks
    from fddp.transport.operation import Operation


def new_communicators(
    spec: CommunicatorSpec, backends: dict[str, str], nccl: NcclBackends, generation: int
) -> dict[str, Communicator]:
    """Create one communicator for each distinct backend; return them by device type. A collective
    call of the ranks.

    Args:
        spec: the ranks.
        backends: names by device type.
        nccl: backends over nccl of the transport.
        generation: the generation of these on which the ranks have agreed.
    """
    makers: dict[str, Callable[[CommunicatorSpec], Communicator]] = {
        "fddp": _new_fddp_communicator,
        "gloo": GlooCommunicator,
        "nccl": partial(
            NcclCommunicator,
            backends=nccl,
            generation=generation,
            device_type=next((d for d, name in backends.items() if name == "nccl"), ""),
        ),
    }
    names = dict.fromkeys(backends.values())
    by_name = {name: makers[name](spec) for name in names if name in makers}
    others = {device: name for device, name in backends.items() if name not in makers}
    if others:
        config = ",".join(f"{device}:{name}" for device, name in others.items())
        by_name |= dict.fromkeys(others.values(), _GroupCommunicator(spec, config))
    return {device: by_name[name] for device, name in backends.items()}


def _new_fddp_communicator(spec: CommunicatorSpec) -> Communicator:
    backend = backend_of(spec.group, torch.device("cpu"))
    if not isinstance(backend, extension.compiled.ShmBackend):
        return GlooCommunicator(spec)  # the ranks do not share memory
    part, _ = connect_with_abort(
        lambda store: backend.split(store, spec.ranks, spec.timeout_s),
        spec.store,
        spec.timeout_s,
        spec.check_peers,
    )
    return ShmCommunicator(part, spec.rank, spec.ranks, of_all_hosts=True)


class _GroupCommunicator(Communicator):
    """Any other backend, through `new_group`, a collective call of all members."""

    uses_streams = True
    _scatters = True  # False once it is known that the backend has no reduce-scatter

    def __init__(self, spec: CommunicatorSpec, backend: str) -> None:
        members = dist.get_process_group_ranks(spec.group)
        group = dist.new_group(
            [members[rank] for rank in spec.ranks],
            timeout=timedelta(seconds=spec.timeout_s),
            backend=backend,
            use_local_synchronization=len(spec.ranks) < dist.get_world_size(),
        )
        super().__init__(group, spec.rank, spec.ranks)

    def connect(self, device: torch.device) -> None:
        """As in the base class, by a mean of the numbers of the ranks. It shows whether the backend
        divides sums."""
        mean = torch.full((1,), float(self._place), device=device)
        options = c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
        try:
            self.backend.allreduce([mean], options).wait()
        except (RuntimeError, ValueError):  # on all ranks, before anything is sent
            return
        self._averages = mean.item() == (len(self._ranks) - 1) / 2

    def _reduce_scatter(self, operation: Operation) -> PendingWorks:
        if operation.tree is None and operation.tensor.device.type != "cpu" and self._scatters:
            try:
                return self._scatter(operation)
            except RuntimeError as error:  # on all ranks, before anything is sent
                if not _is_unsupported(error):
                    raise
                self._scatters = False
        return super()._reduce_scatter(operation)

    def _end(self, backend: Any, *, failed: bool) -> None:
        if backend in process_groups():
            destroy(backend)


def _is_unsupported(error: RuntimeError) -> bool:
    """Return True if a backend reports that it has no such operation."""
    texts = ("not support", "not implement", "missing implementation")
    return isinstance(error, NotImplementedError) or any(text in str(error) for text in texts)
